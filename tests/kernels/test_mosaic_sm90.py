"""The Hopper kernel in Pallas' interpreter, with race detection, against the XLA backend."""

import dataclasses
import itertools

import pytest
from bounds import assert_bit_equal
from gpu import pairwise
from interpreter import check_wgmma, draw_operands, interpreted, problem_of
from planned import few, refusal
from short_suite import keep

from pallas_patch_embed.backends import xla
from pallas_patch_embed.backends.mosaic import SM90, sm90
from pallas_patch_embed.backends.mosaic.sm90 import Config
from pallas_patch_embed.chips import B200, H200, Target
from pallas_patch_embed.problem import NAMED_SHAPES, named_shape

HOPPER = Target("cuda", H200)
SMALL = few(H200, 4)


@pytest.fixture(autouse=True)
def checked_products(monkeypatch):
    check_wgmma(monkeypatch)


# The interpreter has no untiled view of the ring: rows are multiples of 8 here.
CASES = {
    "a run that wraps around the table": ((2, 96, 256), 128, "int8", "shared", Config(64, 4)),
    "a table of fewer rows than a tile": ((24, 32, 128), 128, "int8", "shared", Config(64, 5)),
    "many tiles a run": ((24, 64, 128), 128, "float8_e4m3fn", "shared", Config(128, 3)),
    "a phase change inside a worker": ((9, 72, 128), 64, "bfloat16", "shared", Config(64, 3)),
    "a tail": ((3, 72, 128), 64, "float8_e4m3fn", "shared", Config(64, 5)),
    "fewer entries than slots": ((1, 64, 128), 64, "int8", "none", Config(64, 9)),
    "more chunks than slots": ((2, 64, 640), 64, "bfloat16", "shared", Config(64, 3)),
    "more workers than tiles": ((1, 96, 128), 64, "int8", "none", Config(64, 4)),
    "one chunk a tile": ((6, 64, 128), 64, "int8", "shared", Config(64, 2)),
    "streamed weight": ((5, 72, 256), 128, "int8", "shared", Config(128, 3, 64, True)),
    "streamed weight, tiles of 256 rows": (
        (9, 64, 256),
        128,
        "float8_e4m3fn",
        "shared",
        Config(128, 5, 128, True),
    ),
    "streamed weight, two slots": (
        (9, 64, 256),
        64,
        "int8",
        "shared",
        Config(64, 2, 64, True),
    ),
    "streamed weight, tables of their own": (
        (3, 96, 256),
        64,
        "bfloat16",
        "per image",
        Config(64, 3, 128, True),
    ),
    "streamed weight, no table": (
        (3, 40, 256),
        64,
        "bfloat16",
        "none",
        Config(64, 5, 128, True),
    ),
}


# A weight that stays and one that is streamed; test_every_backend.py runs the rest.
KEPT = ["many tiles a run", "streamed weight"]
FLOAT32_CASES = ["a tail", "a phase change inside a worker", "streamed weight"]


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
    y = interpreted(SM90, operands, out_dtype, SMALL, config)
    assert_bit_equal(y, xla.run(*operands, out_dtype=out_dtype))


# By the number of barriers of each kind, for a ring of 3 slots and one chunk of the weight.
@pytest.mark.parametrize(
    "barriers",
    keep([((6,),), ((3,),), ((1,),), ((),)], lambda case: case == ((6,),), "seconds each"),
    ids=["filled", "freed", "weight_arrived", "columns_arrived"],
)
def test_a_missing_wait_is_noticed(monkeypatch, barriers):
    barrier_wait = sm90.plgpu.barrier_wait

    def forgetful_wait(barrier):
        if getattr(barrier, "ref", barrier).aval.shape != barriers:
            barrier_wait(barrier)

    monkeypatch.setattr(sm90.plgpu, "barrier_wait", forgetful_wait)
    patches, N, dtype, table, config = CASES["many tiles a run"]
    operands = draw_operands(0, patches, N, dtype, table)
    with pytest.raises(Exception, match=r"RACE DETECTED|no threads observed|deadlock"):
        interpreted(SM90, operands, "bfloat16", SMALL, config)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", NAMED_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_every_named_shape_has_a_config_that_fits(shape, dtype):
    for B in (1, 3, 4736):
        for out_dtype in ("bfloat16", "float32"):
            problem = problem_of(shape, dtype, B, out_dtype)
            assert refusal(SM90, problem, HOPPER) is None
            config = SM90.choose_config(problem, H200)
            config.check(problem, H200)
            assert 1 <= config.grid(problem, H200).thread_blocks <= 132


