"""The attention of the kernel and of the formula agree with float64."""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import A100, B200, H200, Target
from pallas_patch_embed.layers import attention, attention_sm90
from pallas_patch_embed.layers.attention_sm90 import Config, Shape
from tests.encoder.attention_kernels import MULTIPROCESSORS
from tests.kernels.emulated import ALLOWED
from tests.ptx_emulator import mosaic
from tests.ptx_emulator.memory import POISON
from tests.repository import ROOT, environment

# Times on an H200, of `python -m benchmarks.attention --chosen`.
RECORD = ROOT / "benchmarks" / "h200" / "attention.jsonl"


def draw(shape, kind="normal", seed=0):
    """Draws q, k and v in bfloat16, of the given kind of scores."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=shape) for _ in range(3))
    if kind == "equal":
        q[:] = 0
    elif kind == "large":  # Scores up to about 1000.
        q, k = 12 * q, 12 * k
    elif kind == "one":  # Each query has one key with nearly the whole weight.
        k[:, 0] = 0
        k[:, 0, :, 0], q[..., 0] = 40, 40
    elif kind == "copy":  # Each query has its own key alone, and gets that key's values exactly.
        q[:] = k[:] = rng.choice([-16, 16], shape)
        v[:] = rng.integers(-640, 641, shape) / 4
    elif kind == "levels":  # Results that 8 bits can tell apart, and some that they clip.
        v *= 200
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]


def exact(q, k, v, lengths=None, result=2.0**-8):
    """Computes the attention in float64, and how far float32 with two roundings may be from it.

    The probabilities are rounded to bfloat16, 2^-8, and so is the result, `result`. A score's error
    is that of a float32 sum of D products, and of the multiplication by log2(e) / sqrt(D) and the
    subtraction of the largest score, whose results have its magnitude. It enters p as a factor, and
    the approximate exp2 adds 2^-22.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    D = q.shape[-1]
    scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(D)
    magnitudes = np.einsum("bshd,bthd->bhst", abs(q), abs(k)) / np.sqrt(D)
    if lengths is not None:
        # An image without keys has no attention, and its rows are not compared.
        lengths = np.maximum(lengths, 1)
        inside = np.arange(k.shape[1]) < lengths[:, None, None, None]
        scores = np.where(inside, scores, -np.inf)
        magnitudes = np.where(inside, magnitudes, 0)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("bhst,bthd->bshd", p, v)
    factor = 2.0**-22 + (D + 4) * 2.0**-23 * magnitudes.max(-1, keepdims=True)
    spread = np.einsum("bhst,bthd->bshd", p * (2.0**-8 + 2 * factor), abs(v))
    return y, 1.01 * (spread + result * (abs(y) + spread)) + 1e-30


def assert_near(found, operands, lengths=None):
    wanted, bound = exact(*operands, lengths=lengths)
    found = np.asarray(found, np.float64)
    rows = np.ones(found.shape[:2], bool)
    if lengths is not None:
        rows = np.arange(found.shape[1]) < np.asarray(lengths)[:, None]
    assert np.isfinite(found).all()
    assert (abs(found - wanted)[rows] <= bound[rows]).all()


def assert_levels(found, operands, kind, levels, lengths=None, result=2.0**-22):
    """Compares levels with those of all numbers that may be rounded to them, for every element.

    In the kernel only the division is between the sums and the levels, and the formula rounds to
    bfloat16 first, which `result` says. Probabilities of the kind "copy" are 0 and nearly 1, and
    not rounded: its levels have one value, except where two are equally near.
    """
    wanted, bound = exact(*operands, lengths=lengths, result=result)
    if kind == "copy":
        wanted = np.asarray(operands[2], np.float64)
        bound = 2.0**-20 * abs(wanted)
    least, largest = (rounded(x, levels) for x in (wanted - bound, wanted + bound))
    assert kind != "copy" or (least == largest).mean() > 0.6
    found = np.asarray(found).astype(np.float32)
    inside = (least <= found) & (found <= largest)
    if lengths is not None:
        inside[np.arange(found.shape[1]) >= np.asarray(lengths)[:, None]] = True
    assert inside.all()


def rounded(x, levels):
    """Rounds to the nearest level, ties to even, and clips."""
    most = {"int8": 127, "float8_e4m3fn": 448}[levels]
    x = np.clip(x, -most, most).astype(np.float32)
    return np.round(x) if levels == "int8" else x.astype(levels).astype(np.float32)


