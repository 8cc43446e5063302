"""The measured numbers of README.md and of the pages for users are those of the records."""

import re

from benchmarks import headline
from benchmarks.recorded import option_of
from benchmarks.scaling import WAYS
from tests.benchmarks.measured import (
    AUTOTUNED,
    BY_CUBLAS,
    COMPILED,
    CONVOLUTION,
    CUDA_GRAPHS,
    IN_JIT,
    INT8,
    INT8_WITHOUT_OUT,
    OUTSIDE,
    both,
    encoder_peer_runs,
    fastest,
    loops_over_blocks,
    newest_encoder_peers,
    operator_times,
    records,
    span,
)
from tests.pages import prose, rows_of
from tests.repository import ROOT

B16, SO400M = "B/16 224", "So400m/14 384"
LAYOUTS = ["jnp.dot bare, [N, K]", "jnp.dot bare, [K, N]"]

# The contenders of rows in docs/performance.md. Of several the faster one counts.
FROM_PATCHES = {
    "**cuda**": ["cuda"],
    "**mosaic_sm90**": ["mosaic_sm90"],
    "triton": ["triton"],
    "`jnp.dot` (cuBLAS), bare, the faster of two layouts": LAYOUTS,
    "CUTLASS with a fused epilogue, the faster of two tile shapes, not tuned": [
        "CUTLASS, fused, cooperative",
        "CUTLASS, fused, pingpong",
    ],
    "`jnp.dot` + positions in one jit": ["jnp.dot + positions"],
    "xla": ["xla"],
    "jax's Pallas matmul, not tuned, + positions": ["jax's matmul, not tuned, + positions"],
    "torch, eager, + positions": ["torch, eager, + positions"],
    "dequantised, `jnp.dot` + positions": ["dequantise + jnp.dot + positions"],
}
FROM_IMAGES = {
    "**cuda**, which cuts images": [("cuda", True)],
    "**cuda** after XLA's patchify": [("cuda", False)],
    "mosaic_sm90 after XLA's patchify": [("mosaic_sm90", False)],
    "triton, which cuts images": [("triton", True)],
    "triton after XLA's patchify": [("triton", False)],
    "xla": [("xla", False)],
    "patchify + `jnp.dot` + positions, in bfloat16": ["patchify + jnp.dot + positions"],
    "the usual convolution, in bfloat16": ["convolution + positions"],
}


def by_option(times):
    """Replaces names from images by options, (backend, whether it cuts images), if they are any."""
    found = {}
    for (source, name, *key), of_contender in times.items():
        if source == "images":
            beside = {n for s, n, *k in times if (s, k) == (source, key)}
            name = option_of(name, source, beside) or name
        found[source, name, *key] = of_contender
    return found


def test_the_tables_of_the_operator_have_the_times_of_the_record():
    times = by_option(operator_times("h200/results"))

    def cell(source, contenders, dtype):
        found = [times.get((source, c, dtype, "random")) for c in contenders]
        if found == [None] * len(found):
            return ""
        best = fastest(found)
        return both(best, 2 if best["burst"] >= 10 else 3)

    rows = rows_of("docs/performance.md", "The operator")
    second = next(i for i, row in enumerate(rows) if row[0] == "from uint8 images")
    for source, contenders, table in (
        ("patches", FROM_PATCHES, rows[:second]),
        ("images", FROM_IMAGES, rows[second:]),
    ):
        (_, *dtypes), _, *body = table
        assert [row[0] for row in body] == [*contenders]
        for name, *cells in body:
            expected = [cell(source, contenders[name], dtype) for dtype in dtypes]
            assert [stated.replace("**", "") for stated in cells] == expected


def of_later_runs(names, dtypes, digits=2):
    """Returns the times of a contender in all runs of images.jsonl and of image_shapes.jsonl."""
    wanted = dict(kind="time", shape=B16, images=4736, pixels="random", source="images")
    found = [
        r
        for name in ("images", "image_shapes")
        for r in records(f"h200/{name}")
        if wanted.items() <= r.items() and r["contender"] in names and r["dtype"] in dtypes
    ]
    return " / ".join(
        span([r["milliseconds"] for r in found if r["regime"] == regime], digits)
        for regime in ("burst", "sustained")
    )


