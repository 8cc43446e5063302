"""Prints resources and instructions of every compiled kernel, and a cycle budget for one tile.

  python -m benchmarks.audit [--shape "B/16 224"] [--images 4736] [--dtypes int8 ...]
      [--out audit.png] [--json audit.jsonl]

No GPU is needed, and nothing is measured: resources and instructions are read from machine code,
and the budget is computed from data sheets, tile sizes and that code. A kernel that cannot be
compiled or read on this machine is left out, and a line says why. Exits with status 1 if a kernel
spills or uses stack.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterable
from pathlib import Path

import jax

from benchmarks.audited_kernels import every_kernel, library_kernels
from benchmarks.cycle_budget import (
    ASSUMPTIONS,
    CHIP_OF,
    MULTIPLY_ADDS,
    Kernel,
    binding,
    budget,
    filled_bytes,
    ring,
)
from benchmarks.machine_code import CLASSES, Code, class_of
from pallas_patch_embed.backends import tiles
from pallas_patch_embed.base.problem import NAMED_SHAPES, VIT_SHAPES, named_shape
from pallas_patch_embed.base.versions import installed

# The packages that generate the machine code.
COMPILERS = ("jax", "jaxlib", "triton", "nvidia-cuda-nvcc")


def spilling(codes: Iterable[Code]) -> list[str]:
    """Names the kernels that spill or use stack."""
    return [code.name for code in codes if code.spill_bytes or code.stack_bytes]


def table(heads: list[str], rows: list[list]) -> str:
    """Formats a table whose first column is aligned to the left and the rest to the right."""
    rows = [[str(cell) for cell in row] for row in [heads, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        f"{row[0]:{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))
        for row in rows
    )


def resources_table(kernels: list[Kernel]) -> str:
    """Tabulates registers and memory of each kernel."""
    heads = ["kernel", "tile", "registers", "spill B", "stack B", "shared KiB", "TMEM columns"]
    rows = []
    for k in kernels:
        row = [k.label, f"{k.tile.rows}x{k.tile.columns}", k.code.registers, k.code.spill_bytes]
        row += [k.code.stack_bytes, f"{k.shared_memory_bytes / 1024:.1f}"]
        rows.append([*row, k.tensor_memory_columns or "-"])
    return table(heads, rows)


def mix_table(kernels: list[Kernel]) -> str:
    """Tabulates a warp's instructions for a tile by class; opcodes without a class are named."""
    heads, rows, unknown = [*CLASSES, "other"], [], set()
    for kernel in kernels:
        for loop in kernel.loops:
            found = loop.by_class()
            label = f"{kernel.label}, {loop.warps} x {loop.role}"
            rows.append([label, *(found.get(name, 0) for name in heads), sum(found.values())])
            unknown |= {x.split(".")[0] for x in loop.executed if class_of(x) == "other"}
    names = [f"other: {', '.join(sorted(unknown))}"] if unknown else []
    return "\n".join([table(["kernel, warps x role", *heads, "sum"], rows), *names])


def budget_table(kernels: list[Kernel]) -> str:
    """Tabulates the budget of a tile: cycles by resource, the limiting resource, and bytes."""
    rows = []
    for kernel in kernels:
        shares = budget(kernel)
        cycles = [f"{share.cycles:.0f}" for share in shares.values()]
        sizes = [shares[name].amount for name in ("DRAM", "L2", "shared")] + [filled_bytes(kernel)]
        sizes = [f"{size / 1024:.0f}" for size in sizes]
        tma_rows = kernel.tile.tma_rows // kernel.tile.blocks or "-"
        found = ring(kernel)
        slots = f"{found[0]:.0f}-{found[-1]:.0f}" if found else "-"
        rows.append([kernel.label, *cycles, slots, binding(shares), *sizes, tma_rows])
    heads = ["kernel", "tensor", "DRAM", "L2", "shared", "issue", "ring", "binds"]
    return table([*heads, "DRAM KiB", "L2 KiB", "shared KiB", "filled KiB", "TMA rows"], rows)


def chips_table(kernels: list[Kernel]) -> str:
    """Tabulates the data sheets' numbers for these kernels' architectures."""
    heads = ["chip", "architecture", "multiprocessors", "GHz", "TB/s", *tiles.DTYPES]
    rows = []
    for architecture in dict.fromkeys(kernel.architecture for kernel in kernels):
        chip, rates = CHIP_OF[architecture], MULTIPLY_ADDS[architecture]
        row = [chip.name, architecture, chip.multiprocessors, chip.clock, chip.bandwidth / 1e12]
        rows.append(row + [rates[dtype] for dtype in tiles.DTYPES])
    return table(heads, rows)


