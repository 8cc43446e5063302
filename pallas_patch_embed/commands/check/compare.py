"""Compares every element of a kernel's results with a float64 reference."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on

from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.problem import Problem
from pallas_patch_embed.commands.check import memory
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows

type Run = Callable[..., jax.Array]
# Function that cuts images into patches.
type Cut = Callable[[jax.Array], jax.Array]
# Function that returns a context in which a process uses the devices.
type Turn = Callable[[], AbstractContextManager[Any]]

# Number of fraction bits of each dtype of results.
FRACTION_BITS = {"bfloat16": 7, "float32": 23}
# Number of bfloat16 results of int8 that a fused multiply-add may move by an ulp: a share of all
# elements, plus a constant, because the number is random.
MOVED_SHARE, MOVED_MORE = 1e-4, 8
# Largest number of elements in an array of the reference, which limits the images that are
# computed at a time.
REFERENCE_ELEMENTS = 2**24


# The number of kernels in one program, for each way in which kernels are launched.
LAUNCHES = {"alone": 1, "on slices": 1, "in a command buffer": 2, "on two streams": 2}
COMMAND_BUFFERS = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
}


class Counts(NamedTuple):
    """The result of one launch or of several.

    Attributes:
      launches: number of launches whose results were compared.
      elements: number of elements of these results.
      wrong: number of elements outside of their bound.
      moved: number of bfloat16 results of int8 that are within their bound but differ from the
        reference.
      changed: number of bytes that changed although no kernel may write them, in the operands and
        in the guards around operands and result.
      poisoned: number of launches whose kernel is known to have written into poisoned memory.
      guarded: number of launches whose buffers were between guards.
    """

    launches: int = 0
    elements: int = 0
    wrong: int = 0
    moved: int = 0
    changed: int = 0
    poisoned: int = 0
    guarded: int = 0

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*map(sum, zip(self, other)))

    @property
    def all_wrong(self) -> int:
        """Wrong elements plus changed bytes, plus moved elements if there are too many of them."""
        moved = 0 if self.moved <= MOVED_SHARE * self.elements + MOVED_MORE else self.moved
        return self.wrong + self.changed + moved


def wrong_elements(
    run: Run,
    problem: Problem,
    *,
    runs: int,
    seed: int,
    device: jax.Device | None = None,
    turn: Turn = contextlib.nullcontext,
) -> int:
    """Counts the wrong elements in a kernel's results.

    Every element of every run is compared with a reference in float64. The operands of each run are
    new, the memory of the result is poisoned before it, and the bytes around all buffers are
    checked after it.

    Args:
      run: function (patches, weight, scale, table) -> y, as in a `Plan`. If the problem has a
        `geometry`, its first argument is images.
      problem: shapes and dtypes.
      runs: number of launches.
      seed: seed of the random operands.
      device: the device that runs the kernel; None for JAX's default device.
      turn: as for `compared`.

    Returns:
      `Counts.all_wrong` of all launches: 0 if all results are right, otherwise the number of wrong
      elements plus the number of bytes outside of the result that the kernel changed.
    """
    devices = (device or default_device(),)
    with contextlib.closing(compared(run, problem, seed=seed, devices=devices, turn=turn)) as found:
        return functools.reduce(Counts.plus, itertools.islice(found, runs), Counts()).all_wrong


def compared(
    run: Run,
    problem: Problem,
    *,
    seed: int,
    devices: Sequence[jax.Device],
    how: str = "alone",
    cut: Cut | None = None,
    before_launch: Callable[[], None] = lambda: None,
    allocate: memory.Allocate = memory.allocate,
    turn: Turn = contextlib.nullcontext,
) -> Generator[Counts]:
    """Launches repeatedly, with new operands, and yields the result of each launch.

    Args:
      run, problem, seed: as for `wrong_elements`.
      devices: the devices, on all of which a program runs at the same time.
      how: one of `LAUNCHES`, the way in which the programs launch their kernels.
      cut: function by which XLA cuts images into the patches for `run`; None if `run` accepts the
        first operand unchanged.
      before_launch: function that is called immediately before each launch.
      allocate: function that allocates an array with memory of its own.
      turn: function whose context is entered after all large programs are compiled, and left when
        the generator is closed. The devices are used only within it.
    """
    count = LAUNCHES[how]
    tensor_cores = Target.of(devices[0]).platform == "cuda"
    programs = [_program(run, cut, how, problem, device) for device in devices]
    _compile_comparison(problem, devices[0])
    # If XLA lets the kernel write to another buffer and then copies the result, the program needs
    # temporary memory for the result, in addition to memory for patches that XLA has cut.
    result = memory.result_type(problem)
    elsewhere = result.size * result.dtype.itemsize
    if cut is not None:
        elsewhere += math.prod(problem.patches) * jnp.dtype(problem.dtype).itemsize
    in_place = [_temporary_bytes(program) < elsewhere for program in programs]
    with turn():
        sites = [[memory.Site(problem, d, allocate) for _ in range(count)] for d in devices]
        for index in itertools.count():
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
            drawn = []
            for i, site in enumerate(itertools.chain(*sites)):
                device = devices[i // count]
                with jax.default_device(device):
                    drawn.append(jax.device_put(draw(jax.random.fold_in(key, i), problem), device))
                site.fill(drawn[-1])
            places = [site.result.unsafe_buffer_pointer() for site in itertools.chain(*sites)]
            before_launch()
            results = [
                program([site.result for site in of_device], [site.operands for site in of_device])
                for program, of_device in zip(programs, sites)
            ]
            jax.block_until_ready(results)
            total = Counts()
            for i, (site, y) in enumerate(zip(itertools.chain(*sites), itertools.chain(*results))):
                poisoned = in_place[i // count] and y.unsafe_buffer_pointer() == places[i]
                site.result = y
                wrong, moved, changed = compare(
                    problem, drawn[i], site.operands, y, tensor_cores=tensor_cores
                )
                changed += site.changed_bytes()
                total = total.plus(Counts(1, y.size, wrong, moved, changed, poisoned, site.guarded))
            yield total


def _program(run: Run, cut: Cut | None, how: str, problem: Problem, device: jax.Device) -> Any:
    """Compiles a program of launches, whose arguments are poisoned results and operands."""

    def program(poisoned: list[jax.Array], operands: list[memory.Operands]) -> list[jax.Array]:
        del poisoned
        if cut is not None:
            # Images are cut outside of the streams, because XLA assigns no stream to a call within
            # a call, such as that of `jnp.pad`.
            operands = [(cut(x), weight, scale, table) for x, weight, scale, table in operands]
        if how == "on two streams":
            return [
                compute_on(
                    run,
                    compute_type=f"gpu_stream:{1 + i}",
                    out_memory_spaces=jax.memory.Space.Device,
                )(*of_launch)
                for i, of_launch in enumerate(operands)
            ]
        if how == "on slices":
            operands = jax.tree.map(_slice_of_vector, operands)
        results: list[jax.Array] = []
        for of_launch in operands:
            of_launch, results = lax.optimization_barrier((of_launch, results))
            results = [*results, run(*of_launch)]
        return results

    jitted = jax.jit(program, donate_argnums=0, keep_unused=True)
    operands, result = memory.types_on(problem, device)
    count = LAUNCHES[how]
    lowered = jitted.lower([result] * count, [operands] * count)
    return lowered.compile(COMMAND_BUFFERS if how == "in a command buffer" else None)


def _slice_of_vector(x: jax.Array) -> jax.Array:
    """Returns x as a slice of a vector, which begins at the vector's second element.

    XLA may pass its address within the vector, which is aligned to x's dtype alone. Through the
    barrier XLA does not see that the slice equals x.
    """
    vector = lax.optimization_barrier(jnp.concatenate([x.ravel()[:1], x.ravel()]))
    return vector[1:].reshape(x.shape)


def _compile_comparison(problem: Problem, device: jax.Device) -> None:
    """Compiles the functions that a comparison calls, if they are not yet compiled."""
    operands, result = memory.types_on(problem, device)
    tensor_cores = Target.of(device).platform == "cuda"
    with jax.default_device(device):
        draw.lower(jax.random.key(0, impl="rbg"), problem).compile()
    memory.compile_site(problem, device)
    with jax.enable_x64(True):
        _compare.lower(operands, operands, result, problem, tensor_cores).compile()


def _temporary_bytes(program: Any) -> int:
    """Returns the bytes that a program allocates in addition to operands and results."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, problem: Problem) -> memory.Operands:
    """Draws random operands of a problem.

    Some elements of the table cancel the product. In every other column the scale is a power of
    two: there the product of accumulator and scale is exact, and the result of int8 must be exact,
    whether or not a multiply-add is fused.
    """
    keys = jax.random.split(key, 4)
    bits = functools.partial(jax.random.bits, dtype=jnp.uint8)
    if problem.images is not None:
        source = bits(keys[0], problem.images)
    elif problem.dtype == "int8":
        source = lax.bitcast_convert_type(bits(keys[0], problem.patches), jnp.int8)
    else:
        source = jax.random.uniform(keys[0], problem.patches, jnp.float32, -1, 1)
        source = source.astype(problem.dtype)
    if problem.dtype == "int8":
        weight = lax.bitcast_convert_type(bits(keys[1], problem.weight), jnp.int8)
    else:
        weight = (64 * jax.random.normal(keys[1], problem.weight)).astype(problem.dtype)
    scale = jnp.exp(jax.random.normal(keys[2], problem.scale))
    scale = jnp.where(has_power_of_two(problem.N), _power_of_two(scale), scale)
    # Standard deviation of the product, before the scale.
    magnitude = (74 * 74 if problem.dtype == "int8" else 37) * problem.K**0.5
    table = magnitude * jax.random.normal(keys[3], problem.table)
    # The scale [..., N] gets an axis of length 1 in place of S.
    along = scale if scale.ndim == 1 else jnp.expand_dims(scale, -2)
    if jnp.broadcast_shapes(along.shape, table.shape) == table.shape:
        table = along * table
    return source, weight, scale, table.astype(problem.table_dtype)


