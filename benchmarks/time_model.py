"""A model of the time of a call in a burst, its error on recorded times, and predictions.

  python -m benchmarks.time_model

No GPU is needed. Grids and tiles are those that the backends choose. A worker's cycles are

  fill + tiles * max(products, DRAM) + epilogue

where fill loads the first tile's operands through L2 and the epilogue of the last tile is not
hidden. The time is a launch plus the cycles at a clock of each dtype; XLA's patchify, and the rows
of images that TMA loads, are added. The fitted constants are those in `COLUMNS`; all others are of
data sheets, of the audit, or named below.
The output is docs/predictions.md.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.audit import CHIP_OF, L2_BYTES, MULTIPLY_ADDS, image_problem
from benchmarks.offline_compile import operands
from pallas_patch_embed.backends import cuda, tiles
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.tiles import ROW_BYTES
from pallas_patch_embed.chips import B200, H200, Chip
from pallas_patch_embed.problem import NAMED_SHAPES, NamedShape, Problem, named_shape

RECORDS = Path(__file__).with_name("h200")
FILES = ("results", "photographs", "small", "images")

# Cycles to scale, add and store 64 x 192 elements: the trace in docs/experiments/hopper.md.
EPILOGUE, EPILOGUE_ELEMENTS = 1830, 64 * 192

CUT = "cuda, cut by the kernel"

# The fitted constants and their units. A period is the inverse of a clock under load.
COLUMNS = {
    "launch": "us",
    "period float8_e4m3fn": "ns",
    "period int8": "ns",
    "period bfloat16": "ns",
    "patchify launch": "us",
    "patchify": "us a MB read and written",
    "TMA rows of images": "ns a row",
}


def problem_of(shape: NamedShape, images: int, dtype: str, cut: bool = False) -> Problem:
    """The problem of patches, or of images that the kernel cuts."""
    if cut:
        return image_problem(shape, images, dtype, "kernel")
    table = "per image" if shape.name.startswith("NaFlex") else "shared"
    return Problem.of(*operands(shape, images, dtype, table=table), out_dtype="bfloat16")


def worker(problem: Problem, backend: str, chip: Chip) -> tuple[float, int]:
    """Cycles of the worker with the most tiles, and the rows of images that TMA loads for it."""
    hopper = chip.capability == (9, 0)
    if backend.startswith("cuda"):
        config: Any = cuda.choose_config(problem, 90 if hopper else 100, chip)
    else:
        config = (SM90 if hopper else SM100).choose_config(problem, chip)
    grid = config.grid(problem, chip)
    row = tiles.chunks(problem) * ROW_BYTES
    rate = MULTIPLY_ADDS["sm_90" if hopper else "sm_100"][problem.dtype]
    elements = config.tile_m * config.tile_n / grid.blocks
    products = elements * problem.K / rate
    moved = config.tile_m / grid.blocks * (row / grid.slices + 2 * config.tile_n)
    dram = moved * grid.thread_blocks * chip.clock * 1e9 / chip.bandwidth
    # A streamed weight's first products wait for one chunk alone.
    first = ROW_BYTES if config.stream_weight else row
    filled = (config.tile_m + config.tile_n) * first / grid.blocks
    lines = config.tile_m * row // 96 if problem.cut == "kernel" else 0
    ends = filled / L2_BYTES + EPILOGUE * min(1, elements / 2 / EPILOGUE_ELEMENTS)
    count = grid.tiles_per_worker
    return ends + count * max(products, dram), count * lines


def terms(
    shape: NamedShape, images: int, dtype: str, backend: str, source: str, chip: Chip
) -> list[float]:
    """What the constants of `COLUMNS` are multiplied with; the sum is in microseconds."""
    cut = backend == CUT
    problem = problem_of(shape, images, dtype, cut)
    cycles, rows = worker(problem, backend, chip)
    clocks = [cycles / 1e3 if column == f"period {dtype}" else 0 for column in COLUMNS]
    copied = source == "images" and not cut
    size = 3 * shape.image**2 + shape.S * tiles.chunks(problem) * ROW_BYTES
    found = clocks[:]
    found[0] = 1
    found[4], found[5] = float(copied), copied * images * size / 1e6
    found[6] = rows / 1e3
    return found


def records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """The recorded bursts of the kernels of Pallas and CUDA."""
    every = [r for name in FILES for r in results.read(folder / f"{name}.jsonl")]
    names = ("mosaic_sm90", "cuda", CUT)
    return [
        r
        for r in every
        if r["kind"] == "time" and r["contender"] in names and r["regime"] == "burst"
    ]


def terms_of(record: dict[str, Any]) -> list[float]:
    """The terms of a record."""
    fields = (record[name] for name in ("images", "dtype", "contender", "source"))
    return terms(named_shape(record["shape"]), *fields, H200)


def fit(matrix: np.ndarray, microseconds: np.ndarray) -> np.ndarray:
    """The constants with the least relative squared error."""
    return np.linalg.lstsq(matrix / microseconds[:, None], np.ones(len(matrix)), rcond=None)[0]


def errors(found: list[dict[str, Any]], left_out: bool = False) -> list[float]:
    """Predicted over measured time, minus one, of each record.

    With `left_out` the constants are fitted to the records of all other numbers of images.
    """
    matrix = np.array([terms_of(r) for r in found])
    measured = np.array([1e3 * r["milliseconds"] for r in found])
    counts = np.array([r["images"] for r in found])
    answers = np.empty(len(found))
    for count in set(counts):
        own = counts == count
        used = ~own if left_out else np.full(len(found), True)
        answers[own] = matrix[own] @ fit(matrix[used], measured[used]) / measured[own] - 1
    return answers.tolist()


def other_shapes() -> list[tuple[str, str, int, float]]:
    """Shape, dtype, images, microseconds of Pallas' kernel in docs/experiments/hopper.md."""
    text = (RECORDS.parents[1] / "docs/experiments/hopper.md").read_text()
    lines = re.split("^## ", text, flags=re.M)
    lines = next(x for x in lines if x.startswith("Other shapes")).splitlines()
    found, shape = [], ""
    for cells in ([x.strip() for x in line.split("|")[1:-1]] for line in lines if "|" in line):
        dtype = {"float8": "float8_e4m3fn"}.get(cells[1], cells[1])
        if dtype not in tiles.DTYPES:
            continue
        shape = cells[0] or shape
        for images, cell in zip((1, 64, 512), cells[2:]):
            if "/" in cell:
                found.append((shape, dtype, images, float(cell.split("/")[0])))
    return found


