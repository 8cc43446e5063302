"""Both Pallas kernels in Pallas' interpreter with race detection, and their refusals."""

import dataclasses

import jax
import pytest

from pallas_patch_embed.backends import xla
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base.chips import B200, B300, H200, Target
from pallas_patch_embed.base.problem import NAMED_SHAPES, Epilogue
from tests.kernels import two_blocks
from tests.kernels.emulated import BF16, FP8, INT8, hopper, one, two
from tests.kernels.interpreter import check_wgmma, interpreted, problem_of
from tests.operator.bounds import assert_bit_equal
from tests.operator.planned import few, refusal
from tests.short_suite import keep

HOPPER, BLACKWELL, ULTRA = (Target("cuda", chip) for chip in (H200, B200, B300))

# All operands have a multiple of 8 rows, because the interpreter has no untiled view of the ring.
CASES = {
    "Hopper, a segment that wraps around the table": hopper(
        (2, 96, 256), 128, INT8, "shared", 64, 4
    ),
    "Hopper, a table of fewer rows than a tile": hopper((24, 32, 128), 128, INT8, "shared", 64, 5),
    "Hopper, many tiles a segment": hopper((24, 64, 128), 128, FP8, "shared", 128, 3),
    "Hopper, a phase change inside a worker": hopper((9, 72, 128), 64, BF16, "shared", 64, 3),
    "Hopper, a tail": hopper((3, 72, 128), 64, FP8, "shared", 64, 5),
    "Hopper, fewer entries than slots": hopper((1, 64, 128), 64, INT8, "none", 64, 9),
    "Hopper, more chunks than slots": hopper((2, 64, 640), 64, BF16, "shared", 64, 3),
    "Hopper, more workers than tiles": hopper((1, 96, 128), 64, INT8, "none", 64, 4),
    "Hopper, one chunk a tile": hopper((6, 64, 128), 64, INT8, "shared", 64, 2),
    "Hopper, streamed weight": hopper((5, 72, 256), 128, INT8, "shared", 128, 3, 64, True),
    "Hopper, streamed weight, tiles of 256 rows": hopper(
        (9, 64, 256), 128, FP8, "shared", 128, 5, 128, True
    ),
    "Hopper, streamed weight, two slots": hopper((9, 64, 256), 64, INT8, "shared", 64, 2, 64, True),
    "Hopper, streamed weight, per-image positions": hopper(
        (3, 96, 256), 64, BF16, "per image", 64, 3, 128, True
    ),
    "Hopper, streamed weight, no table": hopper((3, 40, 256), 64, BF16, "none", 64, 5, 128, True),
    "Hopper, an epilogue": hopper(
        (2, 72, 128), 64, INT8, "none", 64, 3, epilogue=("relu", True, False, False, 3)
    ),
    "one block, a segment that wraps around the table": one(
        (2, 96, 256), 128, INT8, "shared", 64, 4
    ),
    "one block, more workers than tiles": one((1, 96, 128), 64, BF16, "none", 64, 4),
    "one block, streamed weight": one(
        (5, 72, 256), 128, BF16, "shared", 128, 3, stream_weight=True
    ),
    "one block, many tiles a segment": one((40, 64, 128), 64, INT8, "shared", 64, 2),
    "one block, streamed weight, many tiles": one(
        (30, 64, 384), 64, INT8, "shared", 64, 4, stream_weight=True
    ),
    "one block, an epilogue": one(
        (3, 72, 256), 128, INT8, "none", 128, 3, epilogue=("relu", True, True)
    ),
    "two blocks, an epilogue": two(
        (9, 72, 128), 128, BF16, "none", 128, 3, epilogue=("", True, True, False, 1)
    ),
    "two blocks": two((4, 64, 128), 64, INT8, "shared", 64, 4),
    "two blocks, a tail in the first": two((3, 72, 128), 64, FP8, "shared", 64, 4),
    "two blocks, a tail in the second": two((5, 72, 128), 64, INT8, "shared", 64, 2),
    "two blocks, a segment that wraps around": two((6, 96, 256), 128, INT8, "shared", 64, 4),
    "two blocks, many tiles a segment": two((60, 64, 128), 64, FP8, "shared", 64, 3),
    "two blocks, a phase change in a worker": two((30, 72, 128), 64, INT8, "shared", 64, 3),
    "two blocks, more chunks than slots": two((9, 64, 640), 64, BF16, "shared", 64, 3),
    "two blocks, one worker": two((12, 64, 256), 256, FP8, "shared", 256, 4),
    "two blocks, slices of 192": two((9, 72, 128), 192, INT8, "shared", 192, 4),
    "two blocks, no table": two((9, 72, 256), 128, INT8, "none", 128, 2),
    "two blocks, streamed weight": two(
        (9, 72, 256), 128, BF16, "shared", 128, 3, stream_weight=True
    ),
    "two blocks, streamed weight, float8": two(
        (17, 64, 256), 64, FP8, "none", 64, 2, stream_weight=True
    ),
    "two blocks, segments with a stride": two((48, 96, 256), 64, INT8, "shared", 64, 3),
    "two blocks, three steps, many tiles": two((96, 96, 128), 192, INT8, "shared", 192, 3),
    "two blocks, no table, many tiles": two((32, 64, 256), 512, INT8, "none", 256, 3),
    "two blocks, one worker of many tiles": two((12, 64, 256), 512, INT8, "shared", 128, 3),
    "two blocks, streamed weight, many tiles": two(
        (60, 64, 384), 64, INT8, "shared", 64, 4, stream_weight=True
    ),
    "two blocks, per-image positions": two((13, 40, 128), 128, BF16, "per image", 64, 4),
}
# Cases of the short suite: one block and two, a stationary and a streamed weight, with and without
# a table, every dtype, and both output dtypes of each chip. test_every_backend.py covers the rest.
SHORT = (
    ("Hopper, many tiles a segment", "bfloat16"),
    ("Hopper, streamed weight", "float32"),
    ("Hopper, an epilogue", "bfloat16"),
    ("one block, streamed weight", "bfloat16"),
    ("one block, an epilogue", "bfloat16"),
    ("two blocks, many tiles a segment", "bfloat16"),
    ("two blocks, no table", "float32"),
)
FLOAT32_CASES = (
    "Hopper, a tail",
    "Hopper, a phase change inside a worker",
    "Hopper, streamed weight",
    "one block, streamed weight",
    "two blocks, slices of 192",
    "two blocks, no table",
)