def test_later_runs_of_images_have_the_times_of_their_records():
    cut = of_later_runs(["cuda, cut by the kernel"], ["int8"])
    patchified = of_later_runs(["cuda", "patchify + cuda"], ["int8"])
    # In the oldest run the peers in bfloat16 stand beside int8.
    peers = "int8", "bfloat16"
    dot = of_later_runs(["patchify + jnp.dot + positions"], peers)
    convolution = of_later_runs(["convolution + positions"], peers, 1)
    assert (
        f"took **{cut}** ms, patchify + cuda {patchified} ms, patchify + `jnp.dot` + positions "
        f"{dot} ms, and the convolution {convolution} ms."
    ) in prose("docs/performance.md")
    before = operator_times("h200/results_2026-11-23")["images", "cuda", "int8", "random"]["burst"]
    assert f"take {cut.split(' /')[0]} ms instead of {before:.2f} on an H200" in prose(
        "CHANGELOG.md"
    )
    rows = rows_of("docs/kernels.md", "What limits the Hopper kernel")[2:]
    assert [row[1] for row in rows if row[0].startswith("uint8")] == [cut]


def test_the_page_of_kernels_has_the_times_of_the_record():
    times = operator_times("h200/results")
    rows = rows_of("docs/kernels.md", "What limits the Hopper kernel")[2:]
    dtypes = "float8_e4m3fn", "int8", "bfloat16"
    for dtype, (name, ours, bare, _) in zip(dtypes, rows[:3], strict=True):
        assert name == f"{dtype.removesuffix('_e4m3fn')} patches"
        assert ours == both(times["patches", "cuda", dtype, "random"], 3)
        layouts = [times["patches", layout, dtype, "random"] for layout in LAYOUTS]
        assert bare.split(",")[0] == both(fastest(layouts), 3)


def test_few_images_of_the_operator_have_the_times_of_the_record():
    times = [operator_times("h200/small", images) for images in (1, 64)]

    def cold(found):
        return f"{1e3 * found['cold']:.1f} ({1e3 * found['burst']:.1f})"

    rows = rows_of("docs/performance.md", "Few images")[2:]
    assert [row[0] for row in rows] == ["mosaic_sm90", "cuda", "`jnp.dot` + positions"]
    for name, *cells in rows:
        key = "patches", name.replace("`", ""), "float8_e4m3fn", "random"
        found = [of_images[key] for of_images in times]
        expected = [f"{1e3 * f['call']:.0f}" for f in found] + [cold(f) for f in found]
        assert cells == expected
    first, *of_calls = (run for _, run in headline.runs(headline.FOLDER / "small.jsonl"))
    wanted = dict(kind="time", contender="cuda", regime="call")
    one, many = (
        next(r for r in first if wanted.items() <= r.items() and r["images"] == n) for n in (1, 64)
    )
    assert (
        f"took {1e3 * one['milliseconds']:.0f} us with one image and "
        f"{1e3 * many['milliseconds']:.0f} us with 64"
    ) in prose("docs/performance.md")
    # The other runs measured calls alone.
    assert {r["regime"] for run in of_calls for r in run if r["kind"] == "time"} == {"call"}


def test_photographs_take_this_part_of_the_time_of_random_pixels():
    parts = {"convolution": [], "jnp.dot": [], "": []}
    runs = [
        (date, run)
        for name in ("images", "image_shapes")
        for date, run in headline.runs(headline.FOLDER / f"{name}.jsonl")
    ]
    days = []
    wanted = dict(kind="time", images=4736, regime="burst", shape=B16)
    for date, run in runs:
        bursts = {
            (r["contender"], r["dtype"], r["pixels"]): r["milliseconds"]
            for r in run
            if wanted.items() <= r.items()
        }
        photographs = [key for *key, pixels in bursts if pixels == "photographs"]
        if photographs:
            days.append(date)
        for key in photographs:
            name = next(name for name in parts if name in key[0])
            parts[name].append(bursts[*key, "photographs"] / bursts[*key, "random"])
    assert len(days) == 3
    assert (
        f"({', '.join(sorted(days))}) backends of this package took {span(parts[''])} times as "
        f"long as with random pixels, patchify + `jnp.dot` + positions {span(parts['jnp.dot'])} "
        f"times, and the convolution {span(parts['convolution'])} times."
    ) in prose("docs/performance.md")


