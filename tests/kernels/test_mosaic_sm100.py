"""The Blackwell kernel: rounded results in Pallas' interpreter, and the configs that it chooses."""

import dataclasses
import itertools

import pytest

from pallas_patch_embed.backends.mosaic import SM100, heuristics, sm100
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base.chips import B200
from pallas_patch_embed.base.problem import NAMED_SHAPES, NamedShape
from tests.kernels import two_blocks
from tests.kernels.gpu import DTYPES, count_wrong, draw
from tests.kernels.interpreter import interpreted, problem_of
from tests.operator.planned import few

HEADLINE = problem_of(NAMED_SHAPES[0], "int8", 4736)


@pytest.mark.skipif(not two_blocks.KNOWN, reason=two_blocks.UNKNOWN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config",
    [
        BlackwellConfig(128, 4),
        BlackwellConfig(64, 4, collective=False),
        BlackwellConfig(128, 4, buffers=1),
    ],
    ids=["two blocks", "one block", "one buffer"],
)
@pytest.mark.slow("each case takes seconds in the interpreter")
def test_rounded_results_are_within_the_bounds(monkeypatch, dtype, config):
    two_blocks.install(monkeypatch)
    operands = draw(1, NamedShape("small", 16, 96, 128), dtype, 4)
    y = interpreted(SM100, operands, "bfloat16", few(B200, 8), config)
    assert count_wrong(y, operands, "bfloat16") == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NAMED_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_many_images_get_pairs_of_blocks_and_wide_slices(shape, dtype):
    for out_dtype in ("bfloat16", "float32"):
        problem = problem_of(shape, dtype, 4736, out_dtype)
        config = SM100.choose_config(problem, B200)
        assert (config.collective and config.tile_n >= 192) or problem.N == 1024


def test_the_register_split_distributes_all_registers():
    # setmaxnreg waits until other warpgroups have released the registers that it requests.
    first, storing = sm100.REGISTER_SPLIT
    assert first + sm100.STORERS * storing == 168 * (1 + sm100.STORERS)


def test_a_weight_that_fits_is_stationary_whatever_the_width():
    for N in (64, 128, 320, 640):
        narrow = dataclasses.replace(HEADLINE, weight=(N, 768), scale=(N,), table=(196, N))
        assert not SM100.choose_config(narrow, B200).stream_weight


def test_the_headline_fills_tensor_memory_and_224_KiB():
    config = SM100.choose_config(HEADLINE, B200)
    assert config == BlackwellConfig(256, 6, buffers=1)
    assert config.tensor_memory_columns() == 512
    assert config.shared_memory_bytes(HEADLINE) == 224 * 1024


def test_a_staging_buffer_is_given_up_only_for_more_slots():
    """The search also has the configs with two buffers."""
    found = heuristics.list_sm100(HEADLINE, B200)
    wide = [c for c in found if c.tile_n == 256 and not c.stream_weight]
    assert wide == [BlackwellConfig(256, 6, buffers=1), BlackwellConfig(256, 4)]
    for shape, dtype in itertools.product(NAMED_SHAPES, DTYPES):
        for config in heuristics.list_sm100(problem_of(shape, dtype, 4736), B200):
            assert config.buffers == 2 or config.slots >= heuristics.ENOUGH_SLOTS
