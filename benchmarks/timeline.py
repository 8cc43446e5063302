"""Shows what the warps of a kernel do and how long it takes, from a trace that the kernel writes.

  python -m benchmarks.timeline [--backend cuda] [--shape "B/16 224"] [--images 4736] [--dtype int8]
      [--out FILE]

Prints the cycles of each role's spans (mean, 95th percentile, mean of each warp) and draws the
spans of one thread block. Reading the clock takes time, and a traced Pallas kernel has fewer slots,
because the trace needs shared memory. So the timeline shows which warps wait for which, not how
fast the kernel is. The CUDA kernels are compiled with PATCH_EMBED_TIMELINE by this machine's nvcc.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks import contenders, cuda_launch
from pallas_patch_embed.backends import cuda, ranked, tiles
from pallas_patch_embed.backends.mosaic import SM90, SM100, MosaicBackend
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import NAMED_SHAPES, Problem, named_shape
from pallas_patch_embed.commands.tune import timing

# Number of warps in a thread block of these kernels.
WARPS = 12

# Names of the spans that end with a stamp of a CUDA kernel, by the stamp's number minus 1 (Event in
# ffi/timeline.cuh). A span is the duration of an action or of a wait; the last one is a whole tile.
EVENTS = (
    "wait: free slot",
    "issue loads",
    "wait: may multiply",
    "wait: loads",
    "issue products",
    "wait: products",
    "epilogue load",
    "epilogue convert",
    "epilogue store",
    "tile",
)
EVENT_BITS = 4

# Number of cycles that are drawn, from the first span of a block.
DRAWN = 40_000


@dataclasses.dataclass(frozen=True)
class Span:
    """One span of a warp: its action, begin and end, in cycles of the warp's multiprocessor.

    `tile` is the number of the tile among those of its worker, if the trace records it.
    """

    block: int
    warp: int
    role: str
    begin: float
    end: float
    tile: int | None = None

    @property
    def cycles(self) -> float:
        """Returns the duration in cycles."""
        return self.end - self.begin


def read(trace: Path) -> list[Span]:
    """Reads the spans of a trace of Mosaic's profiler, in the order in which they end.

    The trace gives times in thousandths of a cycle, offset by the global time in nanoseconds at
    which the block began.
    """
    spans, opened = [], collections.defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        block, warp = divmod(event["tid"] - 1, WARPS)
        if event["ph"] == "B":
            opened[block, warp].append(event)
        else:
            begin = opened[block, warp].pop()
            spans.append(Span(block, warp, begin["name"], 1e3 * begin["ts"], 1e3 * event["ts"]))
    return spans


def read_stamps(stamps: np.ndarray) -> list[Span]:
    """Returns the spans between the stamps [blocks, warps, stamps] uint32 of a CUDA kernel.

    A stamp has only the clock's low bits, so no span may be longer than 2^28 cycles. A span called
    "tile" encloses the spans of a tile.
    """
    spans = []
    for block, warp in np.ndindex(stamps.shape[:2]):
        row = stamps[block, warp]
        row = row[row != 0]
        steps = np.diff(row >> EVENT_BITS) % (1 << 32 - EVENT_BITS)
        if not len(steps):
            continue
        times = int(row[0] >> EVENT_BITS) + np.concatenate([[0], np.cumsum(steps)])
        events = row[1:] & (1 << EVENT_BITS) - 1
        tile, tile_begin = 0, times[0]
        for event, begin, end in zip(events, times, times[1:]):
            role = EVENTS[event - 1]
            if role == "tile":
                begin, tile_begin = tile_begin, end
            spans.append(Span(block, warp, role, float(begin), float(end), tile))
            tile += role == "tile"
    return spans


def traced(operands, kernel: MosaicBackend, folder: Path) -> tuple[jax.Array, list[Span]]:
    """Calls a Mosaic kernel once, and returns its result and its trace.

    `folder` is an empty folder for the trace.
    """
    problem = Problem.of(*operands, out_dtype="bfloat16")
    target = Target.of(operands[0].device)
    y = jax.jit(_traced_plan(problem, kernel, target, folder).run)(*operands)
    # A callback in the program writes the trace.
    jax.effects_barrier()
    (trace,) = folder.glob("*-trace.json")
    return y, read(trace)


def _traced_plan(problem: Problem, kernel: MosaicBackend, target: Target, folder: Path) -> Plan:
    """Plans the kernel with a trace, and with fewer slots if the trace needs their memory."""
    chosen = kernel.choose_config(problem, target.chip)
    for slots in range(chosen.slots, 1, -1):
        config = dataclasses.replace(chosen, slots=slots)
        with contextlib.suppress(NotImplementedError):
            return kernel.plan(problem, target, config=config, trace=str(folder))
    raise NotImplementedError(f"{chosen} leaves no shared memory for a trace.")


def table(spans: list[Span]) -> str:
    """Tabulates each role's spans: count, mean, 95th percentile and mean by warp, in cycles."""
    cycles, warps = collections.defaultdict(list), sorted({span.warp for span in spans})
    for span in spans:
        cycles[span.role].append(span.cycles)
        cycles[span.role, span.warp].append(span.cycles)
    heads = "".join(f"{f'warp {warp}':>9}" for warp in warps)
    lines = [f"{'role':24}{'spans':>8}{'mean':>10}{'p95':>10}  cycles{heads}"]
    for role in [key for key in cycles if isinstance(key, str)]:
        found = np.array(cycles[role])
        means = (np.mean(own) if (own := cycles.get((role, w))) else None for w in warps)
        by_warp = "".join(f"{'' if mean is None else f'{mean:.0f}':>9}" for mean in means)
        lines.append(
            f"{role:24}{len(found):8}{found.mean():10.0f}{np.percentile(found, 95):10.0f}"
            f"        {by_warp}"
        )
    return "\n".join(line.rstrip() for line in lines)


