"""What the warps of a kernel do, and for how long, from a trace that the kernel writes itself.

  python -m benchmarks.timeline [--shape "B/16 224"] [--images 4736] [--dtype int8] [--out FILE]

Prints the cycles of each role's spans (mean, 95th percentile) and draws those of one thread block.
A traced kernel has fewer slots, whose memory the trace takes, and its clock readings take time: it
says who waits for whom, not how fast the kernel is.
"""

import argparse
import collections
import dataclasses
import functools
import json
import statistics
import tempfile
from pathlib import Path
from types import ModuleType

import jax

from benchmarks import headline, timing
from pallas_patch_embed.backends import mosaic_sm90, mosaic_sm100, tiling
from pallas_patch_embed.problem import NAMED_SHAPES, Problem, Target, named_shape

# The warps of a thread block of these kernels.
WARPS = 12

# What is drawn, in cycles from the first span of a block.
DRAWN = 40_000


@dataclasses.dataclass(frozen=True)
class Span:
    """One span of a warp: what it did, from when to when, in cycles of its multiprocessor."""

    block: int
    warp: int
    role: str
    begin: float
    end: float

    @property
    def cycles(self) -> float:
        """How long it took."""
        return self.end - self.begin


def read(trace: Path) -> list[Span]:
    """The spans of a trace of Mosaic's profiler, in the order in which they end.

    Its times are thousandths of cycles, from the global nanosecond in which a block began.
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


def traced(operands, kernel: ModuleType, folder: Path) -> tuple[jax.Array, list[Span]]:
    """The result and the trace of the first call of a Mosaic kernel with these operands.

    `folder` is empty.
    """
    problem = Problem.of(*operands, out_dtype="bfloat16")
    chosen = kernel.choose_config(problem)
    config = tiling.first_that_fits(
        problem,
        (
            dataclasses.replace(chosen, slots=slots, profile=str(folder))
            for slots in range(chosen.slots, 1, -1)
        ),
    )
    if config is None:
        raise NotImplementedError(f"{chosen} leaves no shared memory for a trace.")
    run = jax.jit(functools.partial(kernel.run, out_dtype="bfloat16", config=config))
    y = run(*operands)
    # The trace is written by a callback of the program.
    jax.effects_barrier()
    (trace,) = folder.glob("*-trace.json")
    return y, read(trace)


def table(spans: list[Span]) -> str:
    """Count, mean and 95th percentile of each role's spans, in cycles."""
    cycles = collections.defaultdict(list)
    for span in spans:
        cycles[span.role].append(span.cycles)
    lines = [f"{'role':24}{'spans':>8}{'mean':>10}{'p95':>10}  cycles"]
    for role, found in cycles.items():
        p95 = statistics.quantiles(found, n=20)[-1] if len(found) > 1 else found[0]
        lines.append(f"{role:24}{len(found):8}{statistics.mean(found):10.0f}{p95:10.0f}")
    return "\n".join(lines)


def draw(spans: list[Span], title: str, out: Path) -> None:
    """Draws the spans of the first block, a row for each warp."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    block = min(span.block for span in spans)
    spans = [span for span in spans if span.block == block]
    start = min(span.begin for span in spans)
    warps = sorted({span.warp for span in spans})
    # Outer spans first: inner ones are drawn over them.
    spans = sorted(spans, key=lambda span: -span.cycles)
    roles = dict.fromkeys(span.role for span in spans)
    colours = dict(zip(roles, plt.colormaps["tab10"].colors))
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
    parser.add_argument("--shape", choices=names, default=headline.HEADLINE[0], metavar="NAME")
    parser.add_argument("--images", type=int, default=headline.HEADLINE[1])
    parser.add_argument("--dtype", choices=tiling.DTYPES, default=tiling.DTYPES[0])
    parser.add_argument("--out", type=Path, help="PNG file for the picture")
    chosen = parser.parse_args()
    target = Target.of(jax.devices()[0])
    kernels = (mosaic_sm90, mosaic_sm100)
    draw_operands = functools.partial(
        headline.draw, named_shape(chosen.shape), chosen.dtype, chosen.images
    )
    problem = Problem.of(*jax.eval_shape(draw_operands), out_dtype="bfloat16")
    kernel = next((k for k in kernels if k.why_not(problem, target) is None), None)
    if kernel is None:
        raise SystemExit("\n".join(k.why_not(problem, target) for k in kernels))
    with tempfile.TemporaryDirectory() as folder:
        _, spans = traced(draw_operands(), kernel, Path(folder))
    name = kernel.__name__.rpartition(".")[2]
    print(timing.versions())
    print(f"{name}, {chosen.shape}, {chosen.images} images, {chosen.dtype}\n{table(spans)}")
    if chosen.out:
        title = f"{name}: {chosen.shape}, {chosen.images} images, {chosen.dtype}"
        draw(spans, f"{title}, {timing.versions().split(', jax')[0]}", chosen.out)


if __name__ == "__main__":
    main()
