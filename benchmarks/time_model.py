"""Models the time of a call in a burst; prints errors on recorded times, and predictions.

  python -m benchmarks.time_model

No GPU is needed. Grids and tiles are those that the backends choose. The time of a kernel is

  launch + start + tiles * (tile + table) + period * (fill + tiles * max(products, L2, DRAM))

`start` is the time to load a slice of the weight. `fill` counts the cycles to load the first
patches and those of the last tile's epilogue. `tile` is the fixed cost of a tile. `table` is the
time to read a tile's table again, which is needed if the tile's rows do not divide the table's
period. Terms for XLA's patchify and for the rows of images that TMA loads are added. The constants
in `COLUMNS` are fitted. All other constants come from data sheets, from the audit, or from this
file. The output is docs/predictions.md.
"""

import argparse
import contextlib
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import decisions, results
from benchmarks.audit import L2_BYTES, MULTIPLY_ADDS, image_problem
from benchmarks.offline_compile import operands
from pallas_patch_embed.backends import cuda, stored, tiles
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.tiles import ROW_BYTES
from pallas_patch_embed.base.chips import B200, B300, H200, Chip
from pallas_patch_embed.base.problem import NAMED_SHAPES, NamedShape, Problem, named_shape
from pallas_patch_embed.commands.tune import command

RECORDS = Path(__file__).with_name("h200")
FILES = ("results", "photographs", "small", "images", "image_shapes")

# The bandwidth is that of NVIDIA's data sheet for the H100 SXM.
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", bandwidth=3350 * 10**9)

# Cycles to scale, add and store 64 x 192 elements, from the trace in docs/experiments/hopper.md.
EPILOGUE, EPILOGUE_ELEMENTS = 1830, 64 * 192

CUT = "cuda, cut by the kernel"
BACKENDS = {"mosaic_sm90": "Pallas", "mosaic_sm100": "Pallas"}  # All other backends are CUDA.

# The fitted constants and their units. A period is the inverse of a clock under load.
COLUMNS = {
    "launch Pallas": "us",
    "launch CUDA": "us",
    "start": "us per 1000 cycles of loading a block's weight",
    "tile": "us",
    "table": "us per KiB of a tile's table that is read again",
    "period float8_e4m3fn": "ns",
    "period int8": "ns",
    "period bfloat16": "ns",
    "patchify launch": "us",
    "patchify": "us per MB read and written",
    "TMA rows of images": "ns per row",
}


def problem_of(shape: NamedShape, images: int, dtype: str, cut: bool = False) -> Problem:
    """Returns the problem of patches, or of images that the kernel cuts."""
    if cut:
        return image_problem(shape, images, dtype, "kernel")
    table = "per image" if shape.name.startswith("NaFlex") else "shared"
    return Problem.of(*operands(shape, images, dtype, table=table), out_dtype="bfloat16")


def cuda_config(problem: Problem, chip: Chip, name: str | None) -> cuda.CudaConfig:
    """Returns the CUDA kernel with this name, or the one that the heuristic chooses.

    The times in benchmarks/h200 were measured with an earlier heuristic, when the library had no
    kernels for few rows. So without a name this heuristic chooses a Hopper kernel.
    """
    if name is not None:
        return next(config for config in cuda.configs() if config.name == name)
    if chip.capability != (9, 0):
        return cuda.choose_config(problem, 100, chip)

    def is_early(config: cuda.CudaConfig) -> bool:
        if config.splits > 1 or config.cooperative:
            return False
        is_new = config.tile_n == 96 or (config.dtype, config.tile_n) == ("bf16", 128)
        return config.stream_weight or not is_new

    def earlier_estimate(config: cuda.CudaConfig) -> int:
        a_tile = config.tile_m * config.tile_n + tiles.TILE_OVERHEAD
        return config.grid(problem, chip).tiles_per_worker * a_tile

    found = []
    for config in cuda.configs():
        if config.capability == 90 and is_early(config):
            with contextlib.suppress(NotImplementedError):
                config.check(problem, chip)
                found.append(config)
    stationary = {config.tile_n for config in found if not config.stream_weight}
    kept = [c for c in found if not c.stream_weight or c.tile_n not in stationary]
    return min(kept, key=earlier_estimate)


