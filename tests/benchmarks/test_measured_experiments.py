"""The measured tables and ratios of docs/experiments and docs/tune.md are those of the records."""

import collections
import itertools
import json
import math

import jax
import pytest

from benchmarks import decisions, recorded
from benchmarks.dense import MODELS
from pallas_patch_embed.backends import BACKENDS, cuda, stored, tiles
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import H100, H200
from pallas_patch_embed.commands.tune import command
from pallas_patch_embed.layers.dense import problem_of
from tests.benchmarks.measured import embed_runs, few_images, records
from tests.pages import rows_of
from tests.repository import ROOT

TUNED = ("mosaic_sm90", "cuda", "triton")
DTYPES = ("bfloat16", "float8_e4m3fn", "int8")

# The problems that a tuned file can have: a backend refuses the others.
PROBLEMS = {"mosaic_sm90": 162, "cuda": 198, "triton": 306}


def tuned_results(chip):
    """Yields (name of a problem, result) for every named problem that a package's file has."""
    measured = stored.read(decisions.results_of(chip)).results
    for what, task in command.list_tasks(backends=TUNED):
        if result := measured.get(task.key):
            yield what, result


def microseconds(times):
    return " / ".join(f"{1e3 * time['milliseconds']:.2f}" for time in times.values())


def table_row(what, result):
    """Returns a row of docs/experiments/tune.md: a config that replaces the heuristic's."""
    backend, dtype, problem = what.split(", ", 2)
    problem = problem.replace(" images given as patches", "")
    problem = problem.replace(" images cut by the kernel", ", cut by the kernel")
    before = next(iter(result.times.values()))
    after = result.times[str(BACKENDS[backend].config_of(result.config))]
    ratios = [after[r]["milliseconds"] / before[r]["milliseconds"] for r in after if r in before]
    ratio = " / ".join(f"{x:.2f}" for x in ratios)
    return [f"{backend}, {dtype}", problem, microseconds(before), microseconds(after), ratio]


@pytest.mark.skipif(cuda.missing() is not None, reason="the CUDA library is not built")
@pytest.mark.parametrize("chip, name", [(H100, "H100"), (H200, "H200")])
def test_the_page_of_configs_lists_those_of_a_packages_file(chip, name):
    stated = rows_of("docs/experiments/tune.md", f"The file for the {name}")[2:]
    first = ""
    for row in stated:
        first = row[0] = row[0] or first
    # Several problems may share a result; the page lists it once.
    found = {r.key: table_row(what, r) for what, r in reversed([*tuned_results(chip)]) if r.config}
    assert sorted(stated) == sorted(found.values())


def test_the_page_of_tune_counts_the_problems_and_configs():
    stated = rows_of("docs/tune.md", "The package's files")[2:]
    for backend, (first, *numbers) in zip(TUNED, stated, strict=True):
        expected = [PROBLEMS[backend]]
        for chip in (H100, H200):
            found = [r for _, r in tuned_results(chip) if r.backend == backend]
            expected += [len(found), len({r.key for r in found if r.config})]
        assert (first.split(",")[0], [int(n) for n in numbers]) == (backend, expected)


def test_the_page_of_slices_has_the_times_of_the_records():
    times = {
        (r["what"], r["backend"], r["dtype"]): r["us"]
        for r in records("h200/slices")
        if r.get("images") == 1024
    }
    header, _, *rows = rows_of("docs/experiments/slices.md", "Times")
    assert len(rows) == 6
    for what, *cells in rows:
        for backend, cell in zip(header[1:], cells, strict=True):
            found = [times[what, backend, dtype] for dtype in ("float8_e4m3fn", "bfloat16")]
            assert cell == " / ".join(f"{us:.0f}" for us in found)


