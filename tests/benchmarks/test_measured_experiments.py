"""The measured tables and ratios of docs/experiments and docs/tune.md are those of the records."""

import collections
import itertools
import math
import re

import jax
import pytest

from benchmarks import decisions, recorded
from benchmarks.dense import MODELS
from pallas_patch_embed.backends import BACKENDS, cuda, stored, tiles
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import H100, H200
from pallas_patch_embed.commands.tune import command
from pallas_patch_embed.layers.dense import problem_of
from tests.benchmarks.measured import (
    BY_CUBLAS,
    COMPILED,
    CONVOLUTION,
    CUDA_GRAPHS,
    IN_JIT,
    OUTSIDE,
    both,
    encoder_peer_runs,
    loops_over_blocks,
    operator_times,
    records,
    span,
)
from tests.pages import prose, rows_of

TUNED = ("mosaic_sm90", "cuda", "triton")
DTYPES = ("bfloat16", "float8_e4m3fn", "int8")

# Pictures per second, cores in use, and milliseconds of CPU time for a picture.
CELL = r"(\d+) \(([\d.]+)\)(?:, ([\d.]+) ms)?"

# The problems that a tuned file can have: a backend refuses the others.
PROBLEMS = {"mosaic_sm90": 162, "cuda": 198, "triton": 306}


def embed_runs(commit):
    """Returns the runs of `embed` on H200s of a version of this package."""
    return [
        r
        for name in ("resizing", "embedding")
        for r in records(f"h200/{name}")
        if r.get("commit") == commit
    ]


def few_images(folder):
    """Returns the recorded microseconds of few images, by run and problem (shape, images, dtype).

    A run with the package's tuned file is left out.
    """
    runs = []
    for record in records(f"{folder}/few_images"):
        if record["kind"] == "run":
            runs.append(collections.defaultdict(dict))
            is_tuned = "package's file" in record["versions"]
        elif not is_tuned:
            key = record["shape"], record["images"], record["dtype"]
            runs[-1][key][record["contender"]] = 1e3 * record["milliseconds"]
    return runs


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
    for row in records("h200/dense_configs"):
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


def test_packed_naflex_pictures_have_the_fills_and_rates_of_the_record():
    fills, rates = {}, {}
    for r in records("h200/naflex"):
        if "mix" in r:
            key = r["mix"], r["kept"], r["patches"]
            (fills if r["kind"] == "fills" else rates)[key] = r

    def fill(r):
        return [f"{r[x]:.3f}".replace("1.000", "1") for x in ("batch", "rows")]

    def rate(r):
        times = {regime: r[regime]["packed / padded"] for regime in ("burst", "sustained")}
        return [f"{both(times, 3)} ({r['wanted']:.3f})"]

    rows = rows_of("docs/experiments/encoder.md", "Packed NaFlex pictures")
    second = next(i for i, row in enumerate(rows) if row[2:] == ["64", "256", "1024"])
    for table, found, cells in ((rows[:second], fills, fill), (rows[second:], rates, rate)):
        mix, body = "", table[2:]
        assert len(body) == 5
        for name, kept, *stated in body:
            mix = name or mix
            keys = [(mix, kept == "kept", patches) for patches in (64, 256, 1024)]
            assert stated == [cell for key in keys for cell in cells(found[key])]