LEVELS = ("int8", "float8_e4m3fn")


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["levels", "copy"])
def test_levels_of_the_formula_are_those_of_float64(kind, levels):
    operands = draw((2, 37, 3, 24), kind)
    # XLA rounds to float8 twice on a CPU, first to float16.
    result = 2.0**-8 + 2.0**-11
    y = attention.attention(*operands, levels=levels)
    assert y.dtype == levels and y.shape == operands[0].shape
    assert_levels(y, operands, kind, levels, result=result)
    if kind == "copy":
        wanted = rounded(np.asarray(operands[2], np.float32), levels)
        np.testing.assert_array_equal(np.asarray(y, np.float32), wanted)
    lengths = np.array([5, 37], np.int32)
    y = attention.attention(*operands, lengths=jnp.asarray(lengths), levels=levels)
    assert_levels(y, operands, "levels", levels, lengths, result)
    mask = attention.prefix_mask(jnp.asarray(lengths), 37)
    masked = attention.attention(*operands, mask=mask, levels=levels)
    np.testing.assert_array_equal(masked, y)


@pytest.mark.parametrize("kind", ["normal", "equal", "large", "one"])
def test_the_formula_is_near_float64(kind):
    operands = draw((2, 37, 3, 24), kind)
    assert_near(attention.formula(*operands), operands)
    lengths = np.array([5, 37], np.int32)
    y = attention.formula(*operands, lengths=jnp.asarray(lengths))
    assert_near(y, operands, lengths)


# [B, S, H, D, consumers, keys, slots, images], as in attention_kernels.py.
OF_BFLOAT16 = {
    "one tile, two passes": [1, 196, 2, 64, 2, 256, 2, "whole"],
    "heads of 72": [1, 200, 2, 72, 2, 128, 2, "whole"],
    "heads of 80": [2, 129, 1, 80, 2, 64, 2, "whole"],
    "heads of 96": [2, 130, 1, 96, 3, 64, 2, "whole"],
    "heads of 128": [1, 257, 2, 128, 2, 64, 3, "whole"],
    "three consumers": [1, 400, 2, 64, 3, 128, 3, "whole"],
    "one token": [3, 1, 1, 72, 2, 64, 2, "whole"],
    "lengths in one tile": [5, 200, 2, 64, 2, 256, 2, "lengths"],
    "lengths in several tiles": [5, 300, 2, 72, 2, 128, 2, "lengths"],
    "segments": [2, 536, 2, 64, 2, 128, 2, [6, 300]],
    "segments of heads of 72": [2, 536, 1, 72, 3, 64, 2, [6, 300]],
}
# The same with results in 8 bits. Heads have two, one or no groups of four times eight columns, and
# one, two or no other groups of eight.
OF_LEVELS = {
    "one tile, two passes, int8": [1, 196, 2, 64, 2, 256, 2, "whole", "int8"],
    "heads of 72, float8": [1, 200, 2, 72, 2, 128, 2, "whole", "float8_e4m3fn"],
    "heads of 80, int8": [2, 129, 1, 80, 2, 64, 2, "whole", "int8"],
    "heads of 96, int8": [2, 130, 1, 96, 3, 64, 2, "whole", "int8"],
    "heads of 128, float8": [1, 257, 2, 128, 2, 64, 3, "whole", "float8_e4m3fn"],
    "one token, int8": [3, 1, 1, 72, 2, 64, 2, "whole", "int8"],
    "lengths in one tile, int8": [5, 200, 2, 64, 2, 256, 2, "lengths", "int8"],
    "lengths in several tiles, int8": [5, 300, 2, 72, 2, 128, 2, "lengths", "int8"],
    "segments, float8": [2, 536, 2, 64, 2, 128, 2, [6, 300], "float8_e4m3fn"],
    "segments of heads of 72, int8": [2, 536, 1, 72, 3, 64, 2, [6, 300], "int8"],
}
CASES = {name: [*case, ""] for name, case in OF_BFLOAT16.items()} | OF_LEVELS
LENGTHS = [0, 1, 128, 129, 1000]
# Of images in two rows of 536 tokens, with gaps of 0 to 8 tokens between them.
SEGMENTS = {"lengths": [300, 64, 129, 200, 0, 1], "first": [0, 304, 376, 536, 304, 744]}

