"""A warpgroup's tile in registers, arranged so that a thread's columns are neighbours in memory.

wgmma leaves pairs of neighbouring columns in a thread: of every 8 columns, thread q of the four
that share a row has columns 2q and 2q + 1. Stored like that, a thread would write 4 bytes at a
time. So the rows of the weight come to shared memory in another order, which only renames
accumulators: what wgmma takes for the j-th pair of thread q in its g-th group is, in memory, pair
q * (vector / 2) + j of group g. Then a thread holds 16 neighbouring bytes of every group of 64, and
the four threads of a row write 64 bytes.

Pallas does not express this renaming, nor a store with a condition for each row: they are written
with Mosaic's builders. In the interpreter, which has neither registers nor Mosaic, the
weight keeps its order, and the same functions are JAX.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_patch_embed.backends.mosaic.launch import SCALAR, i32, load_rows, places_of

# What a thread moves at once.
VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A tile [rows, columns] of an array [M, N] of `dtype`, in the registers of a warpgroup.

    Its functions deal in groups: arrays [rows, group] (or [group]), from left to right.

    Attributes:
      dtype: of what is stored.
      rows: of the tile, a multiple of 64.
      columns: of the tile, a multiple of `group`.
      interpret: whether the kernel runs in the interpreter.
    """

    dtype: jnp.dtype
    rows: int
    columns: int
    interpret: bool

    @property
    def vector(self) -> int:
        """Neighbouring columns of a thread."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def group(self) -> int:
        """Neighbouring columns of the four threads that share a row."""
        return 4 * self.vector

    @property
    def groups(self) -> int:
        """How many groups of columns the tile has."""
        return self.columns // self.group

    @property
    def pairs(self) -> int:
        """Pairs of columns of a thread in a group."""
        return self.vector // 2

    @property
    def layout(self) -> plgpu.Layout:
        """Mosaic's name for the layout of a group."""
        return {4: plgpu.Layout.WGMMA_8BIT, 8: plgpu.Layout.WGMMA_UPCAST_4X}[self.vector]

    @property
    def weight_copies(self) -> int:
        """How many copies bring the rows of the weight, in the order above."""
        return 1 if self.interpret else self.pairs

    def weight_shape(self, width: int) -> tuple[int, ...]:
        """The shape of `width` columns of K of the tile's rows of the weight, where TMA writes."""
        if self.interpret:
            return (self.columns, width)
        return (self.pairs, self.groups, 4, 2, width)

    def view_weight(self, weight: jax.Array) -> jax.Array:
        """The weight [N, K] as [N / group, thread, pair, 2, K], which TMA copies in any order."""
        if self.interpret:
            return weight
        N, K = weight.shape
        return weight.reshape(N // self.group, 4, self.pairs, 2, K)

    def copies_of_weight(self, weight, column, inner, target):
        """Source and target of each copy of `columns` rows of the weight, beginning with `column`.

        Args:
          weight: what `view_weight` gave, in global memory.
          column: a multiple of `columns`.
          inner: slice of K.
          target: memory of shape `weight_shape`.
        """
        if self.interpret:
            return [(weight.at[pl.ds(column, self.columns), inner], target)]
        groups = pl.ds(lax.div(column, self.group), self.groups)
        return [(weight.at[groups, :, j, :, inner], target.at[j]) for j in range(self.pairs)]

    def load_columns(self, values, g: int) -> jax.Array:
        """Group `g` of values [columns] in shared memory."""
        part = values.at[pl.ds(g * self.group, self.group)]
        return plgpu.load(part, layout=self.layout.reduce(0), optimized=False)

    def regroup(self, accumulator: jax.Array) -> list[jax.Array]:
        """The groups of an accumulator [rows, columns]: other names for the same registers."""
        if self.interpret:
            return jnp.split(accumulator, self.groups, axis=1)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA,),
            return_type=[self._group_of(accumulator.dtype)] * self.groups,
        )
        def renamed(_, accumulator):
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

        return renamed(accumulator)

    def load_rows(self, source, row, column, g: int, period: int) -> jax.Array:
        """Group `g` of rows of an array [period, N] of bfloat16: row, row + 1, ... modulo `period`.

        `column` is where the tile begins.
        """
        kind = self._group_of(jnp.bfloat16)
        return load_rows(
            source, row, column, kind, period=period, skip=g * self.group, interpret=self.interpret
        )

    def pinned(self, group: jax.Array) -> jax.Array:
        """The same group of 2-byte values, computed here.

        Without it the compiler widens what is held over a loop once, before the loop, in twice the
        registers. `lax.optimization_barrier` mixes up vectors of more than 4 bytes (jax 0.11.2).
        """
        if self.interpret:
            return group

        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=self._group_of(group.dtype))
        def opaque(_, group):
            n = self.vector // 2
            word = ir.IntegerType.get_signless(32)
            words, both = ir.VectorType.get((n,), word), llvm.StructType.get_literal([word] * n)
            constraints = ",".join(["=r"] * n + [str(i) for i in range(n)])
            registers = []
            for register in group.registers.flat:
                packed = mgpu.utils.bitcast(register, words)
                parts = [llvm.extractelement(packed, i32(i)) for i in range(n)]
                found = llvm.inline_asm(both, parts, "", constraints, has_side_effects=True)
                packed = llvm.mlir_undef(words)
                for i in range(n):
                    part = llvm.extractvalue(word, found, [i])
                    packed = llvm.insertelement(packed, part, i32(i))
                registers.append(mgpu.utils.bitcast(packed, register.type))
            return self._fragmented(registers)

        return opaque(group)

    def store_rows(self, target, row, column, g: int, group: jax.Array, *, inside: bool) -> None:
        """Writes group `g` to rows row, row + 1, ... of an array [M, N], as far as it has rows.

        `column` is where the tile begins; `inside` says that no tile goes beyond M.
        """
        M = target.shape[0]
        if self.interpret:
            columns = pl.ds(column + g * self.group, self.group)

            @pl.when(row + self.rows <= M)
            def whole():
                target[pl.ds(row, self.rows), columns] = group

            @pl.when((row < M) & (row + self.rows > M))
            def tail():
                left = M % self.rows
                target[pl.ds(row, left), columns] = group[:left]

            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, self.layout))
        def stored(_, target, row, column, group):
            word = ir.IntegerType.get_signless(32)
            words = ir.VectorType.get((4,), word)
            skip = g * self.group
            places = places_of(target, row, column, group.layout, group.shape, skip=skip)
            for (row, pointer), register in zip(places, group.registers.flat, strict=True):
                packed = mgpu.utils.bitcast(register, words)
                if inside:
                    llvm.store(packed, pointer)
                    continue
                exists = arith.cmpi(arith.CmpIPredicate.ult, row, i32(M))
                parts = [llvm.extractelement(packed, i32(i)) for i in range(4)]
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [pointer, *parts, arith.extui(word, exists)],
                    "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
                    " @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
                    "l,r,r,r,r,r",
                    has_side_effects=True,
                )

        stored(target, row, column, group)

    def _group_of(self, dtype) -> plgpu.ShapeDtypeStruct:
        return plgpu.ShapeDtypeStruct((self.rows, self.group), dtype, layout=self.layout)

    def _fragmented(self, registers: list, is_signed: bool | None = None) -> mgpu.FragmentedArray:
        """A group from the registers of a thread's rows."""
        layout = self.layout.to_mgpu()
        array = np.empty(len(registers), object)
        array[:] = registers
        return mgpu.FragmentedArray(
            _registers=array.reshape(layout.registers_shape((self.rows, self.group))),
            _layout=layout,
            _is_signed=is_signed,
        )