def test_attention_has_the_newest_times():
    newest = {}
    for r in records("h200/attention"):
        if r["kind"] == "attention" and r["name"] != "sweep":
            kind = r["levels"] or ("segments" if r["packed"] else "")
            program = re.sub(r"^[\d,]+", "kernel", r["program"])
            newest[r["name"], r["shape"][0], kind, r["mix"], program] = r

    def bursts(cases, digits=3):
        """Returns the cells of a row of the first table."""
        times = [[newest[*case, p]["burst"] for case in cases] for p in ("cudnn", "kernel")]
        ratios = [kernel / cudnn for cudnn, kernel in zip(*times)]
        cells = [", ".join(f"{t:.{digits}f}" for t in found) for found in times]
        return [*cells, ", ".join(f"{x:.2f}" for x in ratios)]

    expected = []
    for name, images in (("B/16 224", 512), ("So400m/14 384", 64), ("L/16 384", 256)):
        cudnn, kernel = (newest[name, images, "", None, p] for p in ("cudnn", "kernel"))
        ratios = {regime: kernel[regime] / cudnn[regime] for regime in ("burst", "sustained")}
        expected.append([both(cudnn, 3), both(kernel, 3), both(ratios)])
    few = [(name, 8, "", None) for name in ("B/16 224", "So400m/14 384", "L/16 384")]
    expected.append(bursts(few, 4))
    naflex = [("NaFlex B/16", 64), ("NaFlex So400m/16", 64)]
    mixes = [("", mix) for mix in (None, "full", "uniform", "bimodal", "one long")]
    for mix in [*mixes, ("segments", "uniform")]:
        expected.append(bursts([(*name, *mix) for name in naflex]))
    rows = rows_of("docs/experiments/encoder.md", "Attention")
    first = rows.index(["", "cuDNN", "kernel", "kernel / cuDNN"]) + 2
    assert [cells for _, *cells in rows[first : first + len(expected)]] == expected

    def burst(*key):
        return f"{newest[key]['burst']:.3f}" if key in newest else ""

    kinds = list(itertools.product(("", "segments"), ("cudnn", "kernel")))
    small = [("NaFlex B/16 256", 256), ("NaFlex So400m/16 256", 256)]
    expected = [
        [burst(*name, kind, mix, program) for kind, program in kinds]
        for name, mix in itertools.product(small, ("full", "uniform"))
    ]
    tiny = "NaFlex B/16 64", 1024, "segments", "full"
    expected.append(["", "", *(burst(*tiny, program) for program in ("cudnn", "kernel"))])
    first = rows.index(["", "lengths: cuDNN", "kernel", "segments: cuDNN", "kernel"]) + 2
    assert [cells for _, *cells in rows[first : first + 5]] == expected

    programs = "cudnn", "kernel + pass", "kernel"
    first = rows.index(["", "cuDNN and a pass", "kernel and a pass", "kernel"]) + 2
    for (name, *cells), images in zip(rows[first : first + 3], (512, 256, 64), strict=True):
        assert cells == [burst(name, images, "int8", None, program) for program in programs]


def test_dense_layers_have_the_times_of_the_record():
    times = {}
    for r in records("h200/dense"):
        if r["kind"] == "dense":
            times[r["model"], r["layer"], re.sub(r"HopperConfig.*", "kernel", r["program"])] = r
    layers = {
        "q, k and v": "qkv",
        "q, k or v": "query",
        "after attention": "out",
        "first of the MLP": "fc1",
        "second of the MLP": "fc2",
    }
    models = {"B/16": "B/16 224", "So400m/14": "So400m/14 384"}
    programs = ["bfloat16 cublas", "bfloat16 kernel", "bfloat16 formula", "int8 kernel"]
    programs.append("float8_e4m3fn kernel")
    rows = rows_of("docs/experiments/encoder.md", "Dense layers")[2:8]
    for name, *cells in rows:
        model, rest = name.split(", ", 1)
        layer = next(layers[x] for x in layers if rest.startswith(x))
        found = [times[models[model], layer, program] for program in programs]
        assert cells == [both(r, 3) if "sustained" in r else f"{r['burst']:.3f}" for r in found]


def test_more_rows_of_the_kernel_have_the_times_of_the_record():
    chosen, gelu = "kernel as chosen", "kernel for layers with an activation"
    columns = [(chosen, False), (chosen, True), (gelu, False), (gelu, True)]
    columns.append(("kernel for all layers", False))
    times = {
        (r["encoder"], r["images"], r["layers"], r["cublas"]): r
        for r in records("h200/encoder_variants")
        if r.get("kind") == "dense layers"
    }
    rows = rows_of("docs/experiments/encoder.md", "Dense layers")
    start = 2 + next(i for i, row in enumerate(rows) if row[1:2] == ["as chosen"])
    for name, *cells in rows[start : start + 5]:
        encoder, images = re.fullmatch(r"(.+), (\d+) images", name).groups()
        for column, cell in zip(columns, cells, strict=True):
            assert cell == both(times[encoder, int(images), *column])


