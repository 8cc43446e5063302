"""The schedule that every kernel reads: which row tiles each worker computes, and in which order.

The M rows of patches are cut into tiles of `tile_m` rows. Tile t needs `tile_m` rows of the table,
starting at row (t * tile_m) mod S, which is called the tile's phase. There are
P = S / gcd(S, tile_m) phases, and the tiles t, t + P, t + 2P, ... have the same phase. The tiles
are sorted by phase, and each worker gets a contiguous share of them. A share has few phases, so a
worker rarely loads new rows of the table.
"""

import math

import numpy as np

# Indices of the fields of a segment.
FIRST_TILE, TILES, STRIDE, TABLE_ROW = range(4)


def segments(M: int, S: int, tile_m: int, workers: int) -> np.ndarray:
    """Computes the segments of every worker.

    A segment is a sequence of tiles that need the same rows of the table: `TILES` tiles, starting
    at `FIRST_TILE`, `STRIDE` apart. The rows of the table start at `TABLE_ROW` and wrap around at
    S. Every tile is in exactly one segment, and the numbers of tiles of two workers differ by at
    most 1.

    Args:
      M: rows of patches.
      S: rows after which the table repeats: the positions of an image; M if every image has a table
        of its own; 1 if there are no positions.
      tile_m: rows of a tile.
      workers: number of workers.

    Returns:
      [workers, R, 4] int32: the fields of each segment. R is the largest number of segments of a
      worker; a worker with fewer segments has segments without tiles at the end.
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
    padded = np.zeros((workers, int(number.max(initial=0)) + 1, 4), np.int32)
    padded[owner, number] = found
    return padded
