"""JAX's strict settings, which users turn on to find their own mistakes."""

import contextlib

import jax


@contextlib.contextmanager
def strict_settings():
    """All strict settings at once; the error of each says which one it is."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
    ):
        yield