def test_the_kernel_for_more_rows_of_bfloat16_has_the_times_of_the_record():
    fewer = ", the kernel up to 2916 rows"
    contenders = [IN_JIT + fewer, BY_CUBLAS + fewer, IN_JIT, BY_CUBLAS]
    table = rows_of("docs/experiments/encoder.md", "Dense layers")
    start = next(i for i, row in enumerate(table) if row[1] == "B/16 224, 16 images")
    columns = [re.fullmatch(r"(.+), (\d+) images", cell).groups() for cell in table[start][1:]]
    assert table[start + 2] == ["rows", "3136", "4704", "5832"]

    def runs(model, images):
        """Returns the run with these contenders, and the one before it."""
        found = encoder_peer_runs(model, int(images))
        (last,) = (i for i, run in enumerate(found) if contenders[0] in run)
        return found[last], found[last - 1]

    (b16, before), _, (so400m, earlier) = (
        [run[OUTSIDE]["compile_seconds"] for run in runs(*column)] for column in columns
    )
    assert (
        f"{b16:.1f} s for 16 images of B/16 instead of {before:.1f}, and {so400m:.1f} s for eight "
        f"of So400m instead of {earlier:.1f}"
    ) in prose("docs/experiments/encoder.md")
    for (_, *cells), contender in zip(table[start + 3 : start + 7], contenders, strict=True):
        assert cells == [both(runs(*column)[0][contender]) for column in columns]


def test_one_graph_takes_the_times_of_the_record():
    found = loops_over_blocks()
    variants = {
        "the loop": "loop",
        "unrolled by 3": "unrolled by 3",
        "unrolled as a whole": "unrolled",
        "the loop, the last two results are kept": "loop, results kept",
        "unrolled as a whole, the last two results are kept": "unrolled, results kept",
        "transformers, torch.compile with CUDA graphs": CUDA_GRAPHS,
    }
    columns = [("B/16 224", 1), ("B/16 224", 8), ("So400m/14 384", 1)]
    settings = ("without graphs", "memory reserved", "SKIP_TEMP", "SKIP_PROFILED")
    settings += ("CUDA's allocator",)
    _, _, *rows = rows_of("docs/experiments/encoder.md", "One graph")
    others = rows[len(variants) + 2 :]
    assert [row[0] for row in rows[: len(variants)]] == [*variants]
    for name, *cells in rows[: len(variants)]:
        wanted = [found.get((*column, variants[name])) for column in columns]
        assert cells == [both(r) if r else "" for r in wanted]
    for (_, *cells), setting in zip(others, settings, strict=True):
        one_image = [found["B/16 224", 1, f"{loop}, {setting}"] for loop in ("loop", "unrolled")]
        assert cells == [both(r) for r in one_image]
    turns = [
        x
        for variant in ("loop", "unrolled", CUDA_GRAPHS)
        for x in sorted(found["B/16 224", 1, variant]["bursts"])
    ]
    assert (
        "the loop's are {:.2f}, {:.2f} and {:.2f} ms for one image of B/16, the unrolled one's "
        "{:.2f}, {:.2f} and {:.2f}, torch's {:.2f}, {:.2f} and {:.2f}."
    ).format(*turns) in prose("docs/experiments/encoder.md")
    saved = [
        100 * (1 - found[*column, "unrolled"]["sustained"] / found[*column, "loop"]["sustained"])
        for column in columns
    ]
    assert f"one graph saves {span(saved, 0)}%" in prose("docs/experiments/encoder.md")