@pytest.mark.parametrize(
    "name, out_dtype",
    keep(
        [(name, "bfloat16") for name in CASES] + [(name, "float32") for name in FLOAT32_CASES],
        lambda case: case in SHORT,
        "each case takes seconds in the interpreter; CI runs every second one",
        lambda case: (list(CASES).index(case[0]) + (case[1] == "float32")) % 2 == 0,
    ),
)
def test_interpreted_it_equals_xla_without_a_race(monkeypatch, name, out_dtype):
    case = CASES[name]
    if case.served_by is SM90:
        check_wgmma(monkeypatch)
        target = few(H200, 4)
    elif two_blocks.KNOWN:
        two_blocks.install(monkeypatch)
        target = few(B200, 8)
    else:
        pytest.skip(two_blocks.UNKNOWN)
    operands, epilogue = case.draw(len(name)), Epilogue(*case.epilogue)
    y = interpreted(case.served_by, operands, out_dtype, target, case.chosen, epilogue=epilogue)
    wanted = xla.run(*operands, out_dtype=out_dtype, epilogue=epilogue)
    jax.tree.map(assert_bit_equal, y, wanted)


@pytest.mark.parametrize("backend, chip", [(SM90, H200), (SM100, B200)], ids=["sm90", "sm100"])
@pytest.mark.parametrize("dtype", [FP8, BF16, INT8])
@pytest.mark.parametrize("shape", NAMED_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_every_named_shape_has_a_config_that_fits(backend, chip, shape, dtype):
    for B in (1, 3, 4736):
        for out_dtype in ("bfloat16", "float32"):
            problem = problem_of(shape, dtype, B, out_dtype)
            assert refusal(backend, problem, Target("cuda", chip)) is None
            config = backend.choose_config(problem, chip)
            config.check(problem, chip)
            assert 1 <= config.tiling(problem, chip).thread_blocks <= chip.multiprocessors


B16 = problem_of(NAMED_SHAPES[0], INT8)
N_100 = dict(weight=(100, 768), scale=(100,), table=(196, 100))
REFUSED_BY_BOTH = [
    (dict(dtype="float32", table_dtype="float32"), "not float32"),
    (dict(table_dtype="float32"), "the table is float32"),
    (dict(weight=(2, 768, 768)), "several"),
    (N_100, "multiple of 64"),
    (dict(table=(8, 1, 768)), "with the last leading axes"),
    (dict(patches=(2, 8, 196, 768), table=(2, 1, 196, 768)), "with the last leading axes"),
    (dict(patches=(196, 768), table=(1, 196, 768)), "with the last leading axes"),
    (dict(patches=(8, 196, 100), weight=(768, 100)), "multiple of 128 bytes"),
]


@pytest.mark.parametrize("change, text", REFUSED_BY_BOTH)
@pytest.mark.parametrize("backend, target", [(SM90, HOPPER), (SM100, BLACKWELL)])
def test_what_it_cannot_serve_is_refused_with_the_reason(backend, target, change, text):
    reason = refusal(backend, dataclasses.replace(B16, **change), target)
    assert text in reason and reason.endswith(".")


@pytest.mark.parametrize(
    "backend, target, text",
    [
        (SM90, BLACKWELL, "compute capability 9.0"),
        (SM90, Target("cpu"), "compute capability 9.0"),
        (SM100, HOPPER, "compute capability 10.0 or 10.3"),
        (SM100, Target("cpu"), "the target is cpu"),
        (SM100, ULTRA, "no int8 tensor cores"),
    ],
)
def test_a_chip_that_it_does_not_support_is_refused(backend, target, text):
    reason = refusal(backend, B16, target)
    assert text in reason and reason.endswith(".")


def test_a_B300_is_served_float8():
    assert refusal(SM100, dataclasses.replace(B16, dtype=FP8), ULTRA) is None


@pytest.mark.parametrize(
    "chip, config, text",
    [
        (H200, HopperConfig(96, 4), "multiple of 64 that divides N"),
        (H200, HopperConfig(512, 4), "multiple of 64 that divides N"),
        (H200, HopperConfig(192, 16), "bytes of shared memory"),
        (H200, HopperConfig(64, 17), "expected 2 to 16"),
        (H200, HopperConfig(64, 1), "expected 2 to 16"),
        (H200, HopperConfig(64, 4, rows=96), "expected 64 or 128"),
        (H200, HopperConfig(64, 4, consumers=4), "consumers is 4, expected 1 to 3"),
        (H200, HopperConfig(64, 11, consumers=3), "expected 2 to 10"),
        (H200, HopperConfig(192, 4, rows=128, consumers=3), "registers per thread"),
        (H200, HopperConfig(256, 4, rows=128, stream_weight=True), "registers per thread"),
        (B200, BlackwellConfig(96, 4), "multiple of 64 that divides N"),
        (B200, BlackwellConfig(384, 4), "columns of tensor memory"),
        (B200, BlackwellConfig(256, 8), "bytes of shared memory"),
        (B200, BlackwellConfig(256, 4, collective=False), "bytes of shared memory"),
        (B200, BlackwellConfig(64, 1), "expected 2 to 32"),
        (B200, BlackwellConfig(64, 4, buffers=3), "expected 1 or 2"),
    ],
)
def test_a_config_refuses_what_does_not_fit(chip, config, text):
    with pytest.raises(NotImplementedError, match=text):
        config.check(B16, chip)


@pytest.mark.parametrize(
    "backend, chip, config",
    [
        (SM90, H200, HopperConfig(192, 10)),
        (SM100, B200, BlackwellConfig(256, 6, buffers=1)),
    ],
)
def test_a_trace_needs_shared_memory(backend, chip, config):
    config.check(B16, chip)
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        backend.plan(B16, Target("cuda", chip), config=config, trace="traces")
