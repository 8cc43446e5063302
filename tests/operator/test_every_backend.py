"""Tests of every backend: results for small operands are exact, or the call is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.backends import BACKENDS
from pallas_patch_embed.base.chips import B200, H200, Target
from tests.kernels.interpreter import draw_operands
from tests.operator.bounds import assert_bit_equal
from tests.operator.planned import compute
from tests.operator.runners import (
    RUNNERS,
    run_mosaic_sm90,
    run_mosaic_sm100_one_block,
    run_mosaic_sm100_two_blocks,
    run_triton,
    run_xla,
)

# A case: shape of the patches [..., S, K], N, dtype of patches and weight, kind of table, dtype of
# the output.
CASES = {
    "one tile": ((1, 128, 128), 64, "int8", "shared", "bfloat16"),
    "fewer rows than a tile": ((1, 40, 128), 64, "bfloat16", "none", "float32"),
    "rows beyond the last whole tile": ((3, 72, 128), 64, "float8_e4m3fn", "shared", "bfloat16"),
    "a table of fewer rows than a tile": ((24, 32, 128), 128, "int8", "shared", "float32"),
    "a table for each image": ((5, 40, 128), 128, "bfloat16", "per image", "bfloat16"),
    "two leading axes": ((2, 2, 40, 256), 64, "float8_e4m3fn", "per image", "bfloat16"),
    "a long K": ((2, 64, 640), 64, "bfloat16", "shared", "bfloat16"),
    "no table": ((3, 72, 256), 128, "int8", "none", "bfloat16"),
    "float32 of float8": ((9, 48, 256), 64, "float8_e4m3fn", "shared", "float32"),
}
# Cases that only some backends serve.
ODD_CASES = {
    "N = 40": ((9, 49, 256), 40, "int8", "shared", "float32"),
    "N = 1": ((1, 1, 128), 1, "float8_e4m3fn", "shared", "bfloat16"),
    "N = 96, no table": ((2, 2, 33, 128), 96, "bfloat16", "none", "bfloat16"),
}


def exact(operands, out_dtype):
    """Computes the operator in float64; asserts that float32 represents the result exactly."""
    patches, weight, scale, table = (np.asarray(x).astype(np.float64) for x in operands)
    y = (patches @ weight.T) * scale + table
    assert (y.astype(np.float32) == y).all()
    return y.astype(np.float32).astype(out_dtype)


# Cases that the short suite runs with these kernels, because each case takes seconds in the
# interpreter.
SHORT = {
    run_mosaic_sm90: ("a table for each image", "no table"),
    run_mosaic_sm100_one_block: ("rows beyond the last whole tile",),
    run_mosaic_sm100_two_blocks: (),
}


def marked(runner, name):
    """Makes a parameter of runner and case. Those that the short suite leaves out are marked.

    Every second of these cases is slow, and the others are exhaustive.
    """
    (run,) = runner.values
    marks = list(runner.marks)
    if name not in SHORT.get(run, CASES):
        in_ci = list(CASES).index(name) % 2 == 0
        mark = pytest.mark.slow if in_ci else pytest.mark.exhaustive
        marks.append(mark("each case takes seconds in the interpreter"))
    return pytest.param(run, name, id=f"{runner.id}, {name}", marks=marks)


@pytest.mark.parametrize(
    "run, name", [marked(runner, name) for runner in RUNNERS for name in CASES]
)
def test_every_element_is_exact(run, name):
    *described, out_dtype = CASES[name]
    operands = draw_operands(len(name), *described)
    assert_bit_equal(run(operands, out_dtype), exact(operands, out_dtype))


@pytest.mark.parametrize("name", ODD_CASES)
@pytest.mark.parametrize("run", RUNNERS)
def test_odd_sizes_are_exact_or_refused_with_the_reason(run, name):
    *described, out_dtype = ODD_CASES[name]
    operands = draw_operands(len(name), *described)
    try:
        y = run(operands, out_dtype)
    except NotImplementedError as refusal:
        assert run not in (run_xla, run_triton)
        assert "multiple" in str(refusal) and str(described[1]) in str(refusal)
    else:
        assert_bit_equal(y, exact(operands, out_dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_without_images_the_result_is_empty_and_nothing_is_launched(name, request):
    if name in ("cuda", "triton"):
        request.getfixturevalue({"cuda": "cuda_library", "triton": "triton_package"}[name])
    target = Target("cuda", B200 if name == "mosaic_sm100" else H200)
    operands = draw_operands(0, (0, 7, 128), 64, "int8", "shared")
    y = compute(BACKENDS[name], *operands, out_dtype="bfloat16", target=target)
    assert y.shape == (0, 7, 64) and y.dtype == jnp.bfloat16
