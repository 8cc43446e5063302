"""Every element of a kernel's results, compared with a float64 reference without kernels."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on

from pallas_patch_embed.check import memory
from pallas_patch_embed.chips import Target, default_device
from pallas_patch_embed.patches import Encoding, rows
from pallas_patch_embed.problem import Problem

type Run = Callable[..., jax.Array]
# From images to patches.
type Cut = Callable[[jax.Array], jax.Array]

# Fraction bits of a result.
FRACTION_BITS = {"bfloat16": 7, "float32": 23}
# How many int8 results of bfloat16 a fused multiply-add may move: a share of all, and for few
# elements some more, as they are random.
MOVED_SHARE, MOVED_MORE = 1e-4, 8
# Elements of the largest array of a reference. It is computed for some images at a time.
REFERENCE_ELEMENTS = 2**24


# The ways in which kernels are launched, and how many of them are in one program.
LAUNCHES = {"alone": 1, "in a command buffer": 2, "on two streams": 2}
COMMAND_BUFFERS = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
}


class Counts(NamedTuple):
    """What was found in one launch, or in several.

    Attributes:
      launches: results that were compared.
      elements: elements of these results.
      wrong: elements outside of their bound.
      moved: int8 results of bfloat16 that are within their bound and not the reference.
      changed: bytes that changed although no kernel may write them: those of the operands, and
        those of the guards around operands and result.
      poisoned: launches whose kernel is known to have written into poisoned memory.
      guarded: launches whose buffers lay between guards.
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
        """Wrong elements, changed bytes, and moved elements if more of them moved than may."""
        moved = 0 if self.moved <= MOVED_SHARE * self.elements + MOVED_MORE else self.moved
        return self.wrong + self.changed + moved


def wrong_elements(
    run: Run, problem: Problem, *, runs: int, seed: int, device: jax.Device | None = None
) -> int:
    """How much of a kernel's results is wrong.

    Every element of every run is compared with a reference in float64. The operands of each run are
    new, the memory of its result is poisoned, and the bytes around all buffers are watched.

    Args:
      run: patches, weight, scale, table -> y, as in a `Plan`. If the problem has a `layout`, the
        first operand is images.
      problem: shapes and dtypes.
      runs: number of launches.
      seed: seed of the operands that are drawn.
      device: where it runs; None for JAX's default device.

    Returns:
      0 if all is right; otherwise the number of wrong elements, and of bytes outside of the result
      that the kernel changed.
    """
    found = compared(run, problem, seed=seed, devices=(device or default_device(),))
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
) -> Iterator[Counts]:
    """Launches again and again, with new operands, and yields what was found each time.

    Args:
      run, problem, seed: as for `wrong_elements`.
      devices: a program runs on each of them, at the same time.
      how: one of `LAUNCHES`: how the programs launch their kernels.
      cut: XLA's program from images to the patches that `run` takes; None if `run` takes the
        first operand as it is.
      before_launch: called when everything is ready.
      allocate: makes an array with memory of its own.
    """
    count = LAUNCHES[how]
    tensor_cores = Target.of(devices[0]).platform == "cuda"
    sites = [[memory.Site(problem, d, allocate) for _ in range(count)] for d in devices]
    programs = [_program(run, cut, count, how, of_device) for of_device in sites]
    # A kernel that writes its result somewhere else, from which the program copies it, needs memory
    # for it, besides that of the patches which it reads at the same time.
    elsewhere = sites[0][0].result.nbytes
    if cut is not None:
        elsewhere += math.prod(problem.patches) * jnp.dtype(problem.dtype).itemsize
    in_place = [_temporary_bytes(program) < elsewhere for program in programs]
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


def _program(run: Run, cut: Cut | None, count: int, how: str, sites: Sequence[memory.Site]) -> Any:
    """A compiled program of poisoned results and the operands of each launch."""

    def program(poisoned: list[jax.Array], operands: list[memory.Operands]) -> list[jax.Array]:
        del poisoned
        if cut is not None:
            # Outside of the streams: XLA gives none to a call within a call, as of jax's `pad`.
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
        results: list[jax.Array] = []
        for of_launch in operands:
            of_launch, results = lax.optimization_barrier((of_launch, results))
            results = [*results, run(*of_launch)]
        return results

    jitted = jax.jit(program, donate_argnums=0, keep_unused=True)
    lowered = jitted.lower([site.result for site in sites], [site.operands for site in sites])
    return lowered.compile(COMMAND_BUFFERS if how == "in a command buffer" else None)


