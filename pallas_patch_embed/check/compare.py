"""Every element of a kernel's results, beside a reference in float64 that no kernel computes."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.chips import Target, default_device
from pallas_patch_embed.patches import Encoding, rows
from pallas_patch_embed.problem import Problem

# Patches or images, weight, scale, table.
type Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
type Run = Callable[..., jax.Array]

# Fraction bits of a result.
FRACTION_BITS = {"bfloat16": 7, "float32": 23}
# The share of int8 results of bfloat16 that a fused multiply-add may move.
MOVED = 1e-4
# Elements of the largest array of a reference. It is computed for some images at a time.
REFERENCE_ELEMENTS = 2**24


class Counts(NamedTuple):
    """What was found in one launch, or in several.

    Attributes:
      launches: results that were compared.
      elements: elements of these results.
      wrong: elements outside of their bound.
      moved: int8 results of bfloat16 that are within their bound and not the reference.
      changed: bytes that changed although no kernel may write them: those of the operands, and
        those between the buffers.
      poisoned: launches whose result was poisoned before.
    """

    launches: int = 0
    elements: int = 0
    wrong: int = 0
    moved: int = 0
    changed: int = 0
    poisoned: int = 0

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*map(sum, zip(self, other)))

    @property
    def all_wrong(self) -> int:
        """Wrong elements, changed bytes, and moved elements if more of them moved than may."""
        moved = 0 if self.moved <= max(1, MOVED * self.elements) else self.moved
        return self.wrong + self.changed + moved


def wrong_elements(
    run: Run, problem: Problem, *, runs: int, seed: int, device: jax.Device | None = None
) -> int:
    """How many elements of a kernel's results are wrong.

    Every element of every run is compared with a reference in float64. The operands of each run are
    new, and the memory of its result is poisoned.

    Args:
      run: patches, weight, scale, table -> y, as in a `Plan`. If the problem has a `layout`, the
        first operand is images.
      problem: shapes and dtypes.
      runs: number of launches.
      seed: of the operands that are drawn.
      device: where it runs; None for JAX's default device.

    Returns:
      0 if all is right; otherwise the number of wrong elements, and of bytes of operands that the
      kernel changed.
    """
    found = itertools.islice(compared(run, problem, seed=seed, device=device), runs)
    return functools.reduce(Counts.plus, found, Counts()).all_wrong


def compared(
    run: Run, problem: Problem, *, seed: int, device: jax.Device | None = None
) -> Iterator[Counts]:
    """Launches `run` again and again, with new operands, and yields what was found each time.

    The arguments are those of `wrong_elements`.
    """
    device = device or default_device()
    launch = jax.jit(lambda poisoned, *operands: run(*operands), donate_argnums=0, keep_unused=True)
    for index in itertools.count():
        with jax.default_device(device):
            key = jax.random.fold_in(jax.random.key(seed), index)
            operands = jax.device_put(draw(key, problem), device)
            copies = jax.tree.map(jnp.copy, operands)
            y = poison(problem, device)
            # The result replaces the donated array. So a kernel that leaves out an element leaves
            # the poison there.
            address = y.unsafe_buffer_pointer()
            y = launch(y, *operands).block_until_ready()
            poisoned = y.unsafe_buffer_pointer() == address
            yield counts(problem, copies, operands, y)._replace(poisoned=int(poisoned))


def poison(problem: Problem, device: jax.Device) -> jax.Array:
    """An array of NaN with the shape and dtype of the result."""
    shape = (*problem.patches[:-1], problem.N)
    return jnp.full(shape, jnp.nan, problem.out_dtype, device=device)


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, problem: Problem) -> Operands:
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
    power = jnp.ldexp(jnp.float32(1), jnp.frexp(scale)[1])
    scale = jnp.where(has_power_of_two(problem.N), power, scale)
    # The standard deviation of the product.
    magnitude = (74 * 74 if problem.dtype == "int8" else 37) * problem.K**0.5
    table = magnitude * jax.random.normal(keys[3], problem.table)
    # A scale [..., N] beside a table [..., S, N].
    along = scale if scale.ndim == 1 else jnp.expand_dims(scale, -2)
    if jnp.broadcast_shapes(along.shape, table.shape) == table.shape:
        table = along * table
    return source, weight, scale, table.astype(problem.table_dtype)


def has_power_of_two(N: int) -> jax.Array:
    """The columns whose scales are powers of two."""
    return jnp.arange(N) % 2 == 0


def counts(problem: Problem, given: Operands, operands: Operands, y: jax.Array) -> Counts:
    """Compares one result.

    Args:
      problem: shapes and dtypes.
      given: copies of the operands, made before the launch.
      operands: the operands after the launch.
      y: the result.
    """
    tensor_cores = Target.of(next(iter(y.devices()))).platform == "cuda"
    with jax.enable_x64(True):
        found = _compare(given, operands, y, problem, tensor_cores)
        wrong, moved, changed = map(int, jax.device_get(found))
    return Counts(1, y.size, wrong, moved, changed)


# XLA need not look for the fastest reference.
@functools.partial(jax.jit, static_argnums=(3, 4), compiler_options={"xla_gpu_autotune_level": 0})
def _compare(
    given: Operands, operands: Operands, y: jax.Array, problem: Problem, tensor_cores: bool
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
    exponent = jnp.frexp(jnp.maximum(jnp.abs(x), 2.0**-126))[1] - 1
    return jnp.ldexp(jnp.float64(1), exponent - FRACTION_BITS[dtype])


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
