"""The Blackwell kernel in Pallas' interpreter, with race detection, against the XLA backend."""

import dataclasses

import jax
import pytest
import two_blocks
from bounds import assert_bit_equal
from gpu import DTYPES, check, draw
from interpreter import draw_operands, interpreted, problem_of
from planned import few, refusal
from short_suite import keep

from pallas_patch_embed.backends import xla
from pallas_patch_embed.backends.mosaic import SM100, sm100
from pallas_patch_embed.backends.mosaic.sm100 import Config
from pallas_patch_embed.chips import B200, B300, H200, Target
from pallas_patch_embed.problem import NAMED_SHAPES, NamedShape

BLACKWELL, ULTRA = Target("cuda", B200), Target("cuda", B300)
SMALL = few(B200, 8)

needs_two_blocks = pytest.mark.skipif(not two_blocks.KNOWN, reason=two_blocks.UNKNOWN)


@pytest.fixture(autouse=True)
def two_blocks_can_be_interpreted(monkeypatch):
    if two_blocks.KNOWN:
        two_blocks.install(monkeypatch)


def one_block(*arguments, **named):
    return Config(*arguments, collective=False, **named)


# The interpreter has no untiled view of the ring: rows are multiples of 8 here.
CASES = {
    "a run that wraps around the table": ((2, 96, 256), 128, "int8", "shared", one_block(64, 4)),
    "more workers than tiles": ((1, 96, 128), 64, "bfloat16", "none", one_block(64, 4)),
    "streamed weight": (
        (5, 72, 256),
        128,
        "bfloat16",
        "shared",
        one_block(128, 3, stream_weight=True),
    ),
    "many tiles a run": ((40, 64, 128), 64, "int8", "shared", one_block(64, 2)),
    "two blocks": ((4, 64, 128), 64, "int8", "shared", Config(64, 4)),
    "two blocks, a tail in the first": ((3, 72, 128), 64, "float8_e4m3fn", "shared", Config(64, 4)),
    "two blocks, a tail in the second": ((5, 72, 128), 64, "int8", "shared", Config(64, 2)),
    "two blocks, a run that wraps around": ((6, 96, 256), 128, "int8", "shared", Config(64, 4)),
    "two blocks, many tiles a run": ((60, 64, 128), 64, "float8_e4m3fn", "shared", Config(64, 3)),
    "two blocks, a phase change in a run": ((30, 72, 128), 64, "int8", "shared", Config(64, 3)),
    "two blocks, more chunks than slots": ((9, 64, 640), 64, "bfloat16", "shared", Config(64, 3)),
    "two blocks, one worker": ((12, 64, 256), 256, "float8_e4m3fn", "shared", Config(256, 4)),
    "two blocks, slices of 192": ((9, 72, 128), 192, "int8", "shared", Config(192, 4)),
    "two blocks, no table": ((9, 72, 256), 128, "int8", "none", Config(128, 2)),
    "two blocks, streamed weight": (
        (9, 72, 256),
        128,
        "bfloat16",
        "shared",
        Config(128, 3, stream_weight=True),
    ),
    "two blocks, streamed weight, float8": (
        (17, 64, 256),
        64,
        "float8_e4m3fn",
        "none",
        Config(64, 2, stream_weight=True),
    ),
    "two blocks, runs with a stride": ((48, 96, 256), 64, "int8", "shared", Config(64, 3)),
    "two blocks, three steps, many tiles": ((96, 96, 128), 192, "int8", "shared", Config(192, 3)),
    "two blocks, no table, many tiles": ((32, 64, 256), 512, "int8", "none", Config(256, 3)),
    "two blocks, one worker of many tiles": ((12, 64, 256), 512, "int8", "shared", Config(128, 3)),
    "streamed weight, many tiles": (
        (30, 64, 384),
        64,
        "int8",
        "shared",
        one_block(64, 4, stream_weight=True),
    ),
    "two blocks, streamed weight, many tiles": (
        (60, 64, 384),
        64,
        "int8",
        "shared",
        Config(64, 4, stream_weight=True),
    ),
    "two blocks, tables of their own": (
        (13, 40, 128),
        128,
        "bfloat16",
        "per image",
        Config(64, 4),
    ),
}
# One block and two, a weight that stays and one that is streamed, with a table and without, and
# every dtype.
KEPT = ["streamed weight", "two blocks, many tiles a run", "two blocks, no table"]
FLOAT32_CASES = ["streamed weight", "two blocks, slices of 192", "two blocks, no table"]


