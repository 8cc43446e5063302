"""The range check of traced pixels, an identity primitive that only `checkify` turns into a check.

`checkify.debug_check` is not used, because it has an effect. JAX dispatches a jitted program with
an effect from Python instead of C++ (5 ms instead of 0.15 ms per call with 300 arrays), and cannot
serialise it. This primitive has no effect. checkify finds the check of a primitive in the table
`error_checks`, which has no public name in JAX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src.checkify import FailedCheckError, assert_func, error_checks, get_traceback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

check_range_p = Primitive("check_range")


class Check(NamedTuple):
    """The check of a range of pixels. A jaxpr prints it as one word.

    Attributes:
      range_of: function of pixels that returns whether all are in range, the smallest and the
        largest pixel.
      message: the error's message, with the fields {low} and {high}.
    """

    range_of: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    message: str

    def __repr__(self) -> str:
        return "range"


def checked(pixels: jax.Array, check: Check) -> jax.Array:
    """Returns the pixels; under checkify, also checks their range."""
    return check_range_p.bind(pixels, check=check)


check_range_p.def_impl(lambda pixels, **_: pixels)
check_range_p.def_abstract_eval(lambda pixels, **_: pixels)
mlir.register_lowering(check_range_p, lambda ctx, pixels, **_: [pixels])


def _differentiate(primals: Any, tangents: Any, *, check: Check) -> Any:
    # The check does not take part in the differentiation.
    return check_range_p.bind(*primals, check=check), tangents[0]


def _batch(operands: Any, axes: Any, *, check: Check) -> Any:
    # The batch axis moves to the front, so that the last axis (colours or K) remains the last.
    return check_range_p.bind(jax.numpy.moveaxis(operands[0], axes[0], 0), check=check), 0


def _checkify(context: Any, error: Any, enabled: Any, pixels: Any, *, check: Check) -> Any:
    if FailedCheckError in enabled:
        fits, low, high = check.range_of(pixels)
        failed = FailedCheckError(get_traceback(), check.message, low=low, high=high)
        error = assert_func(context, error, ~fits, failed)
    return error, pixels


ad.primitive_jvps[check_range_p] = _differentiate
batching.primitive_batchers[check_range_p] = _batch
error_checks[check_range_p] = _checkify
