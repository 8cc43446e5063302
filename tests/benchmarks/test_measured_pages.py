"""The measured tables and ratios in the pages are those of the records and of the tuned files."""

import collections
import itertools
import json
import math
import re

import jax
import pytest

from benchmarks import decisions, headline, recorded, results
from benchmarks.dense import MODELS
from benchmarks.scaling import WAYS
from pallas_patch_embed.backends import BACKENDS, cuda, stored, tiles
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import H100, H200
from pallas_patch_embed.commands.tune import command
from pallas_patch_embed.layers.dense import problem_of
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


def test_the_page_of_slices_has_the_times_of_the_records():
    records = results.read(ROOT / "benchmarks/h200/slices.jsonl")
    times = {
        (r["what"], r["backend"], r["dtype"]): r["us"] for r in records if r.get("images") == 1024
    }
    header, _, *rows = rows_of("docs/experiments/slices.md", "Times")
    assert len(rows) == 6
    for what, *cells in rows:
        for backend, cell in zip(header[1:], cells, strict=True):
            found = [times[what, backend, dtype] for dtype in ("float8_e4m3fn", "bfloat16")]
            assert cell == " / ".join(f"{us:.0f}" for us in found)


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


def few_images(folder):
    """Returns the recorded microseconds of few images, by run and problem (shape, images, dtype).

    A run with the package's tuned file is left out.
    """
    runs = []
    for record in results.read(ROOT / f"benchmarks/{folder}/few_images.jsonl"):
        if record["kind"] == "run":
            runs.append(collections.defaultdict(dict))
            is_tuned = "package's file" in record["versions"]
        elif not is_tuned:
            key = record["shape"], record["images"], record["dtype"]
            runs[-1][key][record["contender"]] = 1e3 * record["milliseconds"]
    return runs


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


def test_the_README_has_the_table_and_the_days_of_its_records():
    found = headline.comparisons()
    page = (ROOT / "README.md").read_text()
    assert headline.table(found) in page
    for comparison in found:
        assert comparison.date in page
    for name in headline.COLOURS:
        assert f"benchmarks/h200/{name}" in page and (headline.FOLDER / name).is_file()


def test_packed_naflex_pictures_have_the_rates_of_the_record():
    page = (ROOT / "docs/experiments/encoder.md").read_text()
    rates = [r for r in results.read(ROOT / "benchmarks/h200/naflex.jsonl") if r["kind"] == "rates"]
    assert len(rates) == 15
    for rate in rates:
        burst, sustained = (rate[name]["packed / padded"] for name in ("burst", "sustained"))
        assert f"| {burst:.3f} / {sustained:.3f} ({rate['wanted']:.3f}) |" in page


def newest_encoder_peers():
    records = results.read(ROOT / "benchmarks/h200/encoder_peers.jsonl")
    return {(r["encoder"], r["images"], r["contender"]): r for r in records if "contender" in r}


def test_few_images_have_the_newest_times_of_whole_encoders():
    outside = "this encoder, called outside of jit"
    names = {
        "this encoder, in your own jit": "this encoder",
        "the same with the option above": "this encoder, epilogues by cuBLAS",
        outside: outside,
        "transformers, torch.compile with CUDA graphs": (
            "transformers, torch.compile, reduce-overhead"
        ),
        "this encoder, int8, the layer behind attention in bfloat16": (
            "this encoder, blocks in int8 except out of every block"
        ),
        "transformers, torch.compile, max-autotune": "transformers, torch.compile, max-autotune",
    }
    models = {"B/16": "B/16 224", "So400m": "So400m/14 384"}

    def count(cell):
        return int(cell.split(", ")[-1].split()[0])

    newest = newest_encoder_peers()
    compared = 0
    for name, *cells in rows_of("docs/encoder.md", "One picture"):
        if name.startswith("---"):
            continue
        if name == "":
            cases = [(*map(models.get, cell.split(", ")[:-1]), count(cell)) for cell in cells]
        elif name in models.values() and "image" in cells[0]:
            cases = [(name, count(cell)) for cell in cells]
        elif name in names:
            for (model, images), cell in zip(cases, cells, strict=True):
                if cell:
                    found = newest[model, images, names[name]]
                    assert cell == f"{found['burst']:.2f} / {found['sustained']:.2f}"
                    compared += 1
        else:  # Seconds of the first call.
            for (images,), cell in zip(cases, cells, strict=True):
                if cell:
                    found = newest[name, images, outside]["compile_seconds"]
                    assert cell == f"{found:.1f}"
                    compared += 1
    assert compared == (5 + 5) * 4 + 4 + 2 + 4 + 5


