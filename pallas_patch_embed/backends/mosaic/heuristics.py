"""Chooses the config of a Pallas kernel, and lists the configs that are worth measuring.

All functions are pure functions of problem and chip. docs/experiments has the times of the configs
that were not chosen.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic.sm90 import MOST_SLOTS, HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base.chips import Chip
from pallas_patch_embed.base.problem import NO_EPILOGUE, Problem


def slice_widths(problem: Problem, widths: tuple[int, ...]) -> list[int]:
    """Returns the widths that divide the N of each result.

    Raises:
      NotImplementedError: no width divides it.
    """
    found = [n for n in widths if problem.columns % n == 0]
    if not found:
        raise NotImplementedError(f"N is {problem.columns}, expected a multiple of 64.")
    return found


def _deepest(kind: Any, depths: Iterable[int], problem: Problem, chip: Chip, **choices: Any) -> Any:
    """Returns the config with the first number of slots that fits; None if no number fits."""
    configs = (kind(slots=slots, **choices) for slots in depths)
    return tiles.first_that_fits(problem, chip, configs)


# Numbers of slots by their rows, in the order in which they are tried. With fewer than 8 slots of
# 8 KiB, or 5 of 16, the tensor cores of Hopper wait for memory.
HOPPER_SLOTS = {64: range(MOST_SLOTS, 7, -1), 128: range(MOST_SLOTS, 4, -1)}
EVERY_HOPPER_SLOTS = range(MOST_SLOTS, 3, -1)
BLACKWELL_SLOTS = range(8, 3, -1)

# By the audit, the latency of loads limits Blackwell's ring if it has fewer slots
# (docs/experiments/blackwell.md, "Slots"). Beside a stationary weight a staging buffer then makes
# room for more of them.
ENOUGH_SLOTS = 6

# The time to load a row of a chunk, in units of the time to multiply a row by a column. With a
# streamed weight, 64 rows of 192 columns take 1.6 times the time of their products, and 128 rows
# that of the products: So400m's layers of N = K = 1152 took 1.58 times as long with 64 rows as with
# 128 in int8, and 1.70 times in bfloat16 (docs/experiments/encoder.md).
LOADING = 1.6 * 64 * 192 / (64 + 192)

# The tensor cores multiply 64 rows by 64 columns of a chunk in 128 cycles.
CYCLES = 128 / (64 * 64)

# Cycles that storing an element of a tile takes, and those that an activation and a residual add.
# They were fitted to the times on an H200 of benchmarks/h200/dense_configs.jsonl.
STORING, ACTIVATING, ADDING = 0.02, 0.5, 0.5

# The largest number of tiles of a worker with one consumer, which cannot multiply while it stores.
# Workers with more tiles were not measured.
MOST_TILES_OF_ONE = 3


def choose_sm90(problem: Problem, chip: Chip) -> HopperConfig:
    """Chooses the config with the smallest estimated time, with as many slots as fit.

    Raises:
      NotImplementedError: no config serves the problem.
    """
    epilogue = problem.epilogue
    cycles = STORING + ACTIVATING * bool(epilogue.activation) + ADDING * epilogue.residual
    storing = cycles / (CYCLES * tiles.chunks(problem))

    def time(config: HopperConfig) -> float:
        """Estimates the time of the worker with the most tiles.

        The unit is the time to multiply one row by one column. Consumers multiply in turn, and
        store while the others multiply; the last tile's epilogue follows its products. A weight
        that stays is loaded before the first products.
        """
        loaded = config.rows + config.tile_n * config.stream_weight
        one_part = max(config.rows * config.tile_n, LOADING * loaded) + tiles.TILE_OVERHEAD / 2
        products, stores = config.consumers * one_part, storing * config.rows * config.tile_n
        others = config.tiling(problem, chip).tiles_per_worker - 1
        first = 0 if config.stream_weight else LOADING * config.tile_n
        return first + others * max(products, one_part + stores) + products + stores

    return min(_sm90(problem, chip, every=False), key=time)


def list_sm90(problem: Problem, chip: Chip) -> list[HopperConfig]:
    """Returns the configs that are worth measuring.

    Among them are those that the heuristic compares. For each width one streams the weight.
    """
    return _sm90(problem, chip, every=True)


def _sm90(problem: Problem, chip: Chip, *, every: bool) -> list[HopperConfig]:
    """Returns configs of each width, with the largest number of slots that fits.

    The patch embedding has two consumers. For a dense layer there are also configs with one, if
    workers have few tiles, and with three, if an activation or a residual makes the epilogue long.
    A weight that fits in shared memory stays there; for one consumer there is also a config that
    streams it, and with `every` for each number of consumers.
    """
    is_layer, found = problem.epilogue != NO_EPILOGUE, []
    consumers = [2, 1] if is_layer else [2]
    if problem.epilogue.activation or problem.epilogue.residual:
        consumers.append(3)
    for tile_n, number in itertools.product(slice_widths(problem, (192, 128, 64)), consumers):
        choices: dict[str, Any] = dict(tile_n=tile_n, consumers=number)
        deepest: Callable[..., HopperConfig | None] = functools.partial(
            _deepest, HopperConfig, problem=problem, chip=chip, **choices
        )
        stay = [deepest(HOPPER_SLOTS[n], rows=n) for n in ((64, 128) if number == 1 else (64,))]
        found += stay
        if every or number == 1 or not stay[0]:
            streamed = (128,) if stay[0] and number > 1 else (64, 128)
            found += [deepest(EVERY_HOPPER_SLOTS, rows=n, stream_weight=True) for n in streamed]
    return [
        config
        for config in filter(None, found)
        if config.consumers > 1
        or config.tiling(problem, chip).tiles_per_worker <= MOST_TILES_OF_ONE
    ]


def choose_sm100(problem: Problem, chip: Chip) -> BlackwellConfig:
    """Chooses the widest config with two blocks; for a small problem the narrowest with one block.

    Raises:
      NotImplementedError: no config serves the problem.
    """
    deepest = functools.partial(
        _deepest, BlackwellConfig, BLACKWELL_SLOTS, problem=problem, chip=chip
    )
    widths = slice_widths(problem, (256, 192, 128, 64))
    # A streamed weight in a wide slice is preferred to a stationary weight in a slice of fewer than
    # 192 columns, because narrow slices read the patches so often that they read more in total.
    wide = (n for n in widths if n >= min(192, widths[0]))
    stationary = [next(iter(_stationary(problem, chip, n)), None) for n in wide]
    streaming = [deepest(tile_n=n, stream_weight=True) for n in widths]
    config: BlackwellConfig = next(filter(None, stationary + streaming))
    tiling = config.tiling(problem, chip)
    if tiling.tiles * tiling.slices * tiling.blocks >= chip.multiprocessors:
        return config
    # A small problem is spread over more multiprocessors.
    narrow = [
        deepest(tile_n=widths[-1], collective=False, stream_weight=stream)
        for stream in (False, True)
    ]
    return next(filter(None, narrow))


def _stationary(problem: Problem, chip: Chip, tile_n: int) -> list[BlackwellConfig]:
    """Returns the configs with a stationary weight, two blocks and one or two staging buffers.

    The preferred one is the first.
    """
    one, two = (
        _deepest(BlackwellConfig, BLACKWELL_SLOTS, problem, chip, tile_n=tile_n, buffers=buffers)
        for buffers in (1, 2)
    )
    if two and two.slots >= ENOUGH_SLOTS:
        return [two]
    found = [one] if one and one.slots >= ENOUGH_SLOTS else []
    return [*found, two] if two else found


def list_sm100(problem: Problem, chip: Chip) -> list[BlackwellConfig]:
    """Returns configs with a stationary weight, one with a streamed weight, and one with one block.

    All but the last have two blocks. If the weight is stationary and two staging buffers leave few
    slots, there is one config with two buffers and one with one buffer and more slots. Only the
    widest slice streams the weight: a narrower slice would read the weight as often and the patches
    more often.
    """
    deepest = functools.partial(
        _deepest, BlackwellConfig, BLACKWELL_SLOTS, problem=problem, chip=chip
    )
    *wide, narrow = slice_widths(problem, (256, 192, 128, 64))
    stationary = [_stationary(problem, chip, n) for n in wide]
    streaming = [deepest(tile_n=n, stream_weight=True) for n, c in zip(wide, stationary) if not c]
    one_block = functools.partial(deepest, tile_n=narrow, collective=False)
    one = one_block() or one_block(stream_weight=True)
    return list(filter(None, (*itertools.chain(*stationary), *streaming[:1], one)))