# Shapes of encoders, each with the config that serves it.
SHAPES = {
    "B-16 224": [512, 196, 12, 64, 2, 256, 2, "whole"],
    "So400m-14 384": [64, 729, 16, 72, 3, 128, 2, "whole"],
    "L-16 384": [256, 576, 16, 64, 3, 128, 3, "whole"],
    "NaFlex": [64, 1024, 16, 72, 2, 128, 3, "lengths"],
    "NaFlex, packed": [8, 8192, 12, 64, 2, 128, 3, [68, 1024]],
}
ENCODERS = {
    f"{name} {levels}".strip(): [*shape, levels]
    for name, shape in SHAPES.items()
    for levels in ("", *LEVELS)
}


@pytest.fixture(scope="module")
def compiled(compilers, tmp_path_factory):
    """Compiles all cases; returns the folder, and the resources of the encoders' kernels."""
    folder = tmp_path_factory.mktemp("attention")
    program = [sys.executable, "-m", "tests.encoder.attention_kernels", str(folder)]
    result = subprocess.run(
        program,
        input=json.dumps([CASES, ENCODERS]),
        text=True,
        capture_output=True,
        env=environment(),
    )
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ENCODERS)
def test_nothing_is_spilled(compiled, name):
    registers, spilled = compiled[1][name]
    threads = 128 * (ENCODERS[name][4] + 1)
    assert spilled == 0 and registers * threads <= 65536


# Schedules of asynchronous work, each with a kind of scores. Together the cases run in all of them.
SCHEDULES = [("eager", "normal"), ("late", "large"), ("random", "one")]
SCHEDULES_OF_LEVELS = [("eager", "copy"), ("late", "levels"), ("random", "copy")]
RUNS = [
    pytest.param(
        *(name, *schedules[i], i),
        marks=() if i == number % 3 else pytest.mark.exhaustive("CI runs a case in one schedule"),
    )
    for cases, schedules in ((OF_BFLOAT16, SCHEDULES), (OF_LEVELS, SCHEDULES_OF_LEVELS))
    for number, name in enumerate(cases)
    for i in range(3)
]