def single_calls():
    """Returns milliseconds of a single call of B/16 with one image for each run, and torch's."""
    names = OUTSIDE, CUDA_GRAPHS
    runs = (run for run in encoder_peer_runs(B16, 1) if all(name in run for name in names))
    return [[f"{run[name]['burst']:.2f}" for name in names] for run in runs]


def test_the_README_has_the_table_and_the_days_of_its_records():
    found = headline.comparisons()
    page = (ROOT / "README.md").read_text()
    assert headline.table(found) in page
    for comparison in found:
        assert comparison.date in page
    operator = found[-1].values
    times = operator["convolution, bfloat16"] / operator["this library, int8"]
    assert f"XLA's takes {times:.0f} times as long" in prose("README.md")
    of_jpeg = dict(kind="embed", encoder=B16, form="jpeg", allowed=16, options="")
    slower = min(r["rate"] for r in records("h200/resizing") if of_jpeg.items() <= r.items())
    assert f"and `embed` gave {slower:,.0f}." in prose("README.md")
    assert any(
        f"B/16 took {ours} ms, torch.compile {torchs}, and" in prose("README.md")
        for ours, torchs in single_calls()
    )
    newest = newest_encoder_peers()
    for model, images in headline.THROUGHPUT:
        autotuned, compiled = (newest[model, images, name] for name in (AUTOTUNED, COMPILED))
        assert autotuned["sustained"] < compiled["sustained"]
    assert "torch.compile ran in its mode max-autotune" in prose("README.md")
    for name in headline.COLOURS:
        assert f"benchmarks/h200/{name}" in page and (headline.FOLDER / name).is_file()


def test_few_images_have_the_newest_times_of_whole_encoders():
    names = {
        "this encoder, bfloat16, in your own jit": IN_JIT,
        "the same with the option above": BY_CUBLAS,
        OUTSIDE: OUTSIDE,
        "this encoder, int8, with the option": INT8,
        "transformers, torch.compile with CUDA graphs": CUDA_GRAPHS,
    }

    newest = newest_encoder_peers()
    compared = 0
    for name, *cells in rows_of("docs/encoder.md", "One picture"):
        if name.startswith("---"):
            continue
        if name == "" or "image" in cells[0]:
            model, counts = name, [int(cell.split()[0]) for cell in cells]
        elif name in names:
            for images, cell in zip(counts, cells, strict=True):
                if cell:
                    assert cell == both(newest[model, images, names[name]])
                    compared += 1
        else:  # Seconds of the first call.
            for images, cell in zip(counts, cells, strict=True):
                if cell:
                    found = newest[name, images, OUTSIDE]["compile_seconds"]
                    assert cell == f"{found:.1f}"
                    compared += 1
    assert compared == 5 * 5 + 4 * 5 + 3 + 6 + 6


def test_many_images_have_the_newest_times_of_whole_encoders():
    names = {
        "**this encoder, int8**": INT8,
        "**this encoder, bfloat16**, with the option of `embed`": BY_CUBLAS,
        "this encoder, bfloat16, without the option": IN_JIT,
        "the same, called outside of jit": OUTSIDE,
        AUTOTUNED: AUTOTUNED,
        COMPILED: COMPILED,
        "the same with torchao's int8": f"{COMPILED}, torchao's int8",
        "the same with torchao's float8": f"{COMPILED}, torchao's float8_e4m3fn",
        "this encoder, float8": "this encoder, blocks in float8_e4m3fn",
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
                assert cell == both(newest[model, 64, names[name]])
                compared += 1
        elif name in names:
            found = newest[model, 512, names[name]]
            rate = f"{1e3 * 512 / found['sustained']:,.0f}"
            peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f}"
            assert cells == [both(found), rate, f"{found['joules']:.3f}", peak]
            compared += 1
    assert compared == 4 * len(names)
    times = {name: newest[B16, 64, name] for name in (COMPILED, AUTOTUNED)}
    assert all(times[COMPILED][x] < times[AUTOTUNED][x] for x in ("burst", "sustained"))
    assert "With 64 pictures of B/16 its default mode is faster." in prose("docs/performance.md")


