"""The benchmarks: contenders are checked, and no measurement is lost."""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from benchmarks import __main__ as benchmarks
from benchmarks import accuracy, ceilings, contenders, cutlass, encoder, plots, results
from benchmarks.contenders import BenchmarkProblem
from pallas_patch_embed.base.problem import NamedShape
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Timing
from pallas_patch_embed.siglip2 import Config
from tests.short_suite import keep

SMALL = NamedShape("small", 8, 36, 32)
CASE = BenchmarkProblem(SMALL, 3, "int8")


@pytest.fixture(autouse=True)
def wall_time(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: False)


def test_a_case_counts_the_necessary_bytes_and_operations():
    # An image has 4 x 4 patches of 192 bytes, padded to 256, and there are 32 columns. The last 4
    # pixels of each line are in no patch, but are read with the image.
    assert CASE.operations == 2 * 3 * 16 * 192 * 32
    assert CASE.written == 2 * 3 * 16 * 32
    once = 32 * 256 + 4 * 32 + 2 * 16 * 32
    assert CASE.bytes("patches") == 3 * 16 * 256 + once + CASE.written
    assert CASE.bytes("images") == 3 * 3 * 36 * 36 + once + CASE.written


@pytest.mark.parametrize(
    "pixels, dtype",
    keep(
        itertools.product(("random", "photographs"), ("int8", "float8_e4m3fn", "bfloat16")),
        lambda case: case[0] == "random" or case[1] == "int8",
        "compiles a dozen programs for each case",
    ),
)
def test_every_contender_is_correct(dtype, pixels):
    case = dataclasses.replace(CASE, dtype=dtype, pixels=pixels)
    data = contenders.draw(case)
    assert len(np.unique(data.images)) > 100
    found, left_out = contenders.entries(case, data)
    names = {"jnp.dot bare, [N, K]", "jnp.dot bare, [K, N]", "jnp.dot + positions", "xla"}
    names |= set() if dtype == "bfloat16" else {"dequantise + jnp.dot + positions"}
    assert {name for source, name in found if source == "patches"} >= names
    ways = {"convolution + positions", "patchify + jnp.dot + positions", "xla"}
    assert {name for source, name in found if source == "images"} >= ways
    assert "8.0 or newer" in left_out["triton"]


def test_contenders_can_be_chosen_by_name():
    names = ["xla", "jnp.dot + positions", "convolution + positions", "jnp.dot"]
    found, left_out = contenders.entries(CASE, contenders.draw(CASE), ("patches",), chosen=names)
    assert found.keys() == {("patches", "xla"), ("patches", "jnp.dot + positions")}
    assert left_out["jnp.dot"] == "no contender of these sources has this name."


def test_a_wrong_output_is_not_timed(monkeypatch):
    data = contenders.draw(CASE)
    right = contenders.convolution
    monkeypatch.setattr(contenders, "convolution", lambda *x, **y: 1.02 * right(*x, **y))
    found, left_out = contenders.entries(CASE, data, ("images",))
    assert ("images", "convolution + positions") not in found
    assert "is wrong: relative error 0.02" in left_out["convolution + positions"]
    embed = ppe.embed_images
    monkeypatch.setattr(ppe, "embed_images", lambda *x, **y: 1.02 * embed(*x, **y))
    with pytest.raises(RuntimeError, match=r"xla on .* relative error 0.02"):
        contenders.entries(CASE, data, ("images",))


def test_a_result_is_compared_with_the_fastest_whole_peer_and_the_floor():
    def of(name, ours, ms):
        times = Timing(ms, ms, ms, 5, 1500.0, 600.0)
        return results.result(CASE, "patches", name, ours, "sustained", times)

    measured = [
        of("ours", True, 2.0),
        of("jnp.dot bare", False, 1.0),
        of("a", False, 4.0),
        of("b", False, 3.0),
    ]
    limits = dict(copy=1e4 * CASE.bytes("patches"), widen=1.0, int8=CASE.operations / 5e-4)
    ours, *_ = found = results.compared(measured, limits)
    assert (ours.peer, ours.of_peer, ours.floor, ours.of_floor) == ("b", 2 / 3, 0.5, 4.0)
    # The floor is never above a measured time.
    (slow, *_) = results.compared(measured, limits | {"copy": 1.0})
    assert slow.floor == 1.0
    assert ours.images_a_second == pytest.approx(1500)
    assert ours.joules_a_million_images == pytest.approx(600 * 1e6 / 1500)
    assert ours.teraflops == pytest.approx(CASE.operations / 2e-3 / 1e12)
    assert "0.667" in results.table(found) and "600" in results.table(found)
    assert results.result_of(json.loads(json.dumps(ours.record()))) == ours