def _temporary_bytes(program: Any) -> int:
    """Memory that a program allocates besides operands and results."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, problem: Problem) -> memory.Operands:
    """Random operands of a problem.

    Some elements of the table cancel the product. The scales of every other column are powers of
    two: there the product of accumulator and scale is exact, and so is the result of int8, however
    it is computed.
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
    # The standard deviation of the product.
    magnitude = (74 * 74 if problem.dtype == "int8" else 37) * problem.K**0.5
    table = magnitude * jax.random.normal(keys[3], problem.table)
    # The table may be [..., S, N] where the scale is [..., N].
    along = scale if scale.ndim == 1 else jnp.expand_dims(scale, -2)
    if jnp.broadcast_shapes(along.shape, table.shape) == table.shape:
        table = along * table
    return source, weight, scale, table.astype(problem.table_dtype)


def has_power_of_two(N: int) -> jax.Array:
    """The columns whose scales are powers of two."""
    return jnp.arange(N) % 2 == 0


def compare(
    problem: Problem,
    given: memory.Operands,
    operands: memory.Operands,
    y: jax.Array,
    *,
    tensor_cores: bool,
) -> tuple[int, int, int]:
    """Compares a result.

    Args:
      problem: shapes and dtypes.
      given: copies of the operands, made before the launch.
      operands: the operands after the launch.
      y: the result.
      tensor_cores: whether the result is a GPU's.

    Returns:
      (wrong elements, moved elements, changed bytes of operands), as in `Counts`.
    """
    with jax.enable_x64(True):
        found = _compare(given, operands, y, problem, tensor_cores)
        wrong, moved, changed = map(int, jax.device_get(found))
    return wrong, moved, changed


# XLA need not look for the fastest reference.
@functools.partial(jax.jit, static_argnums=(3, 4), compiler_options={"xla_gpu_autotune_level": 0})
def _compare(
    given: memory.Operands,
    operands: memory.Operands,
    y: jax.Array,
    problem: Problem,
    tensor_cores: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(wrong elements, moved elements, changed bytes of operands)."""
    changed = sum((_bytes(before) != _bytes(after)).sum() for before, after in zip(given, operands))
    # Axes of one image, weight, scale, table and result. Others are leading axes.
    image = 2 if problem.layout is None else problem.layout.image_ndim
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
    """(wrong elements, moved elements) of one image's result [S, N].

    int8: the accumulator is exact, so the result is that of one float32 product and sum. A fused
    multiply-add may move few elements by one ulp of the largest of product, table and result (which
    can be in the next binade).

    Other dtypes: 1 ulp(reference) + (K + 3) * 2^-24 * scale * sum_k |p * w|. A float32 sum of K
    products in any order errs by at most (K - 1) * 2^-24 times the sum of their magnitudes.
    Rounding the products (exact unless they are float32), and rounding the accumulator's product
    with the scale, add less than 4 * 2^-24 of it. Adding the table and the final rounding together
    err by less than 1 ulp of the result. Tensor cores cut bits off instead of rounding, which errs
    twice as much. They also sum float8 in fewer bits: `_float8_error`.
    """
    if problem.layout is not None:
        source = rows(source, problem.layout, Encoding(problem.dtype))
    p, w, scale, table, y = (x.astype(jnp.float64) for x in (source, weight, scale, table, y))
    # Sums of int8 products are exact in float64.
    product = jnp.einsum("sk,nk->sn", p, w)
    if problem.dtype == "int8":
        # float64 holds the exact product of two float32 numbers. It rounds their sum, which does
        # not change the float32 that the sum is rounded to, as 53 >= 2 * 24 + 2.
        scaled = _rounded(_rounded(product, "float32") * scale, "float32")
        exact = _rounded(_rounded(scaled + table, "float32"), problem.out_dtype)
        largest = jnp.maximum(jnp.maximum(jnp.abs(scaled), jnp.abs(table)), jnp.abs(exact))
        may_move = jnp.where(has_power_of_two(problem.N), 0, _ulp(largest, problem.out_dtype))
        wrong = ~(jnp.abs(y - exact) <= may_move)
        # A float32 result differs wherever the sum is rounded once instead of twice.
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
    """float64 rounded to a dtype; XLA would drop a conversion there and back."""
    return lax.reduce_precision(x, 8, FRACTION_BITS[dtype])


def _ulp(x: jax.Array, dtype: str) -> jax.Array:
    """The distance between neighbouring numbers of a dtype at |x|, at least that of subnormals."""
    return _power_of_two(jnp.maximum(jnp.abs(x), 2.0**-126)) * 2.0 ** -FRACTION_BITS[dtype]


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two that is not greater than x.

    By its bits, which are exact on every platform.
    """
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{info.bits}"))
    return lax.bitcast_convert_type((bits >> info.nmant) << info.nmant, x.dtype)


def _float8_error(patches: jax.Array, weight: jax.Array) -> jax.Array:
    """A bound on the error of Hopper's float8 products, [S, N], before the scale.

    In each step the tensor cores align the products and the accumulator to the largest of them, and
    drop the bits below its 13th fraction bit (arXiv 2512.07004). So every addend, and the sum, errs
    by less than 2^-13 of the largest. A step has 16 or 32 products. The bound assumes 16, which
    means more steps and a larger bound, so it is valid for both.
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