def test_two_gpus_have_the_rates_of_the_record():
    newest = {(r["model"], r["dtype"], r["gpus"], r["way"]): r for r in records("h200/scaling")}
    compared = 0
    names = {
        "operator, B/16 224, int8": ("operator", "int8"),
        "encoder, B/16 224, bfloat16": (B16, "bfloat16"),
        "encoder, B/16 224, int8": (B16, "int8"),
        "encoder, So400m/14 384, bfloat16": (SO400M, "bfloat16"),
    }
    for name, *cells in rows_of("docs/performance.md", "Several GPUs")[2:]:
        for (gpus, way), cell in zip([(1, WAYS[0]), (2, WAYS[0]), (2, WAYS[1])], cells):
            if cell:
                found = newest[*names[name], gpus, way]
                ratio = f" ({found['efficiency, sustained']:.3f})" if gpus > 1 else ""
                assert cell == f"{found['sustained']:,.0f}{ratio}"
                compared += 1
    assert compared == len(newest)
    bursts = {key: r["efficiency, burst"] for key, r in newest.items() if r["gpus"] == 2}
    of_operator = [bursts.pop(("operator", "int8", 2, way)) for way in WAYS]
    assert (
        f"In bursts the encoders reached {span(bursts.values(), 3)} of twice one GPU, and the "
        "operator {:.3f} with one process for both GPUs and {:.3f} with a process for each".format(
            *of_operator
        )
    ) in prose("docs/performance.md")


def test_int8_is_as_many_times_as_fast_as_the_records_say():
    newest = newest_encoder_peers()
    others = {"bfloat16": BY_CUBLAS, "torch.compile": COMPILED}
    others["torch.compile, max-autotune"] = AUTOTUNED
    header, _, *rows = rows_of("docs/eight_bits.md", "Speed")
    assert len(rows) == 7
    for name, *cells in rows:
        images, other = re.match(
            r"(?:energy of )?(\d+) pictures, (?:part of )?([\w.]+(?:, max-autotune)?)", name
        ).groups()
        for model, cell in zip(header[1:], cells, strict=True):
            ours, theirs = (newest[model, int(images), x] for x in (INT8, others[other]))
            ratios = [theirs[x] / ours[x] for x in ("burst", "sustained")]
            if name.startswith("energy"):
                ratios = [ours["joules"] / theirs["joules"]]
            assert cell == " / ".join(f"{ratio:.2f}" for ratio in ratios)


def change(found, before):
    """Returns the part of the time that is saved, in a burst and sustained."""
    return [1 - found[regime] / before[regime] for regime in ("burst", "sustained")]


def test_sentences_about_whole_encoders_have_the_numbers_of_the_records():
    newest, older = newest_encoder_peers(), newest_encoder_peers("h100")
    page = prose("docs/performance.md")
    b16, so400m = (newest[model, 512, AUTOTUNED]["compile_seconds"] for model in (B16, SO400M))
    assert (
        f"torch.compile needs {b16:.0f} s to compile B/16 in its mode max-autotune, and "
        f"{so400m:.0f} s for So400m"
    ) in page

    def difference(contender, models=(B16, SO400M)):
        return [100 * newest[model, 512, contender]["difference"] for model in models]

    int8, torchaos = difference(INT8), difference(f"{COMPILED}, torchao's int8")
    others = [
        x for name in (COMPILED, "flax, as big_vision has it", IN_JIT) for x in difference(name)
    ]
    assert (
        f"differ from those in bfloat16 by {int8[0]:.1f}% (B/16) and {int8[1]:.1f}%, torchao's by "
        f"{torchaos[0]:.1f} and {torchaos[1]:.1f}%, and other programs' in bfloat16 by "
        f"{span(others, 1)}%"
    ) in page
    ours = difference("this encoder, blocks in float8_e4m3fn")
    torchaos = difference(f"{COMPILED}, torchao's float8_e4m3fn")
    assert (
        "In float8 they differ by {:.1f} and {:.1f}%, and torchao's by {:.1f} and {:.1f}%".format(
            *ours, *torchaos
        )
        in page
    )

    families = [f"{family} B/16 224" for family in ("CLIP", "DINOv2")]
    ours, theirs = (
        [older[family, 512, name]["sustained"] for family in families]
        for name in (BY_CUBLAS, AUTOTUNED)
    )
    assert (
        f"512 images take {ours[0]:.1f} and {ours[1]:.1f} ms, sustained, and under torch.compile "
        f"in its mode max-autotune {theirs[0]:.1f} and {theirs[1]:.1f}"
    ) in page


