"""Layouts of shared memory and registers that Pallas cannot express, built from MLIR.

wgmma distributes every 8 columns of an accumulator over the four threads of a row: thread q has
columns 2q and 2q + 1. In this order a thread could only store 4 bytes at a time. So the rows of the
weight are copied to shared memory in another order, which permutes the accumulator's columns: the
j-th pair of columns that wgmma assigns to thread q in group g is pair q * (vector / 2) + j of group
g of the result. Then every thread has 16 contiguous bytes of a group, and the four threads of a row
store 64 contiguous bytes.

Pallas can express neither this permutation nor a store with a predicate for each row. Both are
written with Mosaic's MLIR builders. `interpreted.py` has the same functions for Pallas'
interpreter.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())

# Bytes that a thread loads or stores with one instruction.
VECTOR_BYTES = 16


# Functions for shared memory.


def swizzled(dtype, *shape: int, tiled: bool):
    """Declares swizzled shared memory with rows of at most 128 bytes.

    The tensor cores read tiled memory. TMA copies any number of rows to and from untiled memory,
    but only multiples of 8 rows to and from tiled memory.
    """
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    # jax leaves an abstract method of these transforms undefined.
    tiling = (plgpu.TilingTransform((8, shape[-1])),) if tiled else ()  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(*tiling, swizzle))


def two_views(dtype, written: tuple[int, ...], multiplied: tuple[int, ...]):
    """Declares memory with two views: an untiled one for TMA, a tiled one for the tensor cores."""
    return plgpu.RefUnion(
        swizzled(dtype, *written, tiled=False), swizzled(dtype, *multiplied, tiled=True)
    )


class Views(NamedTuple):
    """Two references to the same shared memory.

    Attributes:
      written: the view that TMA writes.
      multiplied: the view that the tensor cores read.
    """

    written: Any
    multiplied: Any


def views_of(memory) -> Views:
    """Returns the two views of memory that `two_views` declared."""
    return Views(*memory)


# Functions for global memory.


def load_rows(source, row, column, kind, *, period: int, skip: int = 0):
    """Loads rows of an array [period, N] in global memory: row, row + 1, ... modulo `period`.

    Args:
      source: the array.
      row: the first row.
      column: the first column, to which `skip` is added.
      kind: shape, dtype and layout of the result.
      period: number of rows of the array.
      skip: a constant. Loads that differ only in `skip` share the registers for their addresses.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=kind)
    def loaded(_, source, row, column):
        layout = kind.layout.to_mgpu()
        element = ir.MemRefType(source.type).element_type
        vector = ir.VectorType.get((layout.vector_length,), element)
        registers = np.empty(layout.registers_shape(kind.shape), object)
        addresses = _addresses(source, row, column, layout, kind.shape, period=period, skip=skip)
        registers.flat = [llvm.load(vector, address) for _, address in addresses]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return loaded(source, row, column)


def load_row_values(values, row, kind):
    """Loads values row, row + 1, ... modulo M of an array [M] of float32 in global memory.

    `kind` has the shape and the layout of the result.
    """
    M = values.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=kind)
    def loaded(_, values, row):
        word, element = ir.IntegerType.get_signless(32), ir.F32Type.get()
        layout, first = kind.layout.to_mgpu(), row.registers.item()
        registers = []
        for (index,) in layout.thread_idxs(kind.shape):
            at = arith.addi(first, arith.index_castui(word, index))
            at = arith.remui(at, _i32(M))
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(values), [at], element)
            registers.append(llvm.load(ir.VectorType.get((1,), element), pointer))
        array = np.empty(layout.registers_shape(kind.shape), object)
        array.flat = registers
        return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=None)

    return loaded(values, row)