def draw(spans: list[Span], title: str, out: Path) -> None:
    """Draws the spans of the first block, a row for each warp."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    block = min(span.block for span in spans)
    spans = [span for span in spans if span.block == block]
    start = min(span.begin for span in spans)
    warps = sorted({span.warp for span in spans})
    # Outer spans are drawn first, and inner spans over them.
    spans = sorted((s for s in spans if s.begin < start + DRAWN), key=lambda span: -span.cycles)
    roles = dict.fromkeys(span.role for span in spans)
    colours = dict(zip(roles, plt.colormaps["tab10"](range(10))))
    figure, axes = plt.subplots(figsize=(12, 1 + 0.3 * len(warps)), layout="constrained")
    for span in spans:
        axes.barh(
            warps.index(span.warp),
            span.cycles,
            left=span.begin - start,
            color=colours[span.role],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set(title=title, xlabel="cycles of the multiprocessor", ylabel="warp", xlim=(0, DRAWN))
    axes.set_yticks(range(len(warps)), [str(warp) for warp in warps])
    axes.invert_yaxis()
    handles = [Patch(color=colour, label=role) for role, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in NAMED_SHAPES]
    kernels = {"mosaic_sm90": SM90, "mosaic_sm100": SM100, "cuda": cuda}
    parser.add_argument(
        "--backend", choices=kernels, help="default: the fastest of them that serves the problem"
    )
    parser.add_argument("--shape", choices=names, default="B/16 224", metavar="NAME")
    parser.add_argument("--images", type=int, default=4736)
    parser.add_argument("--dtype", choices=tiles.DTYPES, default=tiles.DTYPES[0])
    parser.add_argument("--out", type=Path, help="PNG file for the picture")
    chosen = parser.parse_args()
    target = Target.of(jax.devices()[0])
    case = contenders.BenchmarkProblem(named_shape(chosen.shape), chosen.images, chosen.dtype)
    drawn = contenders.operands(contenders.draw(case))
    problem = Problem.of(*drawn, out_dtype="bfloat16")
    options, refusals = ranked(problem, target, backend=chosen.backend)
    name = next((x.backend for x in options if x.backend in kernels), None)
    if name is None:
        raise SystemExit("\n".join(f"{name}: {reason}" for name, reason in refusals.items()))
    if name == "cuda":
        _, stamps = cuda_launch.stamped(drawn, out_dtype="bfloat16")
        spans = read_stamps(stamps)
        if stamps[..., -1].any():
            print(f"Some warps wrote more than {stamps.shape[-1]} stamps; later ones are left out.")
    else:
        with tempfile.TemporaryDirectory() as folder:
            _, spans = traced(drawn, kernels[name], Path(folder))
    print(timing.environment())
    print(f"{name}, {chosen.shape}, {chosen.images} images, {chosen.dtype}\n{table(spans)}")
    if chosen.out:
        title = f"{name}: {chosen.shape}, {chosen.images} images, {chosen.dtype}"
        draw(spans, f"{title}, {timing.environment().split(', jax')[0]}", chosen.out)


if __name__ == "__main__":
    main()