def floor(shape: NamedShape, images: int, dtype: str, chip: Chip) -> float:
    """Microseconds for bytes at the data sheet's bandwidth, or products at its peak rate."""
    problem = problem_of(shape, images, dtype)
    rows, row = problem.rows, tiles.chunks(problem) * ROW_BYTES
    table = rows if shape.name.startswith("NaFlex") else shape.S
    moved = rows * (row + 2 * shape.N) + shape.N * row + 2 * table * shape.N
    rates = next(MULTIPLY_ADDS[a] for a, like in CHIP_OF.items() if like == chip)
    peak = rates[dtype] * chip.multiprocessors * chip.clock * 1e9
    return 1e6 * max(moved / chip.bandwidth, rows * problem.K * shape.N / peak)


def number(microseconds: float) -> str:
    """Microseconds in three digits."""
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def row_of(*cells: Any) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def summary(name: str, found: list[float]) -> str:
    """A line about errors."""
    size = np.abs(found)
    return row_of(
        name,
        len(found),
        f"{100 * np.mean(size):.1f}%",
        f"{100 * np.max(size):.1f}%",
        int(np.sum(size > 0.1)),
    )


def head(*cells: str) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [row_of(*cells), row_of(*["---"] * len(cells))]


def page() -> str:
    """docs/predictions.md."""
    found = records()
    matrix = np.array([terms_of(r) for r in found])
    constants = fit(matrix, np.array([1e3 * r["milliseconds"] for r in found]))
    lines = [INTRODUCTION, *head("constant", "value", "unit")]
    lines += [row_of(n, f"{v:.4f}", u) for (n, u), v in zip(COLUMNS.items(), constants)]
    own = errors(found)
    others = other_shapes()
    outside = [
        float(np.dot(terms(named_shape(s), n, d, "mosaic_sm90", "patches", H200), constants) / t)
        - 1
        for s, d, n, t in others
    ]
    lines += ["", "## Errors on an H200", ""]
    lines += head("times", "number", "mean", "largest", "over 10%")
    lines += [
        summary("fitted: benchmarks/h200", own),
        summary("each number of images left out of the fit", errors(found, True)),
        summary("shapes of hopper.md, never fitted", outside),
    ]
    lines += ["", ERRORS, "", *head("never fitted, Pallas", "dtype", "images", "us", "error")]
    lines += [
        row_of(s, d, n, number(t), f"{100 * e:+.1f}%") for (s, d, n, t), e in zip(others, outside)
    ]
    lines += ["", *head("B/16 224", "from", "dtype", "pixels", "images", "us", "error")]
    for r, e in zip(found, own):
        fields = [r[name] for name in ("contender", "source", "dtype", "pixels", "images")]
        lines.append(row_of(*fields, number(1e3 * r["milliseconds"]), f"{100 * e:+.1f}%"))
    counts = (1, 8, 64, 512, 4736)
    lines += ["", "## H200, images cut by the kernel, int8: predicted, us", ""]
    lines += head("shape", *map(str, counts))
    for shape in NAMED_SHAPES:
        if shape.name.startswith("NaFlex"):
            continue  # It takes patches.
        try:
            times = [terms(shape, n, "int8", CUT, "images", H200) for n in counts]
        except (NotImplementedError, ValueError):
            continue
        lines.append(
            row_of(shape.name, *(number(float(t @ constants)) for t in map(np.array, times)))
        )
    counts = (1, 64, 1024, 4736)
    lines += ["", BLACKWELL, "", *head("shape", "dtype", *map(str, counts))]
    periods = [i for i, name in enumerate(COLUMNS) if name.startswith("period")]
    fast = constants.copy()
    fast[periods] = 1 / B200.clock
    for shape in NAMED_SHAPES:
        for dtype in tiles.DTYPES:
            cells = []
            for n in counts:
                own_terms = np.array(terms(shape, n, dtype, "mosaic_sm100", "patches", B200))
                low, high = own_terms @ fast, own_terms @ constants
                least = number(floor(shape, n, dtype, B200))
                cells.append(f"{number(low)} to {number(high)} ({least})")
            lines.append(row_of(shape.name, dtype, *cells))
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# Predictions

