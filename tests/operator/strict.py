"""JAX's strict settings, which users turn on to find their own mistakes."""

import contextlib

import jax


@contextlib.contextmanager
def strict_settings():
    """Enables all strict settings at once; an error message says which setting caused it."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
    ):
        yield