def store_levels(target, row, column, left, part, columns: int) -> None:
    """Stores rows of 8 bits from wgmma's layout to rows row, row + 1, ... of an array [M, N].

    Each of the four threads of a row has two columns of every eight, which are 2 bytes. They
    exchange those of four groups of eight columns, so that a thread stores 8 contiguous bytes, and
    the four fill a sector of 32 bytes. Groups that remain are stored 2 bytes at a time.

    Args:
      target: the array, in global memory. N is a multiple of 8.
      row: the first row.
      column: the first column, a multiple of 8.
      left: number of rows that are stored, at most those of `part`. It may be negative.
      part: [64, width] in `plgpu.Layout.WGMMA`, with a width of at most 64.
      columns: number of columns of `part` that are stored, a multiple of 8.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, plgpu.Layout.WGMMA))
    def stored(_, target, row, column, left, part):
        word, long, short = map(ir.IntegerType.get_signless, (32, 64, 16))
        down, right = (
            arith.index_castui(word, i) for i in next(part.layout.thread_idxs(part.shape))
        )
        thread = arith.shrui(right, _i32(1))  # Among the four threads of a row.
        base, stride = mgpu.utils.memref_ptr(target), ir.MemRefType(target.type).shape[1]
        row, column, left = (x.registers.item() for x in (row, column, left))
        pairs = part.registers.reshape(-1, 2)[: columns // 8]

        def address(at_row, at_column):
            first = arith.muli(arith.extui(long, at_row), mgpu.utils.c(stride, long))
            offset = arith.addi(first, arith.extui(long, at_column))
            return mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))

        for half in range(2):
            at = arith.addi(down, _i32(8 * half))
            exists = arith.extui(word, arith.cmpi(arith.CmpIPredicate.slt, at, left))
            at = arith.addi(row, at)
            words = [
                arith.extui(word, mgpu.utils.bitcast(pair, short)) for pair in pairs[:, half].flat
            ]
            fours = len(words) // 4
            if fours == 2:
                shared = [_halves(low, high) for low, high in zip(words[:4], words[4:])]
            else:
                shared = words[:4]
            found = _exchanged(shared, thread) if fours else []
            for four in range(fours):
                packed = [_halves(*found[i : i + 2], upper=four == 1) for i in (0, 2)]
                group = arith.addi(thread, _i32(4 * four))
                pointer = address(at, arith.addi(column, arith.muli(group, _i32(8))))
                _store_if(exists, pointer, packed, "v2.b32", "r")
            for group in range(4 * fours, len(words)):
                pointer = address(at, arith.addi(arith.addi(column, right), _i32(8 * group)))
                _store_if(exists, pointer, [arith.trunci(short, words[group])], "b16", "h")

    stored(target, row, column, left, part)


def _exchanged(words: list, thread) -> list:
    """Transposes words among four threads: the result's i-th word is from the i-th thread.

    Thread j gets the j-th word of each thread.
    """
    words = list(words)
    for bit in (1, 2):
        one = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, _i32(bit)), _i32(0))
        for i in range(4):
            if not i & bit:
                low, high = words[i], words[i | bit]
                got = mgpu.utils.shfl_bfly(arith.select(one, low, high), bit)
                words[i], words[i | bit] = arith.select(one, got, low), arith.select(one, high, got)
    return words


def _halves(low, high, *, upper: bool = False):
    """Returns the lower halves of two words as one word, or their upper halves."""
    if upper:
        return arith.ori(arith.shrui(low, _i32(16)), arith.andi(high, _i32(-(2**16))))
    return arith.ori(arith.andi(low, _i32(2**16 - 1)), arith.shli(high, _i32(16)))


def _store_if(exists, pointer, registers: list, kind: str, constraint: str) -> None:
    """Stores registers to global memory if the word `exists` is not 0."""
    n = len(registers)
    stored = ", ".join(f"${i + 1}" for i in range(n))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [pointer, *registers, exists],
        f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0;"
        f" @p st.global.{kind} [$0], {f'{{{stored}}}' if n > 1 else stored}; }}",
        ",".join(["l", *[constraint] * n, "r"]),
        has_side_effects=True,
    )


def _pointer(arrays, number):
    """Returns the address of one of several arrays, by its number."""
    first, *others = map(mgpu.utils.memref_ptr, arrays)
    for i, other in enumerate(others, 1):
        is_it = arith.cmpi(arith.CmpIPredicate.eq, number.registers.item(), _i32(i))
        first = arith.select(is_it, other, first)
    return first


def _addresses(
    array, row, column, layout, shape, *, period: int | None = None, skip: int = 0, base=None
):
    """Yields the row and the address in global memory of each register of a thread.

    The tile begins at `row` and `column + skip` of an array [rows, columns]. If `period` is given,
    rows are taken modulo `period`. `base` is the address of an array of the same shape.
    """
    word, long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(array.type)
    base, stride = base or mgpu.utils.memref_ptr(array), kind.shape[1]
    # LLVM has no types for float8, but addresses depend only on the size of an element.
    element = ir.IntegerType.get_signless(mgpu.utils.bitwidth(kind.element_type))

    def address(at_row, at_column):
        first = arith.muli(arith.extui(long, at_row), mgpu.utils.c(stride, long))
        offset = arith.addi(first, arith.extui(long, at_column))
        return mgpu.utils.getelementptr(base, [offset], element)

    # Position of the thread's first element. All others are at constant distances from it.
    down, right = (arith.index_castui(word, i) for i in next(iter(layout.thread_idxs(shape))))
    first_row = arith.addi(row.registers.item(), down)
    first_column = arith.addi(column.registers.item(), right)
    first_address = address(first_row, first_column)
    addresses = {}
    steps = layout.tiling.tile_strides((shape[1], 1))
    for index in np.ndindex(layout.registers_shape(shape)):
        rows, columns = divmod(sum(i * step for i, step in zip(index, steps)), shape[1])
        at_row = arith.addi(first_row, _i32(rows))
        start, distance = first_address, rows * stride + columns + skip
        if period is not None:
            if rows not in addresses:
                addresses[rows] = address(arith.remui(at_row, _i32(period)), first_column)
            start, distance = addresses[rows], columns + skip
        yield at_row, mgpu.utils.getelementptr(start, [distance], element)


def _i32(value: int) -> ir.Value:
    """Makes a 32-bit constant."""
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


# Tiles in registers.


@dataclasses.dataclass(frozen=True)
class RegisterTile:
    """A tile [rows, columns] of an array [M, N] of `dtype`, in the registers of a warpgroup.

    Its columns are split, from left to right, into groups [rows, group].

    Attributes:
      dtype: dtype of the array in global memory.
      rows: number of rows, a multiple of 64.
      columns: number of columns, a multiple of `group`.
    """

    dtype: jnp.dtype
    rows: int
    columns: int

    @property
    def vector(self) -> int:
        """Number of contiguous columns that a thread stores at once."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def group(self) -> int:
        """Number of contiguous columns that the four threads of a row store at once."""
        return 4 * self.vector

    @property
    def groups(self) -> int:
        """Number of groups of columns in the tile."""
        return self.columns // self.group

    @property
    def pairs(self) -> int:
        """Number of pairs of columns that a thread has in a group."""
        return self.vector // 2

    @property
    def layout(self) -> Any:
        """Mosaic's layout of a group in registers."""
        kinds = {
            4: plgpu.Layout.WGMMA_8BIT,
            8: plgpu.Layout.WGMMA_UPCAST_4X,
            # The same as these, with vectors of 16.
            16: plgpu.Layout.TILED(
                plgpu.Tiling(((64, 64), (16, 64), (8, 64), (16,))),
                warp_dims=(-7,),
                lane_dims=(-3, -2),
                vector_dim=-1,
            ),
        }
        return kinds[self.vector]

    @property
    def weight_copies(self) -> int:
        """Number of TMA copies that load a chunk of the weight with its rows permuted."""
        return self.pairs

    def weight_shape(self, width: int) -> tuple[int, ...]:
        """Returns the shape in shared memory of the tile's rows of the weight.

        `width` is the number of elements of K.
        """
        return (self.pairs, self.groups, 4, 2, width)

    def view_weight(self, weight: jax.Array) -> jax.Array:
        """Reshapes a weight [N, K] to [N / group, 4, pairs, 2, K], whose axes TMA can permute.

        The axes of length 4 and `pairs` are the threads of a row and their pairs of columns.
        """
        N, K = weight.shape
        return weight.reshape(N // self.group, 4, self.pairs, 2, K)

    def load_weight(self, weight, column, inner, target, arrived) -> None:
        """Copies `columns` rows of the weight, beginning at row `column`, to shared memory.

        Args:
          weight: result of `view_weight`, in global memory.
          column: first row of the weight (first column of y), a multiple of `columns`.
          inner: slice of K.
          target: shared memory of shape `weight_shape`.
          arrived: barrier at which each of the `weight_copies` copies arrives.
        """
        groups = pl.ds(lax.div(column, self.group), self.groups)
        for j in range(self.pairs):
            plgpu.copy_gmem_to_smem(weight.at[groups, :, j, :, inner], target.at[j], arrived)

    def load_columns(self, values, g: int) -> jax.Array:
        """Loads group `g` of values [columns] in shared memory."""
        part = values.at[pl.ds(g * self.group, self.group)]
        return plgpu.load(part, layout=self.layout.reduce(0), optimized=False)

    def load_rows(self, source, row, column, g: int, period: int) -> jax.Array:
        """Loads group `g` of rows of a bfloat16 array [period, N].

        The rows are row, row + 1, ... modulo `period`; `column` is the first column of the tile.
        """
        kind = self._group_of(jnp.bfloat16)
        return load_rows(source, row, column, kind, period=period, skip=g * self.group)

    def load_row_values(self, values, row) -> jax.Array:
        """Loads values of the tile's rows, beginning at `row`, of an array [M] of float32.

        Rows beyond M have the values of the first rows.
        """
        float32, layout = jnp.dtype(jnp.float32), self.layout.reduce(1)
        kind = plgpu.ShapeDtypeStruct((self.rows,), float32, layout=layout)
        return load_row_values(values, row, kind)

    def regroup(self, accumulator: jax.Array) -> list[jax.Array]:
        """Splits an accumulator [rows, columns] into its groups, which have the same registers."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA,),
            return_type=[self._group_of(accumulator.dtype)] * self.groups,
        )
        def regrouped(_, accumulator):
            pairs = accumulator.registers.reshape(-1, self.pairs, self.groups, 2)
            return [
                self._fragmented(
                    [
                        mgpu.utils.vector_concat(list(pairs[m, :, g, half]))
                        for m in range(pairs.shape[0])
                        for half in range(2)
                    ],
                    accumulator.is_signed,
                )
                for g in range(self.groups)
            ]

        return regrouped(accumulator)

    def pinned(self, group: jax.Array) -> jax.Array:
        """Returns a group of 2-byte values as the result of an opaque inline instruction.

        Without it, the compiler converts values that stay in registers during a loop to float32
        before the loop, which takes twice as many registers. `lax.optimization_barrier` permutes
        the elements of vectors of more than 4 bytes (docs/upstream.md).
        """

        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=self._group_of(group.dtype))
        def opaque(_, group):
            n = self.vector // 2
            word = ir.IntegerType.get_signless(32)
            words, both = ir.VectorType.get((n,), word), llvm.StructType.get_literal([word] * n)
            constraints = ",".join(["=r"] * n + [str(i) for i in range(n)])
            registers = []
            for register in group.registers.flat:
                packed = mgpu.utils.bitcast(register, words)
                parts = [llvm.extractelement(packed, _i32(i)) for i in range(n)]
                found = llvm.inline_asm(both, parts, "", constraints, has_side_effects=True)
                packed = llvm.mlir_undef(words)
                for i in range(n):
                    part = llvm.extractvalue(word, found, [i])
                    packed = llvm.insertelement(packed, part, _i32(i))
                registers.append(mgpu.utils.bitcast(packed, register.type))
            return self._fragmented(registers)

        return opaque(group)

    def store_rows(
        self, targets: tuple[Any, ...], number, column, row, g: int, group: jax.Array, *, inside
    ) -> None:
        """Stores group `g` to rows row, row + 1, ... of an array, except rows beyond its M.

        Args:
          targets: arrays [M, N].
          number: the number of the array among them.
          column: the first column of the tile.
          row: the first row.
          g: the group.
          group: its values.
          inside: whether no tile has rows beyond M; then the stores need no predicates.
        """
        M, references = targets[0].shape[0], [plgpu.RefType()] * len(targets)

        @plgpu.inline_mgpu(arg_types=(*references, SCALAR, SCALAR, SCALAR, self.layout))
        def stored(_, *arguments):
            *targets, number, row, column, group = arguments
            word = ir.IntegerType.get_signless(32)
            words = ir.VectorType.get((4,), word)
            base = _pointer(targets, number)
            place = dict(skip=g * self.group, base=base)
            addresses = _addresses(targets[0], row, column, group.layout, group.shape, **place)
            for (row, pointer), register in zip(addresses, group.registers.flat, strict=True):
                packed = mgpu.utils.bitcast(register, words)
                if inside:
                    llvm.store(packed, pointer)
                    continue
                exists = arith.cmpi(arith.CmpIPredicate.ult, row, _i32(M))
                parts = [llvm.extractelement(packed, _i32(i)) for i in range(4)]
                _store_if(arith.extui(word, exists), pointer, parts, "v4.b32", "r")

        stored(*targets, jnp.int32(number), row, column, group)

    def _group_of(self, dtype) -> plgpu.ShapeDtypeStruct:
        return plgpu.ShapeDtypeStruct((self.rows, self.group), dtype, layout=self.layout)

    def _fragmented(self, registers: list, is_signed: bool | None = None) -> mgpu.FragmentedArray:
        """Makes a group from these registers, one for each row of a thread."""
        layout = self.layout.to_mgpu()
        array = np.empty(len(registers), object)
        array[:] = registers
        return mgpu.FragmentedArray(
            _registers=array.reshape(layout.registers_shape((self.rows, self.group))),
            _layout=layout,
            _is_signed=is_signed,
        )


@dataclasses.dataclass(frozen=True)
class TensorTile:
    """Columns of an accumulator in tensor memory, [128, columns], in the registers of a warpgroup.

    Attributes:
      columns: number of columns that are loaded at once.
    """

    columns: int

    @property
    def layout(self) -> plgpu.Layout:
        return plgpu.Layout.TCGEN05

    def load_sums(self, accumulators) -> jax.Array:
        """Starts to load sums from tensor memory; `plgpu.wait_load_tmem` waits for them."""
        return plgpu.async_load_tmem(accumulators, layout=self.layout)

    def load_columns(self, values, column) -> jax.Array:
        """Loads values [columns] of an array [N] in global memory, beginning at `column`."""
        part = values.at[pl.ds(column, self.columns)]
        return plgpu.load(part, layout=self.layout.reduce(0), optimized=False)

    def load_rows(self, source, row, column, skip: int, period: int) -> jax.Array:
        """Loads rows of a bfloat16 array [period, N] with `load_rows`, and converts to float32."""
        bfloat16 = jnp.dtype(jnp.bfloat16)
        kind = plgpu.ShapeDtypeStruct((128, self.columns), bfloat16, layout=self.layout)
        return load_rows(source, row, column, kind, period=period, skip=skip).astype(jnp.float32)

    def load_row_values(self, values, row) -> jax.Array:
        """Loads values of the 128 rows, beginning at `row`, as `RegisterTile.load_row_values`."""
        float32, layout = jnp.dtype(jnp.float32), self.layout.reduce(1)
        return load_row_values(values, row, plgpu.ShapeDtypeStruct((128,), float32, layout=layout))

    def broadcast(self, values: jax.Array) -> jax.Array:
        """Broadcasts values [columns] to every row."""
        return lax.broadcast_in_dim(values, (128, self.columns), (1,))