These are predictions, not results. `python -m benchmarks.time_model` prints this page, and its
docstring has the formula. The constants are fitted to the bursts of the Pallas and CUDA kernels in
`benchmarks/h200`. All of those are of one shape, B/16 at 224.
"""

ERRORS = """\
The aim is 10%. A single image is off by more, because one constant stands for the launch of both
backends, and a block's start is not modelled. S = 729 (So400m/14 384) reads its table again for
every tile, which is not modelled either. The term of streamed weights, which B/32 needs, was
changed once after a look at its errors. All bfloat16 records have 4736 images: left out, nothing
is known of its clock, and the error is 100%. Sustained times, which power limits, are not
modelled. The CUDA kernels' times for other shapes are not in the records."""

BLACKWELL = """\
## B200 and B300, from patches with the Pallas kernel: predicted, us

In brackets is the floor by the data sheet. A B300 has the same numbers, without int8. The clock
under load is not known: the first number assumes the boost clock of 1.965 GHz, the second one that
of an H200 under the same load, which also takes bandwidth down to about 6 TB/s. Launch, epilogue
and 64 bytes a cycle from L2 are assumed to be as on an H200. No error is known for this chip; that
of the H200 is the least to expect."""


def main() -> None:
    """Prints the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(page(), end="")


if __name__ == "__main__":
    main()