def test_cold_operands_are_copies_that_fill_the_cache(monkeypatch):
    monkeypatch.setattr(benchmarks, "OUT_OF_CACHE", 3 * CASE.bytes("patches"))
    found, _ = contenders.entries(CASE, contenders.draw(CASE), ("patches",))
    for entry in benchmarks.cold(CASE, found).values():
        every = [entry.contender.operands, *entry.contender.further]
        places = {jax.tree.leaves(operands)[0].unsafe_buffer_pointer() for operands in every}
        assert len(places) == 4


@pytest.mark.slow("measures in every regime and draws every picture")
def test_the_whole_command_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmarks, "named_shape", lambda name: SMALL)
    monkeypatch.setattr(benchmarks, "OUT_OF_CACHE", 200_000)
    monkeypatch.setattr(
        benchmarks,
        "ceilings",
        lambda dtypes, *_: dict.fromkeys([*dtypes, "copy", "widen"], 1e12),
    )
    sustained = timing.sustained
    monkeypatch.setattr(
        timing,
        "sustained",
        lambda c, seconds: {
            name: dataclasses.replace(t, clock=1400.0, power=690.0)
            for name, t in sustained(c, seconds=0.02, rounds=1, calls=2).items()
        },
    )
    command = "benchmarks --parts operator --shapes B/32:256 --images 2 3 --dtypes int8"
    command += " --pixels random --rounds 1 --rest 0"
    arguments = [word.replace(":", " ") for word in command.split()]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    benchmarks.main()
    printed = capsys.readouterr().out
    records = results.read(tmp_path / "results.jsonl")
    found = [results.result_of(r) for r in records if r["kind"] == "time"]
    assert {r.regime for r in found} == set(results.REGIMES)
    for regime in results.REGIMES:
        assert f"from images, {regime}: {results.REGIMES[regime]}" in printed
    assert {r["kind"] for r in records} == {"run", "ceiling", "time", "left out"}
    assert all(r.floor <= r.milliseconds and r.peer for r in found)
    pictures = {path.name.split("_")[0] for path in tmp_path.glob("*.png")}
    assert pictures == {"times", "throughput", "roofline", "energy"}
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(path) or path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--draw", str(tmp_path)])
    benchmarks.main()
    assert set(drawn) == set(tmp_path.glob("*.png"))


TINY = Config(32, 2, 2, 64, 8, (4, 4), image_size=(36, 36))


@pytest.fixture
def tiny_encoder(monkeypatch):
    monkeypatch.setitem(encoder.ENCODERS, "small", TINY)
    for module in (encoder, accuracy):
        monkeypatch.setattr(module, "named_shape", lambda name: SMALL)


@pytest.mark.slow("compiles five encoders")
def test_encoders_differ_only_in_the_patch_embedding(tiny_encoder, monkeypatch):
    measures = {
        "burst": functools.partial(timing.burst, rounds=1, calls=1, rest=0.0),
        "sustained": functools.partial(timing.sustained, seconds=0.01, rounds=1, calls=1),
    }
    found = encoder.speeds("small", 2, ["bfloat16", "int8"], measures)
    assert [s.regime for s in found] == 4 * ["burst"] + 4 * ["sustained"]
    names = [(s.way, s.dtype) for s in found[:4]]
    both = [("convolution", "bfloat16"), ("patchify + jnp.dot", "bfloat16"), ("xla", "bfloat16")]
    assert names == [*both, ("xla", "int8")]
    assert found[0].difference == 0 <= found[1].difference < found[3].difference < 0.05
    assert "gain" in encoder.table(found[4:])
    monkeypatch.setattr(encoder, "cut_and_product", lambda *x: -contenders.cut_and_product(*x))
    with pytest.raises(RuntimeError, match="relative error of the embeddings is"):
        encoder.speeds("small", 2, ["bfloat16"], measures)


@pytest.mark.slow("compiles an encoder in each dtype")
def test_the_accuracy_has_the_error_of_each_dtype(tiny_encoder):
    found = {a.dtype: a for a in accuracy.accuracies(name="small")}
    errors = [found[d].patch_error for d in ("bfloat16", "int8", "float8_e4m3fn")]
    assert 0.001 < errors[0] and errors == sorted(errors) and errors[-1] < 0.05
    assert all(a.pooled_cosine > 0.99 for a in found.values())
    assert "int8" in accuracy.table(list(found.values()))