@pytest.mark.parametrize("name, schedule, kind, seed", RUNS)
def test_the_compiled_kernel_is_near_float64(compiled, name, schedule, kind, seed):
    *shape, consumers, keys, slots, images, levels = CASES[name]
    operands = draw(shape, kind, seed)
    config = Config(consumers, keys, slots)
    arrays = [np.asarray(x) for x in operands]
    segments = images not in ("whole", "lengths")
    if segments:
        arrays = [x.reshape(1, -1, *shape[2:]) for x in arrays]
    of_y = arrays[0].shape
    flat = (shape[0] * shape[1], shape[2] * shape[3])  # The kernel's result in 8 bits.
    if images == "lengths":
        lengths = np.minimum(LENGTHS[: shape[0]], shape[1]).astype(np.int32)
        ordered = attention_sm90.with_order(config, *arrays, lengths)
        arrays = [np.asarray(x) for x in ordered]
    elif segments:
        # The kernel stores to its last operand, and XLA returns it.
        dtype = jnp.dtype(levels or arrays[0].dtype)
        poison = np.full(arrays[0].size * dtype.itemsize, POISON, np.uint8).view(dtype)
        first, lengths = (np.array(SEGMENTS[part], np.int32) for part in ("first", "lengths"))
        ordered = attention_sm90.with_order(config, *arrays, lengths, first, longest=images[1])
        queries, *arrays = [np.asarray(x) for x in ordered]
        # Results in 8 bits have an array of their own, others take the place of the queries.
        arrays = [queries, *arrays, poison.reshape(flat)] if levels else [*arrays, queries.copy()]
    result = (flat if levels else of_y, jnp.dtype(levels or "bfloat16"))
    machine, (address,) = mosaic.prepare(
        compiled[0] / name, arrays, [result], schedule=schedule, seed=seed, allowed=ALLOWED
    )
    machine.launch()
    if segments:
        address, *_ = machine.memory.arrays[len(arrays) - 1]
    y = machine.memory.read(address, *result).reshape(of_y)

    def check(y, operands, lengths=None):
        if not levels:
            assert_near(y, operands, lengths)
            return
        assert_levels(y, operands, kind, levels, lengths)

    if images == "whole":
        check(y, operands)
    elif images == "lengths":
        check(y, operands, arrays[3])
        # Passes in which all queries are padding are zero.
        assert not np.asarray(y[0], np.float32).any()
    else:
        q, (lengths, _, first, before) = queries, arrays[-4:]
        k, v = (np.asarray(x).reshape(of_y) for x in operands[1:])
        stored = np.zeros(y.shape[1], bool)
        for length, begin in zip(lengths, first):
            rows = slice(begin, begin + length)
            if length:
                check(y[:, rows], [x[:, rows] for x in (q, k, v)])
            stored[begin : begin + (length if levels else length // -8 * -8)] = True
        found, wanted = (x.reshape(y.shape)[:, ~stored] for x in (y, before))
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "shape, keys, levels",
    [((1, 256, 2, 64), 128, ""), ((2, 128, 1, 64), 128, ""), ((2, 100, 1, 64), 128, "int8")],
)
def test_the_interpreter_finds_no_race(shape, keys, levels):
    operands = draw(shape, "copy" if levels else "normal")
    chip = dataclasses.replace(H200, multiprocessors=MULTIPROCESSORS)
    y = attention_sm90.kernel(
        *operands,
        levels=levels,
        config=Config(2, keys, 2),
        chip=chip,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    if levels:
        assert_levels(y, operands, "copy", levels)
    else:
        assert_near(y, operands)


@pytest.mark.parametrize(
    "D, parts",
    [
        (64, [(0, 64)]),
        (72, [(0, 64), (64, 16)]),
        (80, [(0, 64), (64, 16)]),
        (96, [(0, 64), (64, 32)]),
        (128, [(0, 64), (64, 64)]),
    ],
)
def test_a_head_has_parts_that_wgmma_takes(D, parts):
    assert Shape(1, 1, 1, D).parts == parts


@pytest.mark.parametrize(
    "config, text",
    [
        (Config(4, 128, 2), "consumers is 4, expected 2 or 3"),
        (Config(2, 96, 2), "keys is 96, expected a multiple of 64"),
        (Config(2, 320, 2), "keys is 320, expected"),
        (Config(2, 128, 1), "slots is 1, expected 2 to 8"),
        (Config(2, 256, 8), "needs .* bytes of shared memory, but only"),
    ],
)
def test_a_config_that_cannot_serve_is_refused(config, text):
    with pytest.raises(NotImplementedError, match=text):
        config.check(Shape(1, 512, 1, 64), H200)


# The primitive

SERVED = {
    "whole": {64: range(100, 201), 72: range(729, 730)},
    "lengths": {64: range(196, 197)},
    "segments": {64: range(196, 197)},
}
MANY = 300  # Images that have enough units of work.
SHORT, LONG = (4, 196, 2, 64), (2, 729, 2, 72)


@pytest.mark.parametrize(
    "shape, dtype, target, name, text",
    [
        ((MANY, *SHORT[1:]), "bfloat16", Target("cuda", H200), "mosaic_sm90", ""),
        ((MANY, *LONG[1:]), "bfloat16", Target("cuda", H200), "mosaic_sm90", ""),
        (SHORT, "bfloat16", Target("cuda", H200), "cudnn", "have 8 units of work, fewer than 88"),
        ((0, *SHORT[1:]), "bfloat16", Target("cuda", H200), "cudnn", "have 0 units of work"),
        (
            (4, 201, 2, 64),
            "bfloat16",
            Target("cuda", H200),
            "cudnn",
            "measured to be faster for 201 tokens",
        ),
        ((4, 196, 2, 72), "bfloat16", Target("cuda", H200), "cudnn", "heads of 72 channels"),
        ((4, 1, 2, 64), "bfloat16", Target("cuda", H200), "xla", "one query"),
        ((4, 196, 2, 136), "bfloat16", Target("cuda", H200), "xla", "heads have 136 channels"),
        ((4, 196, 2, 44), "bfloat16", Target("cuda", H200), "xla", "not a multiple of 8"),
        (SHORT, "float32", Target("cuda", H200), "xla", "float32, not bfloat16"),
        (SHORT, "bfloat16", Target("cuda", B200), "cudnn", "capability 9.0"),
        (SHORT, "bfloat16", Target("cuda", A100), "cudnn", "capability 9.0"),
        (SHORT, "bfloat16", Target("cuda", H200, known=False), "cudnn", "the GPU is not known"),
        (SHORT, "bfloat16", Target("cpu"), "xla", "not run on an NVIDIA GPU"),
    ],
)
def test_the_program_is_chosen_with_a_reason(monkeypatch, shape, dtype, target, name, text):
    monkeypatch.setattr(attention, "SERVED", SERVED)
    chosen = attention.program_for(jax.ShapeDtypeStruct(shape, dtype), target)
    assert chosen.name == name and text in chosen.reason
    assert (chosen.config is None) == bool(chosen.reason) == (name != "mosaic_sm90")


@pytest.mark.parametrize("kind", attention.SERVED)
def test_every_served_shape_has_a_config_that_fits(kind):
    lengths = kind != "whole"
    for D, tokens in attention.SERVED[kind].items():
        for S in tokens:
            config = attention_sm90.choose(Shape(1, S, 1, D), H200, lengths=lengths)
            assert config.fits(Shape(1, S, 1, D), H200, lengths=lengths)
            if lengths:  # Small tiles follow the lengths.
                assert config.consumers == 2 and config.keys <= 128


def test_the_kernel_serves_only_where_it_was_measured_to_be_faster():
    """It takes less time than cuDNN for all mixes of lengths together."""
    times = {}
    for row in map(json.loads, RECORD.read_text().splitlines()):
        if row["kind"] == "attention" and not row.get("levels"):
            kind = "segments" if row.get("packed") else "lengths"
            key = (tuple(row["shape"]), "whole" if row["mix"] is None else kind)
            times.setdefault(key, {}).setdefault(row["mix"], {})[row["program"]] = row["burst"]
    served = {kind: set() for kind in attention.SERVED}
    for (shape, kind), of_mixes in times.items():
        q = jax.ShapeDtypeStruct(shape, "bfloat16")
        config = attention.program_for(q, Target("cuda", H200), kind).config
        if config is None:
            continue
        # Some mixes were measured only with three slots.
        names = [f"{config.consumers},{config.keys},{n}" for n in (config.slots, 3)]
        kernel = [next(found[n] for n in names if n in found) for found in of_mixes.values()]
        assert sum(kernel) < sum(found["cudnn"] for found in of_mixes.values())
        served[kind].add((shape[3], shape[1]))
    for kind, heads in attention.SERVED.items():
        for D, tokens in heads.items():
            assert {(D, tokens[0]), (D, tokens[-1])} <= served[kind]


def test_cudnn_gets_the_devices_for_which_its_lowering_asks(monkeypatch):
    @custom_partitioning
    def attends(q):
        return q + 1

    attends.def_partition(
        infer_sharding_from_operands=lambda mesh, shapes, result: shapes[0].sharding,
        partition=lambda mesh, shapes, result: (mesh, None, None, ()),
        sharding_rule="b s h d -> b s h d",
    )
    monkeypatch.setattr(attention, "_by_jax", lambda q, k, v, **_: attends(q))
    q = jnp.ones((1, 50, 2, 64), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(attend)(q, q, q), q + 1)


def test_a_head_that_no_config_fits_is_refused():
    with pytest.raises(NotImplementedError, match="no config fits heads of 136 channels"):
        attention_sm90.choose(Shape(1, 196, 1, 136), H200, lengths=False)


def attend(q, k, v, lengths=None, levels=""):
    return attention.attention(q, k, v, lengths=lengths, levels=levels)


def calls_of_the_kernel(monkeypatch, function, *arrays):
    return lowered(monkeypatch, function, *arrays).count("@mosaic_gpu_v2")


def lowered(monkeypatch, function, *arrays):
    monkeypatch.setattr(attention, "SERVED", SERVED)
    monkeypatch.setattr(attention, "FEWEST_UNITS", dict.fromkeys(attention.SERVED, 0))
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", H200))
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def abstract(shape, sharding=None):
    return [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)] * 3


def test_a_program_for_one_device_uses_the_kernel(monkeypatch):
    q, k, v = abstract(SHORT)
    lengths, mask = (jax.ShapeDtypeStruct(s, "int32") for s in (SHORT[:1], SHORT[:2]))
    assert calls_of_the_kernel(monkeypatch, attend, q, k, v) == 1
    assert calls_of_the_kernel(monkeypatch, attend, q, k, v, lengths) == 1
    assert calls_of_the_kernel(monkeypatch, jax.vmap(attend), *abstract((3, *SHORT))) == 1

    def packed(q, k, v, first, lengths):
        segments = attention.Segments(first, lengths, SHORT[1])
        return attention.attention(q, k, v, segments=segments)

    rows, number = abstract((2, 4 * SHORT[1], *SHORT[2:])), jax.ShapeDtypeStruct((7,), "int32")
    assert calls_of_the_kernel(monkeypatch, packed, *rows, number, number) == 1
    levels = functools.partial(attend, levels="int8")
    assert calls_of_the_kernel(monkeypatch, levels, q, k, v) == 1
    assert calls_of_the_kernel(monkeypatch, levels, q, k, v, lengths) == 1
    # No other operation has the result of 8 bits.
    text = lowered(monkeypatch, levels, q, k, v)
    (result,) = re.findall(r"custom_call @mosaic_gpu_v2.*-> (?:\()?(tensor<[^>]*>)", text)
    assert result == f"tensor<{SHORT[0] * SHORT[1]}x{SHORT[2] * SHORT[3]}xi8>"
    assert not re.search(r"^ *%\w+ = stablehlo\.(bitcast_)?convert", text, re.MULTILINE)

    def masked(q, k, v, mask):
        return attention.attention(q, k, v, mask=mask > 0)

    assert calls_of_the_kernel(monkeypatch, masked, q, k, v, mask) == 0


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["images", "heads"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_xla_never_partitions_the_kernel(monkeypatch, kind, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    arrays = abstract(SHORT, NamedSharding(mesh, spec))
    manual = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert calls_of_the_kernel(monkeypatch, attend, *arrays) == 0
    assert calls_of_the_kernel(monkeypatch, manual, *arrays) == 1
    operands = draw(SHORT)
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
    for function in (attend, manual):
        y = jax.jit(function)(*split)
        assert y.sharding.is_equivalent_to(split[0].sharding, y.ndim)
        assert_near(y, operands)


def test_transformations_agree_with_the_formula():
    q, k, v = (x.astype(jnp.float32) for x in draw((3, 17, 2, 8)))
    lengths = jnp.array([4, 17, 9])

    def compare(transform):
        found, wanted = (jax.jit(transform(f))(q, k, v) for f in (attend, attention.formula))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)

    compare(lambda f: lambda q, k, v: f(q, k, v, lengths))
    compare(lambda f: jax.vmap(lambda *x: f(*(a[None] for a in x))[0]))
    compare(lambda f: jax.vmap(lambda q, k, _: f(q[None], k[None], v[:1])[0]))  # v is not mapped
    compare(lambda f: jax.vmap(lambda *x: f(*(a[:, :, None] for a in x)), (2, 2, 2), out_axes=2))
    compare(lambda f: jax.grad(lambda *x: jnp.square(f(*x, lengths)).sum(), (0, 1, 2)))
    compare(lambda f: lambda q, k, v: jax.jvp(lambda k: f(q, k, v), (k,), (v,)))


def test_segments_and_their_transformations_agree_with_each_image():
    rows = [jnp.asarray(x, jnp.float32) for x in draw((3, 2, 24, 2, 8))]  # 3 batches of 2 rows
    lengths, first = (5, 9, 24), (0, 8, 24)
    segments = attention.Segments(jnp.array(first), jnp.array(lengths), 24)

    def packed(q, k, v):
        return attention.attention(q, k, v, segments=segments)

    def each(q, k, v):
        q, k, v = (x.reshape(1, 48, 2, 8) for x in (q, k, v))
        y = jnp.zeros_like(q)
        for n, i in zip(lengths, first):
            image = attention.formula(*(x[:, i : i + n] for x in (q, k, v)))
            y = y.at[:, i : i + n].set(image)
        return y.reshape(2, 24, 2, 8)

    def gradient(f):
        return jax.grad(lambda *x: jnp.square(f(*x)).sum(), (0, 1, 2))

    for transform in (jax.vmap, lambda f: jax.vmap(gradient(f))):
        found, wanted = (jax.jit(transform(f))(*rows) for f in (packed, each))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), found, wanted)


def test_a_mask_and_lengths_say_the_same():
    operands = draw((2, 37, 3, 24))
    lengths = jnp.array([5, 37], jnp.int32)
    mask = attention.prefix_mask(lengths, 37)
    by_mask = attention.attention(*operands, mask=mask)
    np.testing.assert_array_equal(by_mask, attend(*operands, lengths=lengths))
    one_query = attention.attention(operands[0][:, :1], *operands[1:], lengths=lengths)
    np.testing.assert_array_equal(one_query, by_mask[:, :1])


def test_an_exported_program_has_no_kernel(monkeypatch):
    monkeypatch.setattr(attention, "SERVED", SERVED)
    exported = jax.export.export(jax.jit(attend), platforms=("cpu", "cuda"))(*abstract(SHORT))
    assert "mosaic_gpu" not in exported.mlir_module()
    operands = draw(SHORT)
    assert_near(exported.call(*operands), operands)
