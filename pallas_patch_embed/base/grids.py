"""Grids of patches. Processes that decode pictures use this module, so it does not import JAX."""

import math


def largest_grid(H: int, W: int, patch: int, max_num_patches: int) -> tuple[int, int]:
    """Returns the largest grid of patches, (height, width), for an image of H x W.

    The image keeps its aspect ratio: it is scaled by the largest factor for which its sides,
    rounded up to whole patches, need no more than `max_num_patches` patches. The factor is found by
    bisection between 1e-6 and 100, to within 1e-5, as in transformers' Siglip2ImageProcessor, so
    that both choose the same grid.
    """

    def grid(factor: float) -> tuple[int, int]:
        h, w = (max(1, math.ceil(side * factor / patch)) for side in (H, W))
        return h, w

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if math.prod(grid(middle)) <= max_num_patches:
            low = middle
        else:
            high = middle
    return grid(low)
