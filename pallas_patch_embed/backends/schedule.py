"""Which row tiles each worker computes, in which order: the schedule that every kernel reads.

The M rows of patches are cut into tiles of `tile_m`. Tile t needs `tile_m` rows of the table of
positions, beginning with row (t * tile_m) mod S: its phase. There are P = S / gcd(S, tile_m)
phases, and the tiles t, t + P, t + 2P, ... share one. The tiles are sorted by phase, and each
worker gets a contiguous share of them. A share has few phases, so the worker can keep its part of
the table.
"""

import math

import numpy as np

# The fields of a segment.
FIRST_TILE, TILES, STRIDE, TABLE_ROW = range(4)


def segments(M: int, S: int, tile_m: int, workers: int) -> np.ndarray:
    """The schedule of every worker.

    A segment is a sequence of tiles with the same rows of the table: `TILES` tiles, beginning with
    `FIRST_TILE`, `STRIDE` apart. Their table begins with row `TABLE_ROW`, and its rows wrap around
    at S. Every tile is in exactly one segment, and the workers' numbers of tiles differ by at most
    one.

    Args:
      M: rows of patches.
      S: rows after which the table repeats: the positions of an image; M for a table of its own for
        every image; 1 if there are no positions.
      tile_m: rows of a tile.
      workers: how many workers share the tiles.

    Returns:
      [workers, R, 4] int32: the fields of each segment. R is the largest number of segments of a
      worker; segments without tiles fill the rest.
    """
    tiles = -(-M // tile_m)
    phases = min(S // math.gcd(S, tile_m), max(tiles, 1))
    tile = np.arange(tiles)
    tile = tile[np.lexsort((tile // phases, tile % phases))]
    worker = np.repeat(np.arange(workers), np.diff(np.arange(workers + 1) * tiles // workers))
    starts = np.diff(worker, prepend=-1) != 0
    starts |= np.diff(tile % phases, prepend=-1) != 0
    start = np.flatnonzero(starts)
    first = tile[start]
    found = np.stack(
        [
            first,
            np.diff(start, append=tiles),
            np.full_like(first, phases),
            first * tile_m % S,
        ],
        axis=1,
    )
    owner = worker[start]
    number = np.arange(len(start)) - np.searchsorted(owner, owner)
    table = np.zeros((workers, int(number.max(initial=0)) + 1, 4), np.int32)
    table[owner, number] = found
    return table
