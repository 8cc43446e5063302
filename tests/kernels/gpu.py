"""The GPU on which the tests run, and operands for it."""

import jax

from pallas_patch_embed.base.problem import NamedShape, Problem
from pallas_patch_embed.commands.check import compare
from tests.kernels.interpreter import problem_of

DTYPES = ("float8_e4m3fn", "int8", "bfloat16")
RUNS = 20


def gpu():
    """Returns the first GPU that JAX sees; None if there is none."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def draw(seed: int, shape: NamedShape, dtype: str, B: int):
    """Draws random operands of a shape, with patches; NaFlex has a table for every image."""
    return compare.draw(jax.random.key(seed), problem_of(shape, dtype, B))


def count_wrong(y, operands, out_dtype: str) -> int:
    """Counts the wrong elements of a result that tensor cores computed."""
    problem = Problem.of(*operands, out_dtype=out_dtype)
    found = compare.compare(problem, operands, operands, y, tensor_cores=True)
    return compare.Counts(1, y.size, *found).all_wrong
