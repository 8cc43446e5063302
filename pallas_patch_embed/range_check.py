"""The check of traced pixels: an identity, of which `checkify` makes a check and jit nothing.

`checkify.debug_check` would do, but it is an effect: JAX calls a jitted program that has one from
Python instead of C++ (5 ms a call with 300 arrays, not 0.15), and cannot serialise it. A primitive
has no effect, and checkify looks up what to check of it, but JAX has no public name for the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src.checkify import FailedCheckError, assert_func, error_checks, get_traceback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

check_range_p = Primitive("check_range")


class Check(NamedTuple):
    """What is checked of pixels. A jaxpr prints it as a few words.

    Attributes:
      range_of: pixels -> whether they are in range, the smallest one and the largest one.
      message: what is said if they are not, with the fields {low} and {high}.
    """

    range_of: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    message: str

    def __repr__(self) -> str:
        return "range"


def checked(pixels: jax.Array, check: Check) -> jax.Array:
    """The pixels; under checkify with a check of their range."""
    return check_range_p.bind(pixels, check=check)


check_range_p.def_impl(lambda pixels, **_: pixels)
check_range_p.def_abstract_eval(lambda pixels, **_: pixels)
mlir.register_lowering(check_range_p, lambda ctx, pixels, **_: [pixels])


def _differentiate(primals: Any, tangents: Any, *, check: Check) -> Any:
    # A check is no part of what is differentiated.
    return check_range_p.bind(*primals, check=check), tangents[0]


def _batch(operands: Any, axes: Any, *, check: Check) -> Any:
    # The last axis is the colours, or a row of a patch: it stays the last.
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