def test_one_wrong_embedding_of_many_is_noticed():
    data = contenders.draw(dataclasses.replace(CASE, images=130))
    y = np.asarray(ppe.patch_embed(data.patches, data.params, backend="xla")).copy()
    assert contenders.error(jnp.asarray(y), data, "embedding") < contenders.LARGEST_ERROR
    y[129, 7] = 0
    assert contenders.error(jnp.asarray(y), data, "embedding") > 10 * contenders.LARGEST_ERROR


def test_CUTLASS_says_what_is_missing_and_what_it_cannot_serve(monkeypatch):
    data = contenders.draw(CASE)
    monkeypatch.setattr(cutlass.shutil, "which", lambda name: name)
    monkeypatch.setattr(cutlass, "headers", lambda: None)
    for found, missing in (
        (("nvcc", ""), "nvidia-cutlass"),
        ((None, "no nvcc was found"), "no nvcc"),
    ):
        monkeypatch.setattr(cutlass, "find_nvcc", lambda compiler, found=found: found)
        cutlass._registered.cache_clear()
        with pytest.raises(RuntimeError, match=missing):
            cutlass.fused(*contenders.operands(data))
    _, left_out = contenders.entries(CASE, data, ("patches",))
    assert "are for Hopper GPUs; this is cpu" in left_out["CUTLASS, fused, pingpong"]
    _, left_out = contenders.entries(CASE, data, ("patches",), built=False)
    assert left_out["CUTLASS, fused, pingpong"] == "its kernels take a minute to build."
    patches, weight, scale, table = contenders.operands(data)
    two = jnp.broadcast_to(table, (2, *table.shape))
    wrong = [
        (patches, weight, scale, two),  # 2 does not divide 3 images
        (patches, weight, scale, table[:, :8]),
        (patches, weight[:4], scale[:4], table[:, :4]),
        (patches.astype(jnp.float32), weight, scale, table),
    ]
    for operands in wrong:
        with pytest.raises(NotImplementedError, match=r"benchmarks\.cutlass"):
            cutlass.fused(*operands)


def test_ceilings_are_bytes_and_operations_a_second(monkeypatch):
    monkeypatch.setattr(
        timing, "burst", lambda compared, **_: {name: Timing(2.0, 2, 2, 1) for name in compared}
    )
    found = benchmarks.ceilings(["int8"], 1e-6, 64)
    assert found == {"copy": 2000 / 2e-3, "widen": 3000 / 2e-3, "int8": 2 * 64**3 / 2e-3}


def test_a_problem_that_mostly_writes_is_compared_with_the_ceiling_for_writes():
    def floor(case, source):
        r = results.result(case, source, "a", True, "burst", Timing(1e9, 1, 1, 1))
        limits = {"copy": 1.0, "widen": 10.0, case.dtype: 1e30}
        return results.compared([r], limits)[0].floor, 1e3 * case.bytes(source)

    wide = BenchmarkProblem(NamedShape("wide", 8, 32, 512), 300, "int8")
    copied, moved = floor(dataclasses.replace(CASE, dtype="bfloat16"), "patches")
    assert copied == moved
    widened, moved = floor(wide, "patches")
    assert widened == moved / 10


def test_a_table_has_units_and_the_fastest_first():
    slow = results.result(CASE, "patches", "slow", True, "burst", Timing(2.0, 1.5, 2.5, 5))
    fast = results.result(CASE, "patches", "fast", False, "burst", Timing(0.5, 0.4, 0.6, 5))
    limits = dict(copy=1e9, widen=1e9, int8=CASE.operations / 1e-4)
    head, first, second = results.table(results.compared([slow, fast], limits)).splitlines()
    assert head.split() == "ms 10% .. 90% GB/s TFLOP/s images/s of peer of floor".split()
    gigabytes, teraflops = CASE.bytes("patches") / 5e-4 / 1e9, CASE.operations / 5e-4 / 1e12
    assert first.split() == [
        *("fast", "0.5000", "0.4000", "..", "0.6000", f"{gigabytes:#.3g}", f"{teraflops:#.3g}"),
        *("6,000", "1.000", "5.000"),
    ]
    assert second.split()[-3:] == ["1,500", "4.000", "20.000"]


@pytest.mark.parametrize("clock, power", [(None, None), (1400.0, 690.0)], ids=["time", "power"])
def test_the_legend_explains_every_column(clock, power):
    times = Timing(2.0, 1.5, 2.5, 5, clock, power)
    r = results.result(CASE, "patches", "a", True, "sustained", times)
    head = results.table([r]).splitlines()[0]
    explained = [line[2:14] for line in results.legend(bool(power)).splitlines()[1:-1]]
    assert head.split() == " ".join(explained).split()