def test_separate_products_have_the_times_of_the_record():
    times = collections.defaultdict(dict)
    for r in records("h200/encoder_variants"):
        if "regime" in r:
            times[r["encoder"], r["images"], r["variant"]][r["regime"]] = r["milliseconds"]
    variants = {
        "one product": "default",
        "three products": "default, three",
        "one product, cuBLAS": "cublas",
        "three products, cuBLAS": "cublas, three",
        "the same with cuDNN's layer norms": "cublas, three, cudnn norm",
        "the same with a layer norm that reads x once (variance from sums of x and x²)": (
            "cublas, three, one-pass norm"
        ),
    }
    columns = [("B/16 224", 1, 3), ("B/16 224", 64, 2), ("B/16 224", 512, 1)]
    columns.append(("So400m/14 384", 64, 1))
    rows = rows_of("docs/experiments/encoder.md", "Separate products for q, k and v")[2:]
    assert [row[0] for row in rows] == [*variants]
    for name, *cells in rows:
        for (encoder, images, digits), cell in zip(columns, cells, strict=True):
            found = times.get((encoder, images, variants[name]))
            assert cell == (both(found, digits) if found else "")


def test_clip_and_dinov2_have_the_times_of_the_record():
    contenders = {
        "this encoder, epilogues by cuBLAS": BY_CUBLAS,
        "the same with the tanh GELU": "this encoder with the tanh GELU",
        "the same with the convolution": CONVOLUTION,
        "this encoder without the option": IN_JIT,
        COMPILED: COMPILED,
        "the same with CUDA graphs": CUDA_GRAPHS,
    }
    heading = "CLIP and DINOv2 against torch.compile"
    (_, *columns), _, *rows = rows_of("docs/experiments/encoder.md", heading)
    rows = rows[: len(contenders)]
    assert [row[0] for row in rows] == [*contenders]
    # The first record counts: one image was measured again with CUDA graphs.
    first = {}
    for r in records("h100/encoder_peers"):
        if "contender" in r:
            first.setdefault((r["encoder"], r["images"], r["contender"]), r)
    for name, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            family, images = re.match(r"(\w+), (\d+)", column).groups()
            contender = contenders[name]
            if name == COMPILED and images == "512":
                contender += ", max-autotune"
            found = first.get((f"{family} B/16 224", int(images), contender))
            digits = 1 if images == "512" else 2
            assert cell.replace("*", "") == (both(found, digits) if found else "")


def beside_ray(r):
    """Returns whether a run of `embed` is one with --ray, or the one whose embeddings it has."""
    return (r["encoder"], r["pictures"]) == ("B/16 224", 24576)


def test_embed_on_two_gpus_has_the_rates_of_the_records():
    commits = {
        "pictures/s; GPU busy; cores used": "8920b25",
        "the same with a faster host": "d048259",
    }
    forms = {"JPEG files": "jpeg", "tars": "tar", "parquet files": "parquet"}
    compared, found = 0, {}
    for name, *cells in rows_of("docs/experiments/embed.md", "Pictures per second"):
        if name in commits:
            runs = [r for r in embed_runs(commits[name]) if not beside_ray(r)]
            found = {(r["encoder"], r["form"], r["place"], r["allowed"]): r for r in runs}
        encoder, *rest = name.split(", ")
        if not found or not rest or rest[0] not in forms:
            continue
        form, *rest = rest
        cores = int(rest[0].split()[0]) if rest else 16
        one = found.get((encoder, forms[form], "one", 16))
        places = ("one", cores), ("all", 32), ("each", 32)
        for (place, allowed), cell in zip(places, cells, strict=True):
            if cell:
                r = found[encoder, forms[form], place, allowed]
                part = f" ({r['rate'] / 2 / one['rate']:.2f})" if one and place != "one" else ""
                busy = f"{r['busy']:.0%}; {r['cores']:.1f} of {allowed}"
                assert cell == f"{r['rate']:.0f}{part}; {busy}"
                compared += 1
    assert compared == 10 + 11


