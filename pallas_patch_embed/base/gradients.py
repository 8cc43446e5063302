"""Derivatives that are refused, because numbers become integers."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_differentiated(x: jax.Array, refuse: Callable[[], NoReturn]) -> jax.Array:
    """Returns x, from which integers will be computed; differentiating by x calls `refuse` at once.

    The error cannot wait until a derivative is used, because integers have no tangent.
    """
    del refuse
    return x


@functools.partial(not_differentiated.defjvp, symbolic_zeros=True)
def _(refuse: Callable[[], NoReturn], primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        refuse()
    return primals[0], tangents[0]
