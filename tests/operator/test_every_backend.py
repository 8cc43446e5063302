"""One suite for every backend: exact results for small operands of every kind, or a refusal."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_bit_equal
from interpreter import draw_operands
from planned import compute
from runners import (
    RUNNERS,
    run_mosaic_sm90,
    run_mosaic_sm100_one_block,
    run_mosaic_sm100_two_blocks,
    run_triton,
    run_xla,
)

from pallas_patch_embed.backends import BACKENDS
from pallas_patch_embed.chips import B200, H200, Target


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes [..., S, K] and N, the dtype of patches and weight, the kind of table, the output."""

    patches: tuple[int, ...]
    N: int
    dtype: str
    table: str
    out_dtype: str = "bfloat16"


CASES = {
    "one tile": Case((1, 128, 128), 64, "int8", "shared"),
    "fewer rows than a tile": Case((1, 40, 128), 64, "bfloat16", "none", "float32"),
    "rows beyond the last whole tile": Case((3, 72, 128), 64, "float8_e4m3fn", "shared"),
    "a table of fewer rows than a tile": Case((24, 32, 128), 128, "int8", "shared", "float32"),
    "a table for each image": Case((5, 40, 128), 128, "bfloat16", "per image"),
    "two leading axes": Case((2, 2, 40, 256), 64, "float8_e4m3fn", "per image"),
    "a long K": Case((2, 64, 640), 64, "bfloat16", "shared"),
    "no table": Case((3, 72, 256), 128, "int8", "none"),
    "float32 of float8": Case((9, 48, 256), 64, "float8_e4m3fn", "shared", "float32"),
}
# Only some backends serve these.
ODD_CASES = {
    "N = 40": Case((9, 49, 256), 40, "int8", "shared", "float32"),
    "N = 1": Case((1, 1, 128), 1, "float8_e4m3fn", "shared"),
    "N = 96, no table": Case((2, 2, 33, 128), 96, "bfloat16", "none"),
}


def exact(operands, out_dtype):
    """The operator in float64, rounded once."""
    patches, weight, scale, table = (np.asarray(x).astype(np.float64) for x in operands)
    y = (patches @ weight.T) * scale + table
    assert (y.astype(np.float32) == y).all()  # `draw_operands` promises it.
    return y.astype(np.float32).astype(out_dtype)


def draw(name, case):
    return draw_operands(len(name), case.patches, case.N, case.dtype, case.table)


# Of the kernels that are interpreted the short suite runs these, seconds each.
SHORT = {
    run_mosaic_sm90: ("a table for each image", "no table"),
    run_mosaic_sm100_one_block: ("rows beyond the last whole tile",),
    run_mosaic_sm100_two_blocks: (),
}


def marked(runner, name):
    """A runner and a case for `parametrize`, slow if the short suite leaves it out."""
    (run,) = runner.values
    slow = name not in SHORT.get(run, CASES)
    marks = [*runner.marks, *[pytest.mark.slow("seconds each in the interpreter")] * slow]
    return pytest.param(run, name, id=f"{runner.id}, {name}", marks=marks)


@pytest.mark.parametrize(
    "run, name", [marked(runner, name) for runner in RUNNERS for name in CASES]
)
def test_every_element_is_exact(run, name):
    operands = draw(name, CASES[name])
    out_dtype = CASES[name].out_dtype
    assert_bit_equal(run(operands, out_dtype), exact(operands, out_dtype))


@pytest.mark.parametrize("name", ODD_CASES)
@pytest.mark.parametrize("run", RUNNERS)
def test_odd_sizes_are_exact_or_refused_with_the_reason(run, name):
    operands = draw(name, ODD_CASES[name])
    out_dtype = ODD_CASES[name].out_dtype
    try:
        y = run(operands, out_dtype)
    except NotImplementedError as refusal:
        assert run not in (run_xla, run_triton)
        assert "N" in str(refusal) and str(refusal).endswith(".")
    else:
        assert_bit_equal(y, exact(operands, out_dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_images_are_an_empty_result_and_no_launch(name, request):
    if name in ("cuda", "triton"):
        request.getfixturevalue({"cuda": "cuda_library", "triton": "triton_package"}[name])
    target = Target("cuda", B200 if name == "mosaic_sm100" else H200)
    operands = draw_operands(0, (0, 7, 128), 64, "int8", "shared")
    y = compute(BACKENDS[name], *operands, out_dtype="bfloat16", target=target)
    assert y.shape == (0, 7, 64) and y.dtype == jnp.bfloat16