@pytest.mark.parametrize(
    "name, dtype, B, tile_n, rows, stream_weight",
    [
        ("B/16 224", "int8", 1, 64, 64, False),
        ("B/16 224", "int8", 8, 128, 64, False),
        ("B/16 224", "int8", 16, 192, 64, False),
        ("B/16 224", "int8", 4736, 192, 64, False),
        ("B/16 224", "bfloat16", 4736, 192, 128, True),
        ("L/16 256", "int8", 8, 128, 64, False),
        ("g-opt/16 256", "bfloat16", 8, 192, 64, True),
        ("B/32 256", "bfloat16", 32, 128, 64, True),
        ("B/32 256", "bfloat16", 64, 192, 64, True),
        ("B/32 256", "bfloat16", 128, 192, 128, True),
    ],
)
def test_the_config_is_the_fastest_that_was_measured(name, dtype, B, tile_n, rows, stream_weight):
    config = SM90.choose_config(problem_of(named_shape(name), dtype, B), H200)
    assert (config.tile_n, config.rows, config.stream_weight) == (tile_n, rows, stream_weight)


B16 = problem_of(NAMED_SHAPES[0], "int8")


@pytest.mark.parametrize(
    "change, target, text",
    [
        ({}, Target("cuda", B200), "compute capability 9.0"),
        ({}, Target("cpu"), "compute capability 9.0"),
        ({"dtype": "float32", "table_dtype": "float32"}, HOPPER, "not float32"),
        ({"weight": (2, 768, 768)}, HOPPER, "several"),
        ({"weight": (100, 768), "scale": (100,), "table": (196, 100)}, HOPPER, "multiple of 64"),
        ({"table": (8, 1, 768)}, HOPPER, "does not"),
        ({"patches": (2, 8, 196, 768), "table": (2, 1, 196, 768)}, HOPPER, "does not"),
        ({"table_dtype": "float32"}, HOPPER, "not float32"),
        ({"patches": (8, 196, 100), "weight": (768, 100)}, HOPPER, "multiple of 128 bytes"),
        ({"patches": (196, 768), "table": (1, 196, 768)}, HOPPER, "does not"),
    ],
)
def test_it_says_why_it_cannot_serve(change, target, text):
    reason = refusal(SM90, dataclasses.replace(B16, **change), target)
    assert text in reason and reason.endswith(".")


@pytest.mark.parametrize(
    "config, text",
    [
        (Config(96, 4), "multiples of 64"),
        (Config(512, 4), "multiples of 64"),
        (Config(192, 16), "bytes of shared memory"),
        (Config(64, 17), "expected 2 to 16"),
        (Config(64, 1), "expected 2 to 16"),
        (Config(64, 4, rows=96), "expected 64 or 128"),
        (Config(256, 4, rows=128, stream_weight=True), "registers a thread"),
    ],
)
def test_a_config_refuses_what_does_not_fit(config, text):
    with pytest.raises(NotImplementedError, match=text):
        config.check(B16, H200)


def test_a_trace_needs_shared_memory():
    Config(192, 10).check(B16, H200)
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        SM90.plan(B16, HOPPER, config=Config(192, 10), trace="traces")


def test_the_programs_for_a_GPU_are_a_pairwise_cover():
    programs = list(pairwise())
    assert len(programs) <= 60
    for a, b in itertools.combinations(range(4), 2):
        values = [{program[x] for program in programs} for x in (a, b)]
        assert {(p[a], p[b]) for p in programs} == set(itertools.product(*values))
