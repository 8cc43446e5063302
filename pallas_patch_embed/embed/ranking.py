"""Ranking of embeddings by their cosine to a vector."""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.embed.options import default_workers
from pallas_patch_embed.embed.written import ROWS, Part

# Number of parts that are read at a time. Each one may need three times `written.WHOLE` in memory.
THREADS = 4

# An embedding: its cosine, the number of its part, and its row in this part.
FOUND = np.dtype([("cosine", "f4"), ("part", "i8"), ("row", "i8")])


class Ranking(NamedTuple):
    """The embeddings that are most similar to a vector.

    Attributes:
      found: array of FOUND, the best first; of equal ones in the order of their parts and rows.
      searched: number of embeddings.
      directionless: number of those that have no cosine, because they are zero or not finite.
    """

    found: np.ndarray
    searched: int
    directionless: int


def nearest(parts: Sequence[Part], vector: np.ndarray, top: int) -> Ranking:
    """Computes all cosines in float32 on JAX's default device, and returns the largest ones.

    Args:
      parts: files of embeddings with D elements.
      vector: [D], of any length other than zero.
      top: number of embeddings that are returned, if there are so many.

    Raises:
      OSError, ValueError: a part cannot be read.
    """
    unit = vector.astype(np.float64) / np.linalg.norm(vector.astype(np.float64))
    query = jnp.asarray(unit, jnp.float32)
    best, searched, directionless = np.empty(0, FOUND), 0, 0
    for found, rows, missing in _of_parts(parts, query, top):
        best = _largest(np.concatenate([best, found]), top)
        searched, directionless = searched + rows, directionless + missing
    return Ranking(best, searched, directionless)


def _of_parts(parts: Sequence[Part], query: jax.Array, top: int) -> Iterator[Ranking]:
    """Yields the ranking of each part, in order, and reads later parts ahead."""
    threads = min(default_workers(), THREADS)
    ahead: collections.deque[Future[Ranking]] = collections.deque()
    with ThreadPoolExecutor(threads) as pool, contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for number, part in enumerate(parts):
            ahead.append(pool.submit(_of_part, part, number, query, top))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _of_part(part: Part, number: int, query: jax.Array, top: int) -> Ranking:
    best, searched, directionless = np.empty(0, FOUND), 0, 0
    for vectors in part.vectors():
        cosines = np.concatenate(
            [_padded(vectors[i : i + ROWS], query) for i in range(0, len(vectors), ROWS)]
        )
        rows = np.argsort(-cosines, kind="stable")[:top]  # NaN is last.
        rows = rows[~np.isnan(cosines[rows])]
        found = np.empty(len(rows), FOUND)
        found["cosine"], found["part"], found["row"] = cosines[rows], number, searched + rows
        best = _largest(np.concatenate([best, found]), top)
        searched += len(cosines)
        directionless += int(np.isnan(cosines).sum())
    return Ranking(best, searched, directionless)


def _largest(found: np.ndarray, top: int) -> np.ndarray:
    return found[np.argsort(-found["cosine"], kind="stable")[:top]]


def _padded(vectors: np.ndarray, query: jax.Array) -> np.ndarray:
    """Returns cosines of vectors, whose number is padded so that few programs are compiled."""
    n = len(vectors)
    if more := (1 << (n - 1).bit_length()) - n:
        vectors = np.concatenate([vectors, np.zeros((more, vectors.shape[1]), vectors.dtype)])
    return np.asarray(_cosines(vectors, query))[:n]


@jax.jit
def _cosines(vectors: jax.Array, query: jax.Array) -> jax.Array:
    """Returns the cosines of vectors [n, D] and a query [D] of length 1; NaN if there is none."""
    x = vectors.astype(jnp.float32)
    if vectors.dtype != jnp.float16:  # Only squares of float16 cannot exceed float32's range.
        x /= jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return jnp.sum(x * query, axis=1) / jnp.sqrt(jnp.sum(x * x, axis=1))
