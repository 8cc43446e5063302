"""Chooses the config of a Pallas kernel: pure functions of problem and chip.

docs/experiments has the times of other configs.
"""

import itertools
from typing import Any

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic.sm90 import MOST_SLOTS, HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.chips import Chip
from pallas_patch_embed.problem import Problem


def slice_widths(problem: Problem, widths: tuple[int, ...]) -> list[int]:
    """The widths that divide N.

    Raises:
      NotImplementedError: none of them does.
    """
    found = [n for n in widths if problem.N % n == 0]
    if not found:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")
    return found


def choose_sm90(problem: Problem, chip: Chip) -> HopperConfig:
    """The config with the smallest estimated time, with as many slots as fit.

    Raises:
      NotImplementedError: no config serves the problem.
    """

    def deepest(min_slots: int, **choices: Any) -> HopperConfig | None:
        """The config with the most slots that fits; None if none does."""
        depths = range(MOST_SLOTS, min_slots - 1, -1)
        configs = (HopperConfig(slots=slots, **choices) for slots in depths)
        return tiles.first_that_fits(problem, chip, configs)

    def candidates(tile_n: int) -> list[HopperConfig | None]:
        # With fewer than 8 slots of 8 KiB the tensor cores wait for the memory.
        if stationary := deepest(8, tile_n=tile_n):
            return [stationary]
        return [deepest(4, tile_n=tile_n, rows=rows, stream_weight=True) for rows in (64, 128)]

    def time(config: HopperConfig) -> int:
        """Estimated time of the worker with the most tiles, in products of a row and a column."""
        one_tile = config.tile_m * config.tile_n + tiles.TILE_OVERHEAD
        return config.grid(problem, chip).tiles_per_worker * one_tile

    widths = slice_widths(problem, (192, 128, 64))
    return min(filter(None, itertools.chain(*map(candidates, widths))), key=time)


def choose_sm100(problem: Problem, chip: Chip) -> BlackwellConfig:
    """The widest config with two blocks, or for a small problem the narrowest with one.

    Raises:
      NotImplementedError: no config serves the problem.
    """

    def deepest(**choices: Any) -> BlackwellConfig | None:
        """The config with the most slots that fits, of 4 to 8; None if none does."""
        configs = (BlackwellConfig(slots=slots, **choices) for slots in range(8, 3, -1))
        return tiles.first_that_fits(problem, chip, configs)

    widths = slice_widths(problem, (256, 192, 128, 64))
    # Slices of fewer than 192 columns read the patches more often than streaming in wider ones
    # reads the weight.
    stationary = [deepest(tile_n=n) for n in widths if n >= min(192, widths[0])]
    streaming = [deepest(tile_n=n, stream_weight=True) for n in widths]
    config = next(filter(None, stationary + streaming))
    grid = config.grid(problem, chip)
    if grid.tiles * grid.slices * grid.blocks >= chip.multiprocessors:
        return config
    # A small problem is spread over more multiprocessors.
    narrow = [
        deepest(tile_n=widths[-1], collective=False, stream_weight=stream)
        for stream in (False, True)
    ]
    return next(filter(None, narrow))