def has_power_of_two(N: int) -> jax.Array:
    """Returns a mask of the columns whose scales are powers of two."""
    return jnp.arange(N) % 2 == 0


def compare(
    problem: Problem,
    given: memory.Operands,
    operands: memory.Operands,
    y: jax.Array,
    *,
    tensor_cores: bool,
) -> tuple[int, int, int]:
    """Compares a result with the reference.

    Args:
      problem: shapes and dtypes.
      given: copies of the operands, made before the launch.
      operands: the operands after the launch.
      y: the result.
      tensor_cores: whether a GPU's tensor cores computed the result.

    Returns:
      (wrong elements, moved elements, changed bytes of operands), as in `Counts`.
    """
    with jax.enable_x64(True):
        found = _compare(given, operands, y, problem, tensor_cores)
        wrong, moved, changed = map(int, jax.device_get(found))
    return wrong, moved, changed


# The reference is compiled without autotuning, because its time does not matter.
@functools.partial(jax.jit, static_argnums=(3, 4), compiler_options={"xla_gpu_autotune_level": 0})
def _compare(
    given: memory.Operands,
    operands: memory.Operands,
    y: jax.Array,
    problem: Problem,
    tensor_cores: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (wrong elements, moved elements, changed bytes of operands)."""
    changed = sum((_bytes(before) != _bytes(after)).sum() for before, after in zip(given, operands))
    # Number of axes of one image or its patches, weight, scale, table and result, without leading
    # axes.
    image = 2 if problem.geometry is None else problem.geometry.image_ndim
    own = (image, 2, 1, 2, 2)
    leading = y.shape[:-2]
    arrays = (*given, y)
    mapped = [i for i, x in enumerate(arrays) if x.ndim > own[i] or i == 4]

    def of_one(xs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        all_of_it: list[Any] = list(arrays)
        for i, x in zip(mapped, xs):
            all_of_it[i] = x
        return _compare_image(problem, tensor_cores, *all_of_it)

    if not y.size:
        zero = jnp.int64(0)
        return zero, zero, jnp.int64(changed)
    flat = [
        jnp.broadcast_to(x, (*leading, *x.shape[x.ndim - n :])).reshape(
            math.prod(leading), *x.shape[x.ndim - n :]
        )
        for x, n in ((arrays[i], own[i]) for i in mapped)
    ]
    elements = problem.patches[-2] * max(problem.N, problem.K)
    wrong, moved = lax.map(of_one, flat, batch_size=max(1, REFERENCE_ELEMENTS // elements))
    return wrong.sum(), moved.sum(), jnp.int64(changed)


def _bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def _compare_image(
    problem: Problem,
    tensor_cores: bool,
    source: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    y: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns (wrong elements, moved elements) of one image's result [S, N].

    In int8 the accumulator is exact, so the result is that of one float32 product and one float32
    sum. A fused multiply-add may move a few elements by one ulp of the largest of product, table
    and result (which can be in the next binade).

    In other dtypes the bound is 1 ulp(reference) + (K + 3) * 2^-24 * scale * sum_k |p * w|. The
    error of a float32 sum of K products in any order is at most (K - 1) * 2^-24 times the sum of
    their magnitudes. Rounding of the products (which are exact unless they are float32) and of the
    accumulator's product with the scale adds less than 4 * 2^-24 times that sum. The addition of
    the table and the final rounding together add less than 1 ulp of the result. Tensor cores
    truncate instead of rounding, which doubles the error. They also sum float8 with fewer bits (see
    `_float8_error`).
    """
    if problem.geometry is not None:
        source = cut_into_rows(source, problem.geometry, Encoding(problem.dtype))
    p, w, scale, table, y = (x.astype(jnp.float64) for x in (source, weight, scale, table, y))
    # Sums of int8 products are exact in float64.
    product = jnp.einsum("sk,nk->sn", p, w)
    if problem.dtype == "int8":
        # In float64 the product of two float32 numbers is exact. Their sum is rounded to float64
        # first, which does not change its rounding to float32, because 53 >= 2 * 24 + 2.
        scaled = _rounded(_rounded(product, "float32") * scale, "float32")
        exact = _rounded(_rounded(scaled + table, "float32"), problem.out_dtype)
        largest = jnp.maximum(jnp.maximum(jnp.abs(scaled), jnp.abs(table)), jnp.abs(exact))
        may_move = jnp.where(has_power_of_two(problem.N), 0, _ulp(largest, problem.out_dtype))
        wrong = ~(jnp.abs(y - exact) <= may_move)
        # Moved float32 results are not counted, because a fused multiply-add, which rounds only
        # once, moves many of them.
        moved = (y != exact) & ~wrong & (problem.out_dtype == "bfloat16")
        return wrong.sum(), moved.sum()
    reference = product * scale + table
    magnitude = jnp.einsum("sk,nk->sn", jnp.abs(p), jnp.abs(w)) * scale
    unit = 2.0 ** (-23 if tensor_cores else -24)
    bound = _ulp(reference, problem.out_dtype) + (problem.K + 3) * unit * magnitude
    if tensor_cores and problem.dtype == "float8_e4m3fn":
        bound += _float8_error(p, w) * scale
    return (~(jnp.abs(y - reference) <= bound)).sum(), jnp.int64(0)


def _rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Rounds float64 to a dtype. XLA would remove a conversion to the dtype and back."""
    return lax.reduce_precision(x, 8, FRACTION_BITS[dtype])


def _ulp(x: jax.Array, dtype: str) -> jax.Array:
    """Returns the distance between adjacent numbers of a dtype at |x|, at least the subnormals'."""
    return _power_of_two(jnp.maximum(jnp.abs(x), 2.0**-126)) * 2.0 ** -FRACTION_BITS[dtype]


def _power_of_two(x: jax.Array) -> jax.Array:
    """Returns the largest power of two that is not greater than x.

    It clears the fraction bits of x, which is exact on every platform.
    """
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{info.bits}"))
    return lax.bitcast_convert_type((bits >> info.nmant) << info.nmant, x.dtype)


def _float8_error(patches: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns a bound on the error of Hopper's float8 sums of products, [S, N], before the scale.

    In each step the tensor cores align the products and the accumulator to the largest of them, and
    drop the bits below its 13th fraction bit (arXiv 2512.07004). So the error of every addend, and
    of the sum, is less than 2^-13 of the largest. A step has 16 or 32 products. The bound assumes
    16, which gives more steps and a larger bound, so it is valid for both.
    """
    step = 16
    parts = [jnp.moveaxis(x.reshape(x.shape[0], -1, step), 1, 0) for x in (patches, weight)]

    def add(
        carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total, error = carry
        p, w = part
        largest = jnp.abs(p).max(-1)[:, None] * jnp.abs(w).max(-1)
        after = total + jnp.einsum("sk,nk->sn", p, w)
        largest = jnp.maximum(largest, jnp.maximum(jnp.abs(total), jnp.abs(after)) + error)
        return (after, error + (step + 2) * 2.0**-13 * largest), None

    zero = jnp.zeros((patches.shape[0], weight.shape[0]), jnp.float64)
    return lax.scan(add, (zero, zero), (parts[0], parts[1]))[0][1]
