"""Programs whose kernels get parts of larger arrays as operands, or write into a larger array.

XLA may turn a slice in front of a custom call, or an update behind it, into an address within the
larger array. A program is a function (kernel, operands) -> (function, arguments): it calls `kernel`
with its operands, which it cuts out of the arguments. Under `jax.disable_jit` the same function
computes every slice as an array of its own.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

# Elements in front of a part of a vector. So the part is aligned to its dtype, but not to 16 bytes.
OFFSETS = (1, 3)
# Number of parts of a stack.
PARTS = 3


def programs(operands, y) -> dict[str, Callable]:
    """Returns all programs for operands and a result of these shapes and dtypes, by their names."""
    found = {
        "all operands are slices": all_at_odd_elements,
        "the first operand is mapped over": mapped_by_vmap,
        "the result is a part of a batch": result_in_batch,
        "the result begins at an odd element": result_at_odd_element,
        "the results of a loop begin at odd elements": results_at_odd_elements,
    }
    # Nothing promotes float8 to another dtype.
    if all(operand.dtype.itemsize > 1 or operand.dtype == jnp.int8 for operand in operands[1:]):
        found["all operands but the first are in one vector"] = in_one_vector
    for i, operand in enumerate(operands):
        for offset in OFFSETS:
            found[f"operand {i} begins at element {offset}"] = functools.partial(
                at_odd_element, i=i, offset=offset
            )
        found[f"operand {i} is a dynamic slice"] = functools.partial(dynamic, i=i)
        for loop in LOOPS:
            found[f"operand {i} is a part in {loop}"] = functools.partial(stacked, i=i, loop=loop)
        if operand.ndim > 2:
            found[f"operand {i} is a part of a batch"] = functools.partial(of_batch, i=i)
            found[f"operand {i} is every other image"] = functools.partial(of_batch, i=i, step=2)
        if (operand.shape, operand.dtype) == (y.shape, y.dtype):
            found[f"the result replaces operand {i}"] = functools.partial(in_place, i=i)
            found[f"the result overlaps operand {i}"] = functools.partial(in_place, i=i, shift=1)
            found[f"the results of a loop replace operand {i}"] = functools.partial(
                in_place_in_loop, i=i
            )
    return found


def vector_of(x, offset=OFFSETS[0]):
    """Returns a vector that contains x after `offset` other elements."""
    other = x.ravel()[: max(OFFSETS)]
    return jnp.concatenate([other[:offset], x.ravel(), other])


def part_of(vector, shape, offset=OFFSETS[0]):
    """Returns the part of a vector after `offset` elements, as an array of this shape."""
    return vector[offset : offset + math.prod(shape)].reshape(shape)


def stack_of(x):
    """Returns PARTS different arrays like x."""
    return jnp.stack([jnp.roll(x, i, axis=0) for i in range(PARTS)])


def replaced(operands, i, x):
    return [*operands[:i], x, *operands[i + 1 :]]


def at_odd_element(kernel, operands, i, offset):
    def function(vector, *operands):
        return kernel(*replaced(operands, i, part_of(vector, operands[i].shape, offset)))

    return function, (vector_of(operands[i], offset), *operands)


def all_at_odd_elements(kernel, operands):
    def function(*vectors):
        return kernel(*(part_of(v, x.shape) for v, x in zip(vectors, operands)))

    return function, tuple(map(vector_of, operands))


def in_one_vector(kernel, operands):
    """Keeps parameters in a vector of the widest of their dtypes, as optimisers do."""
    first, *rest = operands
    with jax.numpy_dtype_promotion("standard"):
        vector, unravel = ravel_pytree((jnp.zeros(1), rest))
    return lambda first, vector: kernel(first, *unravel(vector)[1]), (first, vector)


def dynamic(kernel, operands, i):
    def function(vector, begin, *operands):
        part = lax.dynamic_slice_in_dim(vector, begin, operands[i].size)
        return kernel(*replaced(operands, i, part.reshape(operands[i].shape)))

    return function, (vector_of(operands[i]), jnp.int32(OFFSETS[0]), *operands)


def by_scan(call, stack):
    return lax.scan(lambda count, part: (count + 1, call(part)), 0, stack)[1]


def by_while(call, stack):
    def step(carry):
        i, results = carry
        y = call(lax.dynamic_index_in_dim(stack, i, keepdims=False))
        return i + 1, lax.dynamic_update_index_in_dim(results, y, i, 0)

    like = jax.eval_shape(call, stack[0])
    results = jnp.zeros((PARTS, *like.shape), like.dtype)
    return lax.while_loop(lambda carry: carry[0] < PARTS, step, (jnp.int32(0), results))[1]


LOOPS = {
    "scan": by_scan,
    "map": lax.map,
    "while_loop": by_while,
    "a Python loop": lambda call, stack: [call(part) for part in stack],
}


def stacked(kernel, operands, i, loop):
    """Calls the kernel with each part of a stack, which begins at an odd element of a vector."""

    def function(vector, *operands):
        stack = part_of(vector, (PARTS, *operands[i].shape))
        return LOOPS[loop](lambda part: kernel(*replaced(operands, i, part)), stack)

    return function, (vector_of(stack_of(operands[i])), *operands)


def mapped_by_vmap(kernel, operands):
    first, *rest = operands
    axes = (0, *[None] * len(rest))

    def function(vector, *rest):
        return jax.vmap(kernel, axes)(part_of(vector, (PARTS, *first.shape)), *rest)

    return function, (vector_of(stack_of(first)), *rest)


def of_batch(kernel, operands, i, step=1):
    def function(batch, *operands):
        part = batch[1 : 1 + step * operands[i].shape[0] : step]
        return kernel(*replaced(operands, i, part))

    return function, (jnp.concatenate([operands[i]] * 3)[::-1], *operands)


def result_in_batch(kernel, operands):
    def function(batch, *operands):
        return batch.at[1].set(kernel(*operands))

    y = jax.eval_shape(kernel, *operands)
    return function, (jnp.ones((PARTS, *y.shape), y.dtype), *operands)


def result_at_odd_element(kernel, operands):
    def function(vector, *operands):
        return lax.dynamic_update_slice(vector, kernel(*operands).ravel(), (OFFSETS[0],))

    y = jax.eval_shape(kernel, *operands)
    return function, (jnp.ones(y.size + max(OFFSETS), y.dtype), *operands)


def results_at_odd_elements(kernel, operands):
    y = jax.eval_shape(kernel, *operands)

    def function(vector, stack, *rest):
        def step(i, vector):
            found = kernel(lax.dynamic_index_in_dim(stack, i, keepdims=False), *rest)
            return lax.dynamic_update_slice(vector, found.ravel(), (OFFSETS[0] + i * y.size,))

        return lax.fori_loop(0, PARTS, step, vector)

    vector = jnp.ones(PARTS * y.size + max(OFFSETS), y.dtype)
    return function, (vector, stack_of(operands[0]), *operands[1:])


def in_place(kernel, operands, i, shift=0):
    """Replaces images of a batch by the result for them, or for those `shift` images before."""

    def function(batch, *operands):
        images = len(operands[i])
        part = batch[images - shift : 2 * images - shift]
        y = kernel(*replaced(operands, i, part))
        return batch.at[images : 2 * images].set(y)

    return function, (jnp.concatenate(stack_of(operands[i])), *operands)


def in_place_in_loop(kernel, operands, i):
    def function(stack, *operands):
        def step(j, stack):
            part = lax.dynamic_index_in_dim(stack, j, keepdims=False)
            y = kernel(*replaced(operands, i, part))
            return lax.dynamic_update_index_in_dim(stack, y, j, 0)

        return lax.fori_loop(0, PARTS, step, stack)

    return function, (stack_of(operands[i]), *operands)