def test_the_option_of_embed_saves_as_much_as_the_page_says():
    newest = newest_encoder_peers()

    def saved(model, *images):
        pairs = [[newest[model, n, name] for name in (BY_CUBLAS, IN_JIT)] for n in images]
        return [100 * x for ours, without in pairs for x in change(ours, without)]

    page = prose("docs/encoder.md")
    few = saved(SO400M, 16, 64)
    assert f"an H200 takes {span(few, 0)}% less time with it" in page
    b16, so400m = (span([round(x) for x in saved(model, 512)], 0) for model in (B16, SO400M))
    assert f"For 512 images of B/16 it takes {b16}% less time, and of So400m {so400m}%" in page
    assert f"up to {max(few):.0f}% less time" in prose("CHANGELOG.md")


def test_sentences_about_one_picture_have_the_numbers_of_the_records():
    page, newest = prose("docs/encoder.md"), newest_encoder_peers()

    def ratios(regime):
        return {
            (model, images): found[regime] / newest[model, images, CUDA_GRAPHS][regime]
            for (model, images, contender), found in newest.items()
            if contender == OUTSIDE and (model, images, CUDA_GRAPHS) in newest
        }

    among_many = [x for (_, images), x in ratios("sustained").items() if images <= 16]
    assert f"this encoder takes {span(among_many)} of torch's time" in page
    slower = {case: x for case, x in ratios("burst").items() if x > 1}
    assert slower.keys() == {(B16, n) for n in (1, 2, 4, 8, 16)}
    assert (
        f"takes {span(list(slower.values()))} times as long as torch's for 1 to 16 images of B/16."
    ) in page
    ours, torchs = zip(*single_calls())
    assert (
        "took {}, {}, {}, {} and {} ms outside of jit, and torch's program {}, {}, {}, {} and {}."
    ).format(*ours, *torchs) in page and len(ours) == 5
    turns = [
        x
        for variant in ("loop", CUDA_GRAPHS)
        for x in sorted(loops_over_blocks()[B16, 1, variant]["bursts"])
    ]
    assert (
        "of the encoder in a jit took {:.2f}, {:.2f} and {:.2f} ms, and of torch's program "
        "{:.2f}, {:.2f} and {:.2f}."
    ).format(*turns) in page
    b16, so400m = (newest[model, 1, AUTOTUNED] for model in (B16, SO400M))
    assert (
        f"needed {b16['compile_seconds']:.0f} s to compile B/16 and "
        f"{so400m['compile_seconds']:.0f} s for So400m, and one image then took {both(b16)} and "
        f"{both(so400m)} ms, when mode reduce-overhead took "
        + " and ".join(
            both(run[CUDA_GRAPHS])
            for model in (B16, SO400M)
            for run in encoder_peer_runs(model, 1)
            if AUTOTUNED in run
        )
    ) in page


def test_sentences_about_8_bits_have_the_ratios_of_the_records():
    newest, page = newest_encoder_peers(), prose("docs/eight_bits.md")

    def faster(model, contender):
        return (
            newest[model, 512, BY_CUBLAS]["sustained"] / newest[model, 512, contender]["sustained"]
        )

    powers, parts, without_out = [], [], []
    for run in encoder_peer_runs(SO400M, 512):
        if INT8 in run:
            powers.append(run[INT8]["joules"] * 512e3 / run[INT8]["sustained"])
            parts.append(run[INT8]["joules"] / run[BY_CUBLAS]["joules"])
    assert (
        "For So400m three runs gave {:.2f}, {:.2f} and {:.2f} of bfloat16's energy. Divided by the "
        "time, the energy in int8 was {:.0f}, {:.0f} and {:.0f} W."
    ).format(*parts, *powers) in page
    for model in (B16, SO400M):
        *_, run = (x for x in encoder_peer_runs(model, 512) if INT8_WITHOUT_OUT in x)
        without_out.append(run[BY_CUBLAS]["sustained"] / run[INT8_WITHOUT_OUT]["sustained"])
    assert "factors for 512 pictures were {:.2f} and {:.2f}".format(*without_out) in page
    dinov2 = "DINOv2 S/14 224"
    (four,) = (
        name for _, n, name in newest if n == 512 and "out of block 0, out of block 1" in name
    )
    assert (
        f"DINOv2 S/14 is {faster(dinov2, INT8):.2f} times as fast as in bfloat16, and "
        f"{faster(dinov2, four):.2f} times with the four layers"
    ) in page