def test_the_table_of_few_images_has_the_newest_times():
    newest = collections.defaultdict(dict)
    for run in few_images("h200"):
        for key, times in run.items():
            newest[key] |= times

    def cell(times):
        if not times:
            return ""
        ours = [times[name] for name in TUNED]
        xla = min(times[name] for name in ("xla", "jnp.dot + positions"))
        return " / ".join(f"{t:.1f}" if t < 100 else f"{t:.0f}" for t in [*ours, xla])

    stated = rows_of("docs/experiments/hopper.md", "Few images")[2:]
    shapes = [row[0] for row in stated if row[0]]
    assert len(shapes) == 16
    for row, (shape, images) in zip(stated, itertools.product(shapes, (1, 8, 64)), strict=True):
        cells = [cell(newest.get((shape, images, dtype))) for dtype in DTYPES]
        assert row[1:] == [str(images), *cells]


def against_pallas(problems_and_times):
    """Returns the ratios of cuda's to mosaic_sm90's time, if cuda has wide slices and if narrow.

    Problems with 24 or more chunks of K are left out.
    """
    wide, narrow = [], []
    for problem, times in problems_and_times:
        if tiles.chunks(problem) < 24 and {"cuda", "mosaic_sm90"} <= times.keys():
            is_wide = problem.dtype == "bfloat16" or problem.N % 192 == 0 or problem.rows <= 8192
            (wide if is_wide else narrow).append(times["cuda"] / times["mosaic_sm90"])
    return wide, narrow


def test_cuda_is_preferred_where_it_was_measured_to_be_faster():
    """docs/experiments/hopper.md has these numbers."""
    wide, narrow = [], []
    for folder in ("h100", "h200"):
        newest = {
            key: times
            for run in few_images(folder)
            for key, times in run.items()
            if {"cuda", "mosaic_sm90"} <= times.keys()
        }
        found = [
            (recorded.problem_of(shape, images, dtype, "patches"), times)
            for (shape, images, dtype), times in newest.items()
        ]
        found = against_pallas([(p, times) for p, times in found if p.rows <= 65536])
        wide, narrow = wide + found[0], narrow + found[1]
    assert (len(wide), sum(x < 1.005 for x in wide)) == (251, 247)
    assert min(wide) == pytest.approx(0.727, abs=5e-4) and max(wide) < 1.075
    assert 0.985 < min(narrow) and max(narrow) < 1.125


@pytest.mark.parametrize(
    "chip, bfloat16, one_byte, narrow",
    [
        (H100, (0.80, 0.99), (0.97, 1.03), (1.12, 1.15)),
        (H200, (0.92, 1.02), (0.94, 1.03), (1.06, 1.11)),
    ],
)
def test_with_many_rows_cuda_takes_this_part_of_the_time(chip, bfloat16, one_byte, narrow):
    """docs/experiments/hopper.md has these numbers, of the heuristics' configs in a burst."""
    times = collections.defaultdict(dict)
    measured = stored.read(decisions.results_of(chip)).results
    for _, task in command.list_tasks(backends=TUNED[:2], sources=["patches"]):
        if (result := measured.get(task.key)) and task.problem.rows > 65536:
            heuristic = next(iter(result.times.values()))
            times[task.problem][task.backend] = heuristic["burst"]["milliseconds"]
    halves = [
        [(p, t) for p, t in times.items() if (p.dtype == "bfloat16") == is_bfloat16]
        for is_bfloat16 in (True, False)
    ]
    (of_bfloat16, none), (of_one_byte, of_narrow) = map(against_pallas, halves)
    assert not none
    for found, stated in zip((of_bfloat16, of_one_byte, of_narrow), (bfloat16, one_byte, narrow)):
        assert (round(min(found), 2), round(max(found), 2)) == stated


def over_the_fastest(measured):
    """Returns how many times as long as the fastest config the chosen one takes, on average.

    Args:
      measured: (problem, chip, {name of a config: time}) of several problems.

    Returns:
      The geometric mean, and the number of problems whose chosen config was measured.
    """
    ratios = [
        times[name] / min(times.values())
        for problem, chip, times in measured
        if (name := str(SM90.choose_config(problem, chip))) in times
    ]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)