def compilers() -> str:
    """Returns the versions of the compilers."""
    return ", ".join(map(" ".join, installed(COMPILERS).items()))


def draw(kernels: list[Kernel], title: str, out: Path) -> None:
    """Draws each kernel's issue slots by class as a bar, and its budget next to it."""
    import matplotlib.pyplot as plt

    size = (15, 3 + 0.26 * len(kernels))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    heights, begin, budgets = range(len(kernels)), [0] * len(kernels), [budget(k) for k in kernels]
    for name, colour in zip([*CLASSES, "other"], plt.colormaps["tab20"](range(20))):
        slots = [sum(loop.issue_slots().get(name, 0) for loop in k.loops) for k in kernels]
        parts = [100 * n / shares["issue"].amount for n, shares in zip(slots, budgets)]
        if any(parts):
            left.barh(heights, parts, left=begin, color=colour, label=name)
        begin = [x + y for x, y in zip(begin, parts)]
    for height, shares in zip(heights, budgets):
        left.text(101, height, f"{shares['issue'].amount:.0f}", va="center", fontsize=8)
    left.set_yticks(heights, [kernel.label for kernel in kernels], fontsize=8)
    left.set_ylim(len(kernels) - 0.4, -0.6)
    left.set(title="instructions counted in the machine code")
    left.set(xlabel="% of one scheduler's issue slots for a tile, and their number", xlim=(0, 110))
    # The markers are hollow and grow from one to the next, so that equal values stay visible.
    for size, (name, marker) in enumerate(zip(budgets[0], "sDo^|"), 5):
        cycles = [shares[name].cycles for shares in budgets]
        right.plot(cycles, heights, marker, fillstyle="none", markersize=size, label=name)
    right.set(title="estimated budget; the rightmost marker is the limit", xscale="log")
    right.set_xlabel("cycles of a multiprocessor per tile")
    right.grid(alpha=0.3)
    for axes in (left, right):
        axes.legend(fontsize=8, ncols=4, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.04))
    figure.suptitle(title)
    figure.supxlabel(compilers(), fontsize=8, color="0.4")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Prints the tables, writes the picture and the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in (*NAMED_SHAPES, *VIT_SHAPES)]
    parser.add_argument("--shape", choices=names, default="B/16 224", metavar="NAME")
    parser.add_argument("--images", type=int, default=4736)
    parser.add_argument("--dtypes", nargs="+", choices=tiles.DTYPES, default=tiles.DTYPES)
    parser.add_argument("--out", type=Path, help="PNG file for the picture")
    parser.add_argument("--json", type=Path, help="file that gets a line of JSON for each kernel")
    chosen = parser.parse_args()
    # A stored config for this machine's GPU must not replace the choice for the chips above.
    jax.config.update("jax_platforms", "cpu")
    kernels, missing = every_kernel(named_shape(chosen.shape), chosen.images, chosen.dtypes)
    print("".join(f"{line}\n" for line in missing))
    print(compilers())
    if not kernels:
        raise SystemExit("No kernel can be compiled on this machine.")
    title = f"{chosen.shape}, {chosen.images} images, {datetime.date.today()}"
    print(f"Resources per thread and per block, {title}\n{resources_table(kernels)}\n")
    print(f"Instructions of a warp in the tile loop, for one tile\n{mix_table(kernels)}\n")
    print(f"Estimated budget of a tile, in cycles of a multiprocessor\n{budget_table(kernels)}\n")
    print("Data sheets, and dense multiply-adds per cycle and multiprocessor by dtype")
    print(f"{chips_table(kernels)}\n\n{ASSUMPTIONS}")
    if chosen.json:
        lines = []
        for kernel in kernels:
            line = dataclasses.asdict(kernel)
            del line["code"]["sass"]
            shares = budget(kernel)
            line["budget"] = {name: share._asdict() for name, share in shares.items()}
            line |= {"ring": ring(kernel), "binds": binding(shares)}
            lines.append(json.dumps(line) + "\n")
        chosen.json.write_text("".join(lines))
    if chosen.out:
        draw(kernels, f"Kernel audit from machine code, without measurements: {title}", chosen.out)
    found = [kernel.label for kernel in kernels if spilling([kernel.code])]
    with contextlib.suppress(NotImplementedError):
        everything = library_kernels()
        found += spilling(everything.values())
        print(f"\nThe CUDA library has {len(everything)} kernels, counted by chip.")
    if found:
        raise SystemExit(f"These kernels spill or use stack: {', '.join(found)}")


if __name__ == "__main__":
    main()