def worker(problem: Problem, backend: str, chip: Chip, name: str | None = None) -> dict[str, float]:
    """Returns the cycles and the other factors of the constants, for the worker with most tiles.

    `name` is the name of a CUDA kernel, or None for the heuristic's.
    """
    hopper = chip.capability == (9, 0)
    if backend in BACKENDS:
        config: Any = (SM90 if hopper else SM100).choose_config(problem, chip)
    else:
        config = cuda_config(problem, chip, name)
    grid = config.grid(problem, chip)
    row = tiles.chunks(problem) * ROW_BYTES
    rate = MULTIPLY_ADDS["sm_90" if hopper else "sm_100"][problem.dtype]
    elements = config.tile_m * config.tile_n / grid.blocks
    products = elements * problem.K / rate
    period = problem.table_period
    own_rows = problem.has_table and period == problem.rows
    # A table with a row for every patch is also read from DRAM.
    written = 2 * config.tile_n * (1 + own_rows)
    moved = config.tile_m / grid.blocks * (row / grid.slices + written)
    dram = moved * grid.thread_blocks * chip.clock * 1e9 / chip.bandwidth
    columns = config.tile_n / grid.blocks
    streamed = columns * config.stream_weight
    loads = (config.tile_m / grid.blocks + streamed) * row / L2_BYTES
    ends = loads / 4 + EPILOGUE * min(1, elements / 2 / EPILOGUE_ELEMENTS)
    count = grid.tiles_per_worker
    # The table's rows stay in registers if all tiles of the worker need the same ones.
    again = problem.has_table and count > 1 and (own_rows or period % config.tile_m)
    return {
        "cycles": ends + count * max(products, loads, dram),
        "start": (columns - streamed) * row / L2_BYTES / 1e3,
        "tile": count,
        "table": 2 * elements / 1024 * count * bool(again),
        "rows": count * (config.tile_m * row // 96 if problem.cut == "kernel" else 0) / 1e3,
    }


def terms(
    shape: NamedShape,
    images: int,
    dtype: str,
    backend: str,
    source: str,
    chip: Chip,
    name: str | None = None,
) -> list[float]:
    """Returns the factors of the constants in `COLUMNS`; the sum of products is in microseconds."""
    cut = backend == CUT
    problem = problem_of(shape, images, dtype, cut)
    of = worker(problem, backend, chip, name)
    copied = source == "images" and not cut
    size = 3 * shape.image**2 + shape.S * tiles.chunks(problem) * ROW_BYTES
    found = {
        f"launch {BACKENDS.get(backend, 'CUDA')}": 1,
        f"period {dtype}": of["cycles"] / 1e3,
        "start": of["start"],
        "tile": of["tile"],
        "table": of["table"],
        "patchify launch": float(copied),
        "patchify": copied * images * size / 1e6,
        "TMA rows of images": of["rows"],
    }
    return [found.get(column, 0.0) for column in COLUMNS]


def records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """Reads the recorded bursts on an H200 to which the constants are fitted."""
    every = [r for name in FILES for r in results.read(folder / f"{name}.jsonl")]
    names = ("mosaic_sm90", "cuda", "patchify + cuda", CUT)
    found = [
        r
        for r in every
        if r["kind"] == "time" and r["contender"] in names and r["regime"] == "burst"
    ]
    for r in results.read(folder / "two_trees.jsonl"):
        # For images, two_trees.jsonl does not record whether the kernel cuts them.
        if r["kind"] == "two trees" and r["regime"] == "burst" and r["what"] == "patches":
            if r["backend"] in names:
                times = {"contender": r["backend"], "milliseconds": r["medians"]["after"]}
                found.append(r | times | {"source": "patches"})
    return found + other_shapes()


def tuned_records(chip: Chip) -> list[dict[str, Any]]:
    """Returns records of the heuristics' configs in the package's file for a chip."""
    found = []
    tuned = stored.read(decisions.results_of(chip)).results
    names = [shape.name for shape in NAMED_SHAPES]
    every = itertools.product(names, command.IMAGES, tiles.DTYPES, command.SOURCES)
    for shape, images, dtype, source in every:
        own = dict(shape=shape, images=images, dtype=dtype, source=source)
        for _, task in command.list_tasks(
            shapes=[shape],
            images=[images],
            dtypes=[dtype],
            sources=[source],
            backends=["mosaic_sm90", "cuda"],
        ):
            if result := tuned.get(task.key):
                name = CUT if source == "images" else task.backend
                config, heuristic = next(iter(result.times.items()))
                kernel = dict(kernel=config) if task.backend == "cuda" else {}
                found.append(own | dict(contender=name, **heuristic["burst"], **kernel))
    return found


def terms_of(record: dict[str, Any], chip: Chip = H200) -> list[float]:
    """Returns the terms of a record."""
    fields = (record[name] for name in ("images", "dtype", "contender", "source"))
    return terms(named_shape(record["shape"]), *fields, chip, record.get("kernel"))


def fit(matrix: np.ndarray, microseconds: np.ndarray) -> np.ndarray:
    """Fits the constants with the least relative squared error."""
    return np.linalg.lstsq(matrix / microseconds[:, None], np.ones(len(matrix)), rcond=None)[0]


def errors(found: list[dict[str, Any]], left_out: bool = False) -> list[float]:
    """Returns predicted time / measured time - 1 for each record.

    With `left_out`, the constants for a shape are fitted to the records of all other shapes.
    """
    matrix = np.array([terms_of(r) for r in found])
    measured = np.array([1e3 * r["milliseconds"] for r in found])
    shapes = np.array([r["shape"] for r in found])
    answers = np.empty(len(found))
    for shape in set(shapes):
        own = shapes == shape
        used = ~own if left_out else np.full(len(found), True)
        answers[own] = matrix[own] @ fit(matrix[used], measured[used]) / measured[own] - 1
    return answers.tolist()


def other_shapes() -> list[dict[str, Any]]:
    """Reads the records of Pallas' kernel in docs/experiments/hopper.md."""
    text = (RECORDS.parents[1] / "docs/experiments/hopper.md").read_text()
    lines = re.split("^## ", text, flags=re.M)
    lines = next(x for x in lines if x.startswith("Other shapes")).splitlines()
    found: list[dict[str, Any]] = []
    shape = ""
    fields = dict(contender="mosaic_sm90", source="patches", pixels="random")
    for cells in ([x.strip() for x in line.split("|")[1:-1]] for line in lines if "|" in line):
        dtype = {"float8": "float8_e4m3fn"}.get(cells[1], cells[1])
        if dtype not in tiles.DTYPES:
            continue
        shape = cells[0] or shape
        for images, cell in zip((1, 64, 512), cells[2:]):
            if "/" in cell:
                own = dict(shape=shape, dtype=dtype, images=images)
                found.append(fields | own | {"milliseconds": float(cell.split("/")[0]) / 1e3})
    return found


def floor(shape: NamedShape, images: int, dtype: str, chip: Chip) -> float:
    """Returns the lower bound in microseconds from a Blackwell chip's bandwidth and peak rate."""
    problem = problem_of(shape, images, dtype)
    rows, row = problem.rows, tiles.chunks(problem) * ROW_BYTES
    table = rows if shape.name.startswith("NaFlex") else shape.S
    moved = rows * (row + 2 * shape.N) + shape.N * row + 2 * table * shape.N
    peak = MULTIPLY_ADDS["sm_100"][dtype] * chip.multiprocessors * chip.clock * 1e9
    return 1e6 * max(moved / chip.bandwidth, rows * problem.K * shape.N / peak)


def number(microseconds: float) -> str:
    """Formats microseconds with three digits."""
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def row_of(*cells: Any) -> str:
    """Formats a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def summary(name: str, *columns: list[float]) -> str:
    """Summarises errors in a row of a table."""
    cells: list[Any] = [name, len(columns[0])]
    for size in map(np.abs, columns):
        mean, largest = 100 * np.mean(size), 100 * np.max(size)
        cells += [f"{mean:.1f}%", f"{largest:.1f}%", int(np.sum(size > 0.1))]
    return row_of(*cells)


def head(*cells: str) -> list[str]:
    """Formats the first two lines of a Markdown table."""
    return [row_of(*cells), row_of(*["---"] * len(cells))]


def page() -> str:
    """Returns the text of docs/predictions.md."""
    found = records()
    matrix = np.array([terms_of(r) for r in found])
    constants = fit(matrix, np.array([1e3 * r["milliseconds"] for r in found]))
    lines = [INTRODUCTION, *head("constant", "value", "unit")]
    lines += [row_of(n, f"{v:.4f}", u) for (n, u), v in zip(COLUMNS.items(), constants)]
    own, outside = errors(found), errors(found, True)
    lines += ["", "## Errors on an H200", "", ERRORS, ""]
    three = ("mean", "largest", "over 10%")
    lines += head("shape", "times", *three, *(f"left out: {name}" for name in three))
    for shape in sorted({r["shape"] for r in found}):
        at = [i for i, r in enumerate(found) if r["shape"] == shape]
        lines.append(summary(shape, [own[i] for i in at], [outside[i] for i in at]))
    lines.append(summary("all", own, outside))
    names = ("shape", "contender", "source", "dtype", "pixels", "images")
    lines += ["", *head(*names, "us", "error", "left out")]
    for r, e, o in zip(found, own, outside):
        time = number(1e3 * r["milliseconds"])
        lines.append(row_of(*(r[n] for n in names), time, f"{100 * e:+.1f}%", f"{100 * o:+.1f}%"))
    lines += ["", TUNED, "", *head("GPU", "shape", "times", *three)]
    for chip in (H100, H200):
        name = chip.name.split()[1]
        tuned = tuned_records(chip)
        predicted = np.array([terms_of(r, chip) for r in tuned]) @ constants
        off = predicted / [1e3 * r["milliseconds"] for r in tuned] - 1
        for shape in dict.fromkeys(r["shape"] for r in tuned):
            of_shape = [e for r, e in zip(tuned, off) if r["shape"] == shape]
            lines.append(summary(f"{name} | {shape}", of_shape))
        lines.append(summary(f"{name} | all", off.tolist()))
    counts = (1, 8, 64, 512, 4736)
    lines += ["", "## H200, images cut by the kernel, int8: predicted, us", "", CUTTING, ""]
    lines += head("shape", *map(str, counts))
    for shape in NAMED_SHAPES:
        if shape.name.startswith("NaFlex"):
            continue  # NaFlex takes patches.
        try:
            times = [terms(shape, n, "int8", CUT, "images", H200) for n in counts]
        except (NotImplementedError, ValueError):
            continue
        lines.append(
            row_of(shape.name, *(number(float(t @ constants)) for t in map(np.array, times)))
        )
    counts = (1, 64, 1024, 4736)
    lines += ["", BLACKWELL, "", *head("shape", "chip", "dtype", "backend", *map(str, counts))]
    fast = constants.copy()
    for i, name in enumerate(COLUMNS):
        if name.startswith("period"):
            fast[i] = 1 / B200.clock
        elif name == "tile":
            fast[i] = 0
    for shape in NAMED_SHAPES:
        for chip in (B200, B300):
            for dtype in (d for d in tiles.DTYPES if d in chip.tensor_dtypes):
                for backend in ("mosaic_sm100", "cuda"):
                    cells = [cell(shape, n, dtype, backend, chip, fast, constants) for n in counts]
                    label = BACKENDS.get(backend, "CUDA")
                    lines.append(row_of(shape.name, chip.name[7:], dtype, label, *cells))
    return "\n".join(lines) + "\n"


def cell(
    shape: NamedShape,
    images: int,
    dtype: str,
    backend: str,
    chip: Chip,
    fast: np.ndarray,
    slow: np.ndarray,
) -> str:
    """Formats two predictions and the floor; a dash if the backend refuses the problem."""
    try:
        own = np.array(terms(shape, images, dtype, backend, "patches", chip))
    except NotImplementedError:
        return "-"
    least = number(floor(shape, images, dtype, chip))
    return f"{number(own @ fast)} to {number(own @ slow)} ({least})"


INTRODUCTION = """\
# Predictions

These are predictions, not measurements. `python -m benchmarks.time_model` prints this page, and its
docstring explains the formula. The constants are fitted to bursts of the Pallas and CUDA kernels in
`benchmarks/h200` (the files in `FILES` and two_trees.jsonl), and to the Pallas kernel's times for
other shapes in [the experiments](experiments/hopper.md).
"""

ERRORS = """\
The aim is an error of at most 10%. In the columns "left out" each shape is predicted with constants
that were fitted without it. An earlier model was fitted only to B/16 224. Its error on the 36 times
of other shapes in the experiments was 18.4% on average. After its term for streamed weights was
changed to reduce these errors, it was 11.1% on average and at most 34.1%, and 15 of the times were
off by more than 10%. The terms of the current model were also chosen to reduce the errors on these
times. So "left out" measures the error of the constants, not the error of the choice of terms:
expect larger errors for a shape that is not listed.

Known limits: So400m/14 384 is predicted too fast, although the model has a term for the reload of
its table. Predictions for a single image are off by up to 17% in this table, or 27% with its shape
left out. NaFlex's tables, with a row for every patch, are not part of the fit. The model does not
cover sustained runs, which are limited by power, nor cold calls or single calls. Of
`two_trees.jsonl` only the later version's calls with patches are used. Shapes without a name, such
as B/16 240, are not predicted."""

TUNED = """\
## Errors on the times that tune measured

The table compares predictions with the times that [tune](tune.md) measured for the heuristics'
configs, which are not part of the fit. The operands were not in the L2 cache, except for the
weight. For the H100 the model has the H200's constants, and the memory bandwidth in the H100's data
sheet, 3.35 TB/s. The model treats cooperative warpgroups as ping-pong, and has no term for the
exchange of blocks that split K."""

CUTTING = """\
By default the kernel now cuts int8 images also for odd grids. On an H200, images of 240 pixels take
1.269 ms for 4736 images and 0.0246 ms for 64 (measured, B/16), and images of 336 pixels take 0.270
ms for 512 images. These times are not part of the fit."""

BLACKWELL = """\
## B200 and B300, from patches: predicted, us

The lower bound from the data sheet is in brackets. A B300 has no int8 tensor cores. The clock and
the fixed costs are unknown. The first number assumes the boost clock of 1.965 GHz, and that the
fixed cost of a tile is hidden because results wait in tensor memory. The second number uses all
constants of an H200. Both numbers use the launch, start and epilogue of an H200, and its 64 bytes
per cycle from L2. The error on these chips is unknown; expect at least the error on an H200. The
two chips are equal in all numbers that are used here."""


def main() -> None:
    """Prints the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(page(), end="")


if __name__ == "__main__":
    main()