def test_hoppers_estimate_chooses_configs_that_are_nearly_the_fastest():
    """docs/experiments/encoder.md has these numbers."""
    layers = collections.defaultdict(dict)
    record = ROOT / "benchmarks/h200/dense_configs.jsonl"
    for row in map(json.loads, record.read_text().splitlines()):
        if "HopperConfig" in row.get("program", ""):
            dtype, config = row["program"].split(" ", 1)
            layers[row["model"], row["rows"], row["layer"], dtype][config] = row["burst"]

    def problem(model, rows, name, dtype):
        layer = MODELS[model][1][name]
        epilogue = layer.epilogue_in(dtype)
        x = jax.ShapeDtypeStruct((rows, layer.K), dtype)
        weight = jax.ShapeDtypeStruct((1, epilogue.parts, layer.N, layer.K), dtype)
        return problem_of(x, weight, epilogue)

    ratio, number = over_the_fastest((problem(*key), H200, t) for key, t in layers.items())
    assert (round(ratio, 2), number, len(layers)) == (1.02, 23, 26)
    operators = []
    for chip in (H100, H200):
        measured = stored.read(decisions.results_of(chip)).results
        for _, task in command.list_tasks(backends=TUNED[:1]):
            if result := measured.get(task.key):
                times = {n: t["burst"]["milliseconds"] for n, t in result.times.items()}
                operators.append((task.problem, chip, times))
    ratio, number = over_the_fastest(operators)
    assert (round(ratio, 3), number) == (1.005, len(operators))


def test_packed_naflex_pictures_have_the_rates_of_the_record():
    page = (ROOT / "docs/experiments/encoder.md").read_text()
    rates = [r for r in records("h200/naflex") if r["kind"] == "rates"]
    assert len(rates) == 15
    for rate in rates:
        burst, sustained = (rate[name]["packed / padded"] for name in ("burst", "sustained"))
        assert f"| {burst:.3f} / {sustained:.3f} ({rate['wanted']:.3f}) |" in page


def test_embed_on_two_gpus_has_the_rates_of_the_records():
    runs = embed_runs("8920b25")
    found = {(r["encoder"], r["form"], r["place"], r["allowed"]): r for r in runs}
    assert len(found) == len(runs) == 10
    forms = {"JPEG files": "jpeg", "tars": "tar", "parquet files": "parquet"}
    compared = 0
    for name, *cells in rows_of("docs/experiments/embed.md", "Pictures per second"):
        encoder, *rest = name.split(", ")
        if not rest or rest[0] not in forms:
            continue
        form, *rest = rest
        cores = int(rest[0].split()[0]) if rest else 16
        places = ("one", cores), ("all", 32), ("each", 32)
        one = found[encoder, forms[form], "one", 16]
        for (place, allowed), cell in zip(places, cells, strict=True):
            if cell:
                r = found[encoder, forms[form], place, allowed]
                part = f" ({r['rate'] / 2 / one['rate']:.2f})" if place != "one" else ""
                busy = f"{r['busy']:.0%}; {r['cores']:.1f} of {allowed}"
                assert cell == f"{r['rate']:.0f}{part}; {busy}"
                compared += 1
    assert compared == len(found)


def test_nvimagecodec_has_the_rates_of_the_records():
    counts = 2, 4, 16
    decoded = {r["cores"]: r for r in records("h200/resizing") if r["kind"] == "nvimagecodec"}
    alone = ("B/16 224", "jpeg", 1)
    embed = {
        r["allowed"]: r
        for r in embed_runs("8920b25")
        if (r["encoder"], r["form"], r["devices"]) == alone
    }
    rows = rows_of("docs/experiments/embed.md", "One process")
    header = next(i for i, row in enumerate(rows) if row[1:] == [f"{n} cores" for n in counts])
    _, nvimagecodec, own = rows[header + 1 : header + 4]
    for (_, *cells), found, used in (
        (nvimagecodec, decoded, "cores used"),
        (own, embed, "cores"),
    ):
        assert cells == [f"{found[n]['rate']:.0f} ({found[n][used]:.1f})" for n in counts]