def test_sentences_about_embed_on_two_gpus_have_the_numbers_of_the_records():
    page = prose("docs/experiments/embed.md")

    def of_a_core(commit, *forms):
        """Returns the span of pictures a second of a core, rounded to tens."""
        runs = [r for r in embed_runs(commit) if r["encoder"] == "B/16 224" and not beside_ray(r)]
        found = [r["rate"] / r["cores"] for r in runs if r["form"] in forms]
        return span([round(x, -1) for x in found], 0)

    assert (
        f"A core in use embeds {of_a_core('8920b25', 'jpeg')} JPEG files per second with B/16 on "
        f"the first host and {of_a_core('d048259', 'jpeg')} on the second, where it is "
        f"{of_a_core('d048259', 'tar', 'parquet')} from tars and parquet files."
    ) in page
    plain, on_ray = (r for r in embed_runs("d048259") if beside_ray(r))
    assert on_ray["options"] == "--ray"
    assert (
        f"embedded {on_ray['rate']:.0f} pictures/s between its first and its last whole shard, and "
        f"took {on_ray['seconds']:.0f} s in all; without Ray the same pictures took "
        f"{plain['seconds']:.0f} s and gave {plain['rate']:.0f}"
    ) in page
    runs = [r for r in records("h200/embedding") if r["kind"] == "ray"]
    assert [r["equal"] for r in runs] == [plain["pictures"]] * 3
    read, decode, actor = "Read", "Decode", "MapWorker(MapBatches(Embedder))"
    killed = [[name.removeprefix("ray::") for name in r["killed"]] for r in runs]
    assert killed == [[], [actor], [f"MapBatches({x})" for x in (read, *[decode] * 3)]]


def test_so400m_from_tars_and_parquet_files_has_the_rates_of_the_records():
    tars, parquet = (
        next(r for r in embed_runs("454a976") if (r["encoder"], r["form"]) == ("So400m/14 384", f))
        for f in ("tar", "parquet")
    )
    assert (
        f"From tars one H200 embeds {tars['rate']:.0f} pictures/s with So400m/14 384, with "
        f"{tars['cores']:.1f} of 16 cores, and from parquet files {parquet['rate']:.0f} with "
        f"{parquet['cores']:.1f} ("
    ) in prose("docs/experiments/embed.md")


def test_resizing_on_the_device_takes_the_newest_times_of_the_record():
    shapes = (500, 375, 224), (500, 375, 384), (375, 500, 384), (1024, 768, 224)
    newest = {
        (r["width"], r["height"], r["side"]): r["microseconds a picture"]
        for r in records("h200/resizing")
        if r["kind"] == "resize" and (r["filter"], r["batch"]) == ("bicubic", 64)
    }
    first, *others = (
        f"{width} x {height} to {side} {{}}{newest[width, height, side]:.2f}"
        for width, height, side in shapes
    )
    text = ", ".join([first.format("takes ") + " us", *(x.format("") for x in others[:-1])])
    page = prose("docs/experiments/embed.md")
    assert f"{text} and {others[-1].format('')} (2026-11-30" in page


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


def test_the_versions_of_embed_have_the_rates_of_their_records():
    host, device = "--resize host", "--resize device"
    many = f"{device} --batch 128"
    # For each table the versions and options of its columns.
    tables = {
        "before, on the host": [
            [("3d9dd7f", host)],
            [("17ba681", host)],
            [("17ba681", device)],
            [("17ba681", many)],
        ],
        "before all of this (3d9dd7f)": [
            [("3d9dd7f", host)],
            [("746551f", device), ("746551f", many)],
            [("0550a3d", device), ("56a61fb", device)],
        ],
        "before (3d9dd7f)": [[("3d9dd7f", host)], [("f56f8e4", "")]],
    }
    forms = {"JPEG": "jpeg", "tars": "tar", "tars,": "tar", "parquet": "parquet"}
    runs = [r for r in records("h200/resizing") if r["kind"] == "embed"]
    rows = rows_of("docs/experiments/embed.md", "One process")
    compared = 0
    for header, columns in tables.items():
        start = 2 + next(i for i, row in enumerate(rows) if row[1] == header)
        body = itertools.takewhile(lambda row: row[0].split()[0] in forms, rows[start:])
        for name, *cells in body:
            for versions, cell in zip(columns, cells, strict=True):
                for part in filter(None, cell.split("; ")):
                    rate, used, cpu = re.fullmatch(CELL, part).groups()
                    (found,) = (
                        r
                        for r in runs
                        if f"{r['rate']:.0f}" == rate and r["form"] == forms[name.split()[0]]
                        if (r["commit"], r["options"]) in versions
                    )
                    assert (found["encoder"], found["allowed"]) == ("B/16 224", 16)
                    assert used == f"{found['cores']:.1f}"
                    assert cpu is None or cpu == f"{1e3 * found['cores'] / found['rate']:.2f}"
                    compared += 1
    assert compared == 9 + 8 + 5


