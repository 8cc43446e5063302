"""The functions of `layouts.py` in plain JAX, for Pallas' interpreter.

The interpreter cannot execute code that is built from MLIR. The rows of the weight are not permuted
here.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends.mosaic import layouts


def two_views(dtype, written: tuple[int, ...], multiplied: tuple[int, ...]):
    """Returns only the tiled view, because the interpreter does not support `plgpu.RefUnion`."""
    del written
    return layouts.swizzled(dtype, *multiplied, tiled=True)


def views_of(memory) -> layouts.Views:
    """Returns the same view for TMA's writes and the tensor cores' reads."""
    return layouts.Views(memory, memory)


def load_rows(source, row, column, kind, *, period: int, skip: int = 0):
    """Does the same as `layouts.load_rows`."""
    rows, columns = kind.shape
    part = source[:, pl.ds(column + skip, columns)]
    return jnp.take(part, lax.rem(row + jnp.arange(rows), period), axis=0)


def load_row_values(values, row, rows: int):
    """Does the same as `layouts.load_row_values`, for this number of rows."""
    return jnp.take(values[...], lax.rem(row + jnp.arange(rows), values.shape[0]))


class RegisterTile(layouts.RegisterTile):
    """The interpreter's version of `layouts.RegisterTile`."""

    @property
    def weight_copies(self) -> int:
        return 1

    def weight_shape(self, width: int) -> tuple[int, ...]:
        return (self.columns, width)

    def view_weight(self, weight: jax.Array) -> jax.Array:
        return weight

    def load_weight(self, weight, column, inner, target, arrived) -> None:
        rows = weight.at[pl.ds(column, self.columns), inner]
        plgpu.copy_gmem_to_smem(rows, target, arrived)

    def load_rows(self, source, row, column, g: int, period: int) -> jax.Array:
        kind = jax.ShapeDtypeStruct((self.rows, self.group), jnp.bfloat16)
        return load_rows(source, row, column, kind, period=period, skip=g * self.group)

    def load_row_values(self, values, row) -> jax.Array:
        return load_row_values(values, row, self.rows)

    def regroup(self, accumulator: jax.Array) -> list[jax.Array]:
        return jnp.split(accumulator, self.groups, axis=1)

    def pinned(self, group: jax.Array) -> jax.Array:
        return group

    def store_rows(self, targets, number, column, row, g: int, group: jax.Array, *, inside) -> None:
        M = targets[0].shape[0]
        columns = pl.ds(column + g * self.group, self.group)
        for i, target in enumerate(targets):

            @pl.when((number == i) & (row + self.rows <= M))
            def whole(target=target):
                target[pl.ds(row, self.rows), columns] = group

            @pl.when((number == i) & (row < M) & (row + self.rows > M))
            def tail(target=target):
                left = M % self.rows
                target[pl.ds(row, left), columns] = group[:left]


class TensorTile(layouts.TensorTile):
    """The interpreter's version of `layouts.TensorTile`."""

    def load_rows(self, source, row, column, skip: int, period: int) -> jax.Array:
        kind = jax.ShapeDtypeStruct((128, self.columns), jnp.bfloat16)
        return load_rows(source, row, column, kind, period=period, skip=skip).astype(jnp.float32)

    def load_row_values(self, values, row) -> jax.Array:
        return load_row_values(values, row, 128)