def test_the_patch_embedding_is_this_part_of_an_encoder():
    newest = newest_encoder_peers()
    b16, so400m = (
        " / ".join(
            f"{newest[model, 512, CONVOLUTION][x] / newest[model, 512, BY_CUBLAS][x]:.2f}"
            for x in ("burst", "sustained")
        )
        for model in (B16, SO400M)
    )
    assert (
        f"512 pictures in bfloat16 took {b16} (B/16) and {so400m} times as long if a convolution "
        "embedded the patches"
    ) in prose("docs/performance.md")


def test_the_attention_has_the_times_of_the_record():
    times = {
        (tuple(r["shape"]), r["program"] == "cudnn"): r
        for r in records("h200/attention")
        if r["kind"] == "attention" and r.get("levels") == "" and r["mix"] is None
        if "sustained" in r
    }
    rows = [row for row in rows_of("docs/performance.md", "Whole encoders") if " x " in row[1]][1:]
    parts = []
    for _, shape, *cells in rows:
        key = tuple(int(n) for n in shape.split(" x "))
        cudnn, kernel = (times[key, is_cudnn] for is_cudnn in (True, False))
        assert cells == [both(cudnn, 3), both(kernel, 3)]
        parts += [1 - x for x in change(kernel, cudnn)]
    assert len(rows) == 3
    assert f"takes {span(parts)} of cuDNN's time" in prose("docs/performance.md")


def test_an_older_run_on_two_gpus_has_the_numbers_of_the_record():
    older = [
        r["efficiency"]
        for r in records("h200/devices")
        if r["kind"] == "devices" and r["devices"] == 2 and r["regime"] == "sustained"
    ]
    assert f"reached {span(older, 3)} of twice one GPU" in prose("docs/performance.md")


def test_packing_fills_rows_as_the_record_says():
    mixes = [r for r in records("h200/naflex") if r["kind"] == "fills" and r["mix"] != "all equal"]
    kept = [r for r in mixes if r["kept"] and r["mix"] == "panoramas and icons"]
    batch, rows = (span([100 * r[name] for r in kept], 0) for name in ("batch", "rows"))
    enlarged = [100 * r["batch"] for r in mixes if not r["kept"]]
    assert (
        f"a folder of panoramas and icons fills {batch}% of a padded batch, and {rows}% of the rows"
    ) in prose("docs/encoder.md")
    assert (
        f"then padded batches are {span(enlarged, 0)}% full, and packing saves at most "
        f"{100 - min(enlarged):.0f}% of the tokens"
    ) in prose("docs/encoder.md")


def test_the_page_of_embed_has_the_rates_of_the_records():
    page = prose("docs/embed.md")
    runs = [r for r in records("h200/resizing") + records("h200/embedding") if r["kind"] == "embed"]

    def rates(form, place, allowed):
        """Returns the rates of B/16 in hundreds of pictures a second, with default options."""
        key = B16, form, place, allowed, ""
        names = "encoder", "form", "place", "allowed", "options"
        found = [r["rate"] / 100 for r in runs if tuple(r.get(name) for name in names) == key]
        return " to ".join(f"{n}00" for n in sorted({round(min(found)), round(max(found))}))

    assert (
        f"16 cores embed {rates('jpeg', 'one', 16)} JPEG files per second, "
        f"{rates('tar', 'one', 16)} from tars and {rates('parquet', 'one', 16)} from parquet "
        f"files, and two cores {rates('jpeg', 'one', 2)}. 32 cores and two H200s embed "
        f"{rates('jpeg', 'all', 32)} JPEG files in one process, and {rates('jpeg', 'each', 32)} "
        "with a process for each GPU."
    ) in page