def test_embed_on_h100s_has_the_rates_of_the_record():
    commits, commit = collections.defaultdict(list), ""
    for r in records("h100/embedding"):
        if r["kind"] == "run":
            commit = re.search(r"commit (\w+)", r["versions"])[1]
        elif r["kind"] == "embed":
            commits[commit].append(r)
    runs = {(r["encoder"], r["place"]): r for r in commits["693a4ce"] if r["busy"] is not None}
    rows = rows_of("docs/experiments/embed.md", "Pictures per second")[2:6]
    for (name, *rates), (_, *used) in itertools.batched(rows, 2):
        encoder = name.split("**")[1]
        one = runs[encoder, "one"]["rate"]
        for place, rate, cell in zip(("one", "all", "each"), rates, used, strict=True):
            found = runs[encoder, place]
            digits = 3 if encoder.startswith("So") else 2
            part = "" if place == "one" else f" ({found['rate'] / 2 / one:.{digits}f})"
            assert rate == f"{found['rate']:.0f}{part}"
            allowed = found["allowed"]
            assert cell == f"{found['busy']:.0%}; {found['cores']:.1f} of {allowed}"


# Milliseconds, and the ratios of other times to it, of kernels that cut images.
PEERS = (
    ("patchify + cuda", "int8"),
    ("patchify + cuda", "float8_e4m3fn"),
    ("patchify + jnp.dot + positions", "bfloat16"),
    ("convolution + positions", "bfloat16"),
)


def cut_images(folder):
    """Returns cells of docs/experiments/cuda.md by shape, number of images and regime."""
    times = collections.defaultdict(dict)
    for r in records(f"{folder}/image_shapes"):
        if r["kind"] == "time" and r["pixels"] == "random":
            key = r["shape"], r["images"], r["regime"]
            times[key][r["contender"], r["dtype"]] = r["milliseconds"]

    def cell(found, digits):
        kernel = found["cuda, cut by the kernel", "int8"]
        ratios = [found[peer] / kernel if peer in found else None for peer in PEERS]
        written = [
            "-" if x is None else f"{x:.{n}f}" for x, n in zip(ratios, (2, 2, 1, 0), strict=True)
        ]
        return f"{kernel:.{digits}f}: {', '.join(written)}"

    return {
        key: cell(found, 3 if key[1] == 4736 else 4)
        for key, found in times.items()
        if ("cuda, cut by the kernel", "int8") in found
    }


def test_kernels_that_cut_images_have_the_times_of_the_records():
    h200, h100 = cut_images("h200"), cut_images("h100")
    rows = rows_of("docs/experiments/cuda.md", "What it takes")
    found = h200
    compared, shape = 0, ""
    for name, *cells in rows:
        if name == "shape" and cells == ["4736 images"]:
            found = h100
        if name == "the same, sustained":
            assert cells == [h100[shape, 4736, "sustained"]]
            compared += 1
        elif len(cells) == 1 and ": " in cells[0]:
            shape = name
            assert cells == [h100[shape, 4736, "burst"]]
            compared += 1
        elif len(cells) == 4 and ": " in cells[0]:
            assert cells == [found[name, images, "burst"] for images in (1, 8, 64, 512)]
            compared += 4
    assert compared == 4 * (10 + 2) + 11 + 2


