"""`pallas-patch-embed check`, and the comparison that it makes."""

import functools

import jax.numpy as jnp
import pytest

from pallas_patch_embed.backends import xla
from pallas_patch_embed.check.compare import wrong_elements
from pallas_patch_embed.problem import Problem


def small(dtype, out_dtype="bfloat16"):
    return Problem((2, 5, 128), (64, 128), (64,), (5, 64), dtype, "bfloat16", out_dtype)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_wrong_element_is_found_in_every_run(dtype):
    problem = small(dtype)
    right = functools.partial(xla.run, out_dtype=problem.out_dtype)
    assert wrong_elements(right, problem, runs=1, seed=1) == 0

    def wrong(*operands):
        return right(*operands).at[1, 4, 63].multiply(1.02)

    assert wrong_elements(wrong, problem, runs=2, seed=1) == 2


def test_a_missing_element_is_wrong():
    def forgets_one(*operands):
        return xla.run(*operands, out_dtype="float32").at[0, 0, 0].set(jnp.nan)

    assert wrong_elements(forgets_one, small("int8", "float32"), runs=1, seed=1) == 1