@needs_two_blocks
@pytest.mark.parametrize(
    "case, out_dtype",
    keep(
        [(case, "bfloat16") for case in CASES] + [(case, "float32") for case in FLOAT32_CASES],
        lambda case: case[0] in KEPT,
        "seconds each in the interpreter",
    ),
)
def test_interpreted_it_equals_xla_without_a_race(case, out_dtype):
    patches, N, dtype, table, config = CASES[case]
    operands = draw_operands(len(case), patches, N, dtype, table)
    y = interpreted(SM100, operands, out_dtype, SMALL, config)
    assert_bit_equal(y, xla.run(*operands, out_dtype=out_dtype))


@needs_two_blocks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [Config(128, 4), one_block(64, 4)], ids=["two", "one"])
@pytest.mark.slow("seconds each in the interpreter")
def test_rounded_results_are_within_the_bounds(dtype, config):
    operands = draw(jax.random.key(1), NamedShape("small", 16, 96, 128), dtype, 4)
    y = interpreted(SM100, operands, "bfloat16", SMALL, config)
    beyond, moved = check(y, operands, "bfloat16")
    assert beyond == 0 and moved <= 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", NAMED_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_every_named_shape_has_a_config_that_fits(shape, dtype):
    for B in (1, 3, 4736):
        for out_dtype in ("bfloat16", "float32"):
            problem = problem_of(shape, dtype, B, out_dtype)
            assert refusal(SM100, problem, BLACKWELL) is None
            config = SM100.choose_config(problem, B200)
            config.check(problem, B200)
            assert 1 <= config.grid(problem, B200).thread_blocks <= 148
            assert B < 4736 or ((config.collective and config.tile_n >= 192) or problem.N == 1024)


def test_the_register_split_takes_what_there_is():
    # setmaxnreg waits for registers that others have to give back.
    first, storing = sm100.REGISTER_SPLIT
    assert first + sm100.STORERS * storing == 168 * (1 + sm100.STORERS)


def test_a_weight_that_fits_stays_whatever_the_width():
    problem = problem_of(NAMED_SHAPES[0], "int8", 4736)
    for N in (64, 128, 320, 640):
        narrow = dataclasses.replace(problem, weight=(N, 768), scale=(N,), table=(196, N))
        assert not SM100.choose_config(narrow, B200).stream_weight


HEADLINE = problem_of(NAMED_SHAPES[0], "int8", 4736)


@pytest.mark.parametrize(
    "change, target, text",
    [
        ({}, Target("cuda", H200), "compute capability 10.0 or 10.3"),
        ({}, Target("cpu"), "this is cpu"),
        ({}, ULTRA, "no int8 tensor cores"),
        ({"dtype": "float32", "table_dtype": "float32"}, BLACKWELL, "not float32"),
        ({"weight": (100, 768), "scale": (100,), "table": (196, 100)}, BLACKWELL, "multiple of 64"),
        ({"table": (8, 1, 768)}, BLACKWELL, "does not"),
        ({"patches": (4736, 196, 100), "weight": (768, 100)}, BLACKWELL, "multiple of 128 bytes"),
        ({"patches": (196, 768), "table": (1, 196, 768)}, BLACKWELL, "does not"),
    ],
)
def test_it_says_why_it_cannot_serve(change, target, text):
    reason = refusal(SM100, dataclasses.replace(HEADLINE, **change), target)
    assert text in reason and reason.endswith(".")
    float8 = dataclasses.replace(HEADLINE, dtype="float8_e4m3fn")
    assert refusal(SM100, float8, ULTRA) is None


@pytest.mark.parametrize(
    "config, text",
    [
        (Config(96, 4), "multiples of 64"),
        (Config(384, 4), "columns of tensor memory"),
        (Config(256, 8), "bytes of shared memory"),
        (Config(256, 4, collective=False), "bytes of shared memory"),
        (Config(64, 1), "expected 2 to 32"),
    ],
)
def test_a_config_refuses_what_does_not_fit(config, text):
    with pytest.raises(NotImplementedError, match=text):
        config.check(HEADLINE, B200)


def test_a_trace_needs_shared_memory():
    Config(256, 4).check(HEADLINE, B200)
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        SM100.plan(HEADLINE, BLACKWELL, config=Config(256, 4), trace="traces")


def test_the_headline_fills_tensor_memory_and_224_KiB():
    config = SM100.choose_config(HEADLINE, B200)
    assert config == Config(256, 4)
    assert config.tensor_memory_columns() == 512
    assert config.shared_memory_bytes(HEADLINE) == 224 * 1024