def test_the_barrier_has_the_times_of_the_record():
    times = {
        (r["shape"], r["images"], r["dtype"]): r["microseconds"]
        for r in records("h100/xla_barrier")
        if r["kind"] == "forms"
    }
    names = "xla", "no barrier", "jnp.dot + positions"
    dtypes = {"bfloat16": "bfloat16", "float8": "float8_e4m3fn", "int8": "int8"}
    rows = [
        r
        for r in rows_of("docs/experiments/xla.md", "The barrier after the product")
        if " image" in r[0]
    ]
    assert len(rows) == 9
    for problem, _, *cells in rows:
        shape, images, of = problem.split(", ")
        found = [times[shape, int(images.split()[0]), dtypes[dtype]] for dtype in of.split("; ")]
        for name, cell in zip(names, cells, strict=True):
            digits = 0 if "64 images" in problem else 1
            assert cell == "; ".join(f"{r[name][0]:.{digits}f}" for r in found)


def test_triton_has_the_times_of_the_record():
    times = operator_times("h200/results_2026-11-23")
    heading = "Against other backends"
    rows = rows_of("docs/experiments/triton.md", heading)
    first = next(i for i, row in enumerate(rows) if row[0] == "4736")
    columns = [("patches", name) for name in ("triton", "xla", "jnp.dot + positions")]
    names = "triton", "patchify + triton", "xla", "mosaic_sm90", "cuda"
    columns += [("images", name) for name in names]
    columns += [("images", f"{name} + positions") for name in ("patchify + jnp.dot", "convolution")]
    for row, dtype in zip(rows[first:], ("int8", "float8_e4m3fn", "bfloat16"), strict=False):
        found = [times[source, name, dtype, "random"]["burst"] for source, name in columns]
        assert row[2:] == [f"{1e3 * x:.0f}" for x in found]


def test_the_costs_of_tmas_rows_are_those_of_the_record():
    cycles = collections.defaultdict(list)
    for r in records("h200/tma_rows"):
        cycles[r["rows"], r["cluster"]].append((r["images"], r))
    names = {
        "im2col, 48 bytes": "im2col 48",
        "im2col, 96": "im2col 96",
        "im2col, 192": "im2col 192",
        "im2col, 224": "im2col 224",
        "im2col, 336": "im2col 336",
        "tiled, lines": "lines",
    }
    compared = 0
    for name, *cells in rows_of("docs/experiments/cuda.md", "Cost of TMA's rows"):
        for rows in (names[start] for start in names if name.startswith(start)):
            few, many = (r for _, r in sorted(cycles[rows, 1], key=lambda x: x[0]))
            clusters = [max(cycles[rows, n], key=lambda x: x[0])[1] for n in (2, 4)]
            found = [few["cycles_a_load_one"]]
            found += [r["cycles_a_load_all"] for r in (few, many, *clusters)]
            assert cells == [f"{x:.0f}" for x in found]
            compared += 1
    assert compared == len(names)


def test_the_same_measurements_later_have_the_ratios_of_the_records():
    measured = [r for r in records("h200/two_trees") if r["kind"] == "two trees"]
    spreads = [
        f"{max(r['spread'] for r in measured if r['regime'] == regime):.1%}"
        for regime in ("burst", "sustained")
    ]
    page = prose("docs/experiments/repeated.md")
    assert f"on the H200 up to {spreads[0]} in bursts and up to {spreads[1]} sustained" in page

    def ratios(**wanted):
        return [r["ratio"] for r in measured if all(r[name] in of for name, of in wanted.items())]

    operator = "patches", "images", "patchify"
    rows = dict(rows_of("docs/experiments/repeated.md", "The same measurements later")[2:7])
    many = ratios(what=operator, images=[4736], regime=["burst"], pixels=["random"])
    sustained = ratios(what=operator, images=[4736], regime=["sustained"])
    few = ratios(what=operator, images=[64], regime=["burst", "cold"])
    encoders = [span(ratios(what=["encoder"], regime=[r]), 3) for r in ("burst", "sustained")]
    expected = {
        "4736 images, burst: 25 measurements": span(many, 3),
        "4736 images, sustained": ", ".join(f"{x:.3f}" for x in sustained),
        "64 images": span(few, 3),
        "encoders": "; ".join(encoders),
    }
    assert len(many) == 25
    for start, wanted in expected.items():
        assert [stated for name, stated in rows.items() if name.startswith(start)] == [wanted]
