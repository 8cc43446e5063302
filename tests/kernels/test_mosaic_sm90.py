"""The Hopper kernel: a missing wait is detected, and the expected configs are chosen."""

import pytest

from pallas_patch_embed.backends.mosaic import SM90, sm90
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.base.chips import H200
from pallas_patch_embed.base.problem import named_shape
from tests.kernels.interpreter import check_wgmma, draw_operands, interpreted, problem_of
from tests.operator.planned import few
from tests.short_suite import keep


# With a ring of 3 slots and one chunk, the shape of a barrier array identifies its purpose.
@pytest.mark.parametrize(
    "barriers",
    keep([((6,),), ((3,),), ((1,),), ((),)], lambda case: case == ((6,),), "takes seconds"),
    ids=["filled", "freed", "weight_arrived", "columns_arrived"],
)
def test_a_missing_wait_is_noticed(monkeypatch, barriers):
    barrier_wait = sm90.plgpu.barrier_wait

    def forgetful_wait(barrier):
        if getattr(barrier, "ref", barrier).aval.shape != barriers:
            barrier_wait(barrier)

    monkeypatch.setattr(sm90.plgpu, "barrier_wait", forgetful_wait)
    check_wgmma(monkeypatch)
    operands = draw_operands(0, (24, 64, 128), 128, "float8_e4m3fn", "shared")
    with pytest.raises(Exception, match=r"RACE DETECTED|no threads observed|deadlock"):
        interpreted(SM90, operands, "bfloat16", few(H200, 4), HopperConfig(128, 3))


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