def test_everything_that_is_left_out_is_listed_once():
    cases = [dataclasses.replace(CASE, images=n, dtype=d) for n in (1, 8) for d in ("int8", "bf16")]
    found = {
        ("torch", "it is missing."): cases,
        ("cold", "too large."): cases[2:],
        ("jax", "only bfloat16."): [cases[0]],
    }
    assert results.left_out(found, cases).splitlines() == [
        "Left out:",
        "  torch: it is missing.",
        "  cold (images 8): too large.",
        "  jax (images 1; dtype int8): only bfloat16.",
    ]


def test_the_roofline_is_under_the_measured_ceilings(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: shown.append(figure) or path)
    r = results.result(CASE, "patches", "a", True, "burst", Timing(1.0, 1, 1, 1))
    plots.roofline([r], {"memory": 2e12, "int8": 5e14}, "", tmp_path / "x.png")
    line = shown[0].axes[0].lines[0]
    x, y = line.get_data()
    np.testing.assert_allclose(y, np.minimum(2 * x, 500))
    ((place,),) = (c.get_offsets() for c in shown[0].axes[0].collections)
    assert tuple(place) == pytest.approx((r.operations / r.bytes, r.teraflops))


@pytest.mark.parametrize(
    "wrong, answer",
    [
        ("--images 0", "--images"),
        ("--rounds -1", "--rounds"),
        ("--rest -1", "--rest"),
        ("--draw nowhere", "results.jsonl does not exist"),
        ("--checkpoint nowhere", "nowhere does not exist"),
        (f"--out {__file__}", "is not a folder"),
    ],
)
def test_useless_arguments_are_refused(monkeypatch, capsys, wrong, answer):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *wrong.split()])
    with pytest.raises(SystemExit):
        benchmarks.main()
    assert answer in capsys.readouterr().err


def test_a_record_without_times_has_no_pictures(tmp_path):
    assert benchmarks.draw([], tmp_path) == []


def test_results_from_before_a_failure_are_kept(monkeypatch, tmp_path):
    def some(chosen):
        yield [{"kind": "accuracy"}]

    def fails(chosen):
        yield [{"kind": "encoder"}]
        raise RuntimeError("gone")

    monkeypatch.setattr(benchmarks, "accuracies", some)
    monkeypatch.setattr(benchmarks, "encoders", fails)
    words = ["benchmarks", "--parts", "accuracy", "encoder", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(RuntimeError, match="gone"):
        benchmarks.main()
    kinds = [record["kind"] for record in results.read(tmp_path / "results.jsonl")]
    assert kinds == ["run", "accuracy", "encoder"]


def test_a_useless_regime_is_left_out_with_the_reason():
    found = benchmarks.regimes(dataclasses.replace(CASE, images=100), ["burst", "call"])
    assert found == {"burst": None, "call": "it is only measured for 64 images or fewer."}


def test_float32_is_compared_with_float32():
    case = dataclasses.replace(CASE, dtype="float32")
    data = contenders.draw(case)
    found, left_out = contenders.entries(case, data)
    for name in ("convolution + positions", "patchify + jnp.dot + positions"):
        entry = found["images", name]
        assert contenders.error(entry.contender(), data, "unpacked") < 1e-5
    assert "no kernels for float32" in left_out["CUTLASS, fused, pingpong"]
    assert (
        case.bytes("patches") == sum(x.nbytes for x in contenders.operands(data)) + 2 * 3 * 16 * 32
    )


def test_the_product_ceiling_counts_its_operations():
    ceiling = ceilings.product_ceiling("int8", 64)
    assert isinstance(ceiling, ceilings.Ceiling) and ceiling.operations == 2 * 64**3
    assert ceiling.contender().shape == (1, 64, 64)


def test_pictures_have_titles_and_captions(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: shown.append(figure) or path)
    data = contenders.draw(CASE)
    entries, _ = contenders.entries(CASE, data)
    times = [
        results.result(CASE, source, name, e.ours, "burst", Timing(1.0, 0.9, 1.2, 3))
        for (source, name), e in entries.items()
    ]
    times = results.compared(times, {"copy": 1e9, "widen": 1e9, "int8": 1e9})
    plots.times(times, "a GPU, a day", tmp_path / "x.png")
    (figure,) = shown
    assert "3 images, small, random pixels, burst" in figure.get_suptitle()
    assert "this package's backends" in figure.get_supxlabel()
    assert figure.get_supxlabel().replace("\n", " ").endswith("a GPU, a day")
    assert all(axes.get_xlabel() == "milliseconds" for axes in figure.axes)
