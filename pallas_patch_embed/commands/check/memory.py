"""Operands and a result at fixed addresses of a device's memory, with guards between them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from pallas_patch_embed.base.problem import Problem

# Type of (patches or images, weight, scale, table).
type Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
type Allocate = Callable[[jax.ShapeDtypeStruct, jax.Device], jax.Array]

# Value of every byte of a guard, and its type. A guard is larger than a tile of any kernel.
PATTERN = 0xA5
GUARD = jax.ShapeDtypeStruct((2**20,), jnp.uint8)

# XLA's allocator for GPUs rounds sizes up to a multiple of this number of bytes.
UNIT = 256

# The allocator always splits a free block if at least this number of bytes would be left.
SPLIT = 2**27

# Largest number of arrays that the allocator may put elsewhere before `allocate_adjacent` gives up.
ATTEMPTS = 256


def operand_types(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of patches or images, weight, scale and table."""
    if problem.images is None:
        source = jax.ShapeDtypeStruct(problem.patches, problem.dtype)
    else:
        source = jax.ShapeDtypeStruct(problem.images, jnp.uint8)
    return (
        source,
        jax.ShapeDtypeStruct(problem.weight, problem.dtype),
        jax.ShapeDtypeStruct(problem.scale, jnp.float32),
        jax.ShapeDtypeStruct(problem.table, problem.table_dtype),
    )


def result_type(problem: Problem) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*problem.patches[:-1], problem.N), problem.out_dtype)


def _buffer_types(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the operands and the result."""
    return (*operand_types(problem), result_type(problem))


def _guarded_types(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the operands and the result, with guards around each."""
    return [GUARD, *(kind for buffer in _buffer_types(problem) for kind in (buffer, GUARD))]


def types_on(problem: Problem, device: jax.Device) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns the types of the operands and of the result of a `Site` on a device."""
    place = SingleDeviceSharding(device)
    *operands, result = (x.update(sharding=place) for x in _buffer_types(problem))
    return tuple(operands), result


def allocate(kind: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
    """Allocates an array of zeros that shares its memory with no other array."""
    # A compiled function is called faster than `jnp.zeros`, which matters for hundreds of arrays.
    return _zeros(kind.shape, str(kind.dtype), device).block_until_ready()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: str, device: jax.Device) -> jax.Array:
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), SingleDeviceSharding(device))


class Site:
    """The memory of the operands and the result of a launch.

    New operands and the result replace donated arrays, so that they stay at the same addresses. On
    a GPU every buffer is between two guards, because XLA's allocator cuts all of them from one free
    block, one after the other. On other platforms the guards may be anywhere.

    Attributes:
      operands: patches or images, weight, scale, table.
      result: the result of the launch; poison (NaN) before the launch.
      guards: the guards before, between and after the buffers.
    """

    def __init__(self, problem: Problem, device: jax.Device, allocate: Allocate = allocate):
        placed = allocate_adjacent(_guarded_types(problem), device, allocate)
        *operands, self.result = placed[1::2]
        self.operands: Operands = tuple(operands)  # type: ignore[assignment]
        self.guards = [_patterned(guard) for guard in placed[::2]]

    def fill(self, operands: Operands) -> None:
        """Copies the operands to their addresses, and poisons the result."""
        *filled, self.result = _filled((*self.operands, self.result), operands)
        self.operands = tuple(filled)
        jax.block_until_ready((self.operands, self.result))

    @property
    def guarded(self) -> bool:
        """Whether each buffer is directly between two guards, up to the allocator's rounding."""
        buffers = zip(self.guards, (*self.operands, self.result))
        return are_adjacent([x for pair in buffers for x in pair] + self.guards[-1:])

    def changed_bytes(self) -> int:
        """Returns the number of bytes of the guards that changed since the last call."""
        changed = int(_changed(self.guards))
        if changed:
            self.guards = [_patterned(guard) for guard in self.guards]
        return changed


def allocate_adjacent(
    kinds: Sequence[jax.ShapeDtypeStruct], device: jax.Device, allocate: Allocate = allocate
) -> list[jax.Array]:
    """Allocates arrays; on a GPU each begins at the end of the previous one, if possible."""
    if device.platform != "gpu":
        return [allocate(kind, device) for kind in kinds]
    total = _total(kinds)
    whole = allocate(jax.ShapeDtypeStruct((total,), jnp.uint8), device)
    position = whole.unsafe_buffer_pointer()
    whole.delete()
    # The allocator uses the smallest free block that fits. So the arrays in `elsewhere` fill all
    # smaller blocks, large arrays first, until the block of `whole` is the smallest.
    elsewhere: list[jax.Array] = []
    size = 2 ** (total.bit_length() - 1)
    while size >= UNIT and len(elsewhere) < ATTEMPTS:
        array = allocate(jax.ShapeDtypeStruct((size,), jnp.uint8), device)
        if position <= array.unsafe_buffer_pointer() < position + total:
            array.delete()
            size //= 2
        else:
            elsewhere.append(array)
    placed: list[jax.Array] = []
    for kind in kinds:
        array = allocate(kind, device)
        while array.unsafe_buffer_pointer() != position and len(elsewhere) < 2 * ATTEMPTS:
            elsewhere.append(array)
            array = allocate(kind, device)
        placed.append(array)
        position += _rounded_up(array.nbytes)
    return placed


def _total(kinds: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the size in bytes of a block from which arrays of these types can be cut."""
    return SPLIT + sum(_rounded_up(kind.size * kind.dtype.itemsize) for kind in kinds)


def are_adjacent(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether each array begins at the end of the previous one, rounded up to UNIT."""
    begins = [x.unsafe_buffer_pointer() for x in arrays]
    ends = [begin + _rounded_up(x.nbytes) for begin, x in zip(begins, arrays)]
    return begins[1:] == ends[:-1]


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _filled(places: tuple[jax.Array, ...], operands: Operands) -> tuple[jax.Array, ...]:
    return (*map(jnp.copy, operands), jnp.full_like(places[-1], jnp.nan))


def compile_site(problem: Problem, device: jax.Device) -> None:
    """Compiles the programs that depend on the problem and that a `Site` runs on a device."""
    kinds = _guarded_types(problem)
    if device.platform == "gpu":
        kinds.append(jax.ShapeDtypeStruct((_total(kinds),), jnp.uint8))
    for shape, dtype in {(kind.shape, str(kind.dtype)) for kind in kinds}:
        _zeros.lower(shape, dtype, device).compile()
    operands, result = types_on(problem, device)
    _filled.lower((*operands, result), operands).compile()


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _patterned(guard: jax.Array) -> jax.Array:
    return jnp.full_like(guard, PATTERN)


@jax.jit
def _changed(guards: list[jax.Array]) -> jax.Array:
    return jnp.stack([(guard != PATTERN).sum() for guard in guards]).sum()