def test_many_images_have_the_newest_times_of_whole_encoders():
    ours = "this encoder"
    names = {
        f"**{ours}, int8**": f"{ours}, blocks in int8",
        f"**{ours}, bfloat16**, with the option of `embed`": f"{ours}, epilogues by cuBLAS",
        f"{ours}, bfloat16, without the option": ours,
        "the same, called outside of jit": f"{ours}, called outside of jit",
        "transformers, torch.compile": "transformers, torch.compile",
        "the same with torchao's int8 (2026-11-28)": "transformers, torch.compile, torchao's int8",
        "flax, big_vision's model": "flax, as big_vision has it",
    }
    newest = newest_encoder_peers()
    compared = 0
    for name, *cells in rows_of("docs/performance.md", "Whole encoders"):
        if name.startswith("64 pictures"):
            models = cells
        elif ", 512 pictures" in name:
            model = name.removesuffix(", 512 pictures")
        elif name in names and len(cells) == 2:
            for model, cell in zip(models, cells, strict=True):
                found = newest[model, 64, names[name]]
                assert cell == f"{found['burst']:.2f} / {found['sustained']:.2f}"
                compared += 1
        elif name in names:
            found = newest[model, 512, names[name]]
            times = f"{found['burst']:.2f} / {found['sustained']:.2f}"
            rate = f"{1e3 * 512 / found['sustained']:,.0f}"
            peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f}"
            assert cells == [times, rate, f"{found['joules']:.3f}", peak]
            compared += 1
    assert compared == 2 * (len(names) + len(names) - 1)  # torchao was not measured with 64.


def test_two_gpus_have_the_rates_of_the_record():
    newest = {
        (r["model"], r["dtype"], r["gpus"], r["way"]): r
        for r in results.read(ROOT / "benchmarks/h200/scaling.jsonl")
    }
    compared = 0
    names = {
        "operator, B/16 224, int8": ("operator", "int8"),
        "encoder, B/16 224, bfloat16": ("B/16 224", "bfloat16"),
    }
    for name, *cells in rows_of("docs/performance.md", "Several GPUs")[2:]:
        for (gpus, way), cell in zip([(1, WAYS[0]), (2, WAYS[0]), (2, WAYS[1])], cells):
            if cell:
                found = newest[*names[name], gpus, way]
                ratio = f" ({found['efficiency, sustained']:.3f})" if gpus > 1 else ""
                assert cell == f"{found['sustained']:,.0f}{ratio}"
                compared += 1
    assert compared == len(newest)


def test_int8_is_as_many_times_as_fast_as_the_records_say():
    newest = newest_encoder_peers()
    int8 = "this encoder, blocks in int8"
    others = {
        "bfloat16": "this encoder, epilogues by cuBLAS",
        "torch.compile": "transformers, torch.compile",
    }
    header, _, *rows = rows_of("docs/eight_bits.md", "Speed")
    assert len(rows) == 5
    for name, *cells in rows:
        images, other = re.match(
            r"(?:energy of )?(\d+) pictures, (?:part of )?([\w.]+)", name
        ).groups()
        for model, cell in zip(header[1:], cells, strict=True):
            ours, theirs = (newest[model, int(images), x] for x in (int8, others[other]))
            ratios = [theirs[x] / ours[x] for x in ("burst", "sustained")]
            if name.startswith("energy"):
                ratios = [ours["joules"] / theirs["joules"]]
            assert cell == " / ".join(f"{ratio:.2f}" for ratio in ratios)


def embed_runs(commit):
    """Returns the runs of `embed` on H200s of a version of this package."""
    return [
        r
        for name in ("resizing", "embedding")
        for r in results.read(ROOT / f"benchmarks/h200/{name}.jsonl")
        if r.get("commit") == commit
    ]


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
    records = results.read(ROOT / "benchmarks/h200/resizing.jsonl")
    decoded = {r["cores"]: r for r in records if r["kind"] == "nvimagecodec"}
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
