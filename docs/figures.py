"""Draws the figures of docs/kernels.md into docs/figures: python docs/figures.py."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from pallas_patch_embed.backends import schedule

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"

# All figures show the same small problem: images of 2 x 3 patches in tiles of 4 rows.
LINES, PATCHES_PER_LINE, TILE_M = 2, 3, 4
S = LINES * PATCHES_PER_LINE

# The color of each phase of the table. A phase is the row of the table with which a tile starts.
PHASE_COLORS = {0: "#1f77b4", 2: "#2ca02c", 4: "#ff7f0e"}
GRAY, DARK = "#d9dee6", "#5b6573"
# Colors of patches, weight and result in the figure of the stationary weight.
PATCHES, WEIGHT, RESULT = "#3d5a80", "#9d4edd", "#52796f"
plt.rcParams.update({"font.size": 9, "savefig.dpi": 120})


def rectangle(axes: Axes, x, y, width, height, fill, text="", *, edge="white", **options) -> None:
    """Draws a filled rectangle with a text in its center."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, lw=1))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **options)


def arrow(axes: Axes, start, end) -> None:
    """Draws an arrow from start to end."""
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=DARK, lw=1.3))


def draw_patches() -> None:
    """Draws an image, its patches as rows, and the tiles that the rows are divided into."""
    figure, axes = plt.subplots(figsize=(9, 4))
    photo = Image.open(ROOT / "pallas_patch_embed/photos/astronaut.png").convert("RGB")
    photo = np.asarray(photo.crop((0, 0, 480, 320)).resize((120, 80)).quantize(64).convert("RGB"))
    axes.imshow(photo, extent=(0, 4.8, 1.4, 4.6), aspect="auto")
    for patch in range(S):
        line, column = divmod(patch, PATCHES_PER_LINE)
        x, y = 1.6 * column, 4.6 - 1.6 * (line + 1)
        axes.add_patch(Rectangle((x, y), 1.6, 1.6, fill=False, edgecolor="white", lw=2))
        axes.text(x + 0.12, y + 1.45, patch, color="white", weight="bold", va="top", fontsize=13)
    axes.text(2.4, 4.8, f"image 0: {LINES} x {PATCHES_PER_LINE} patches", ha="center")
    arrow(axes, (4.95, 3), (6.15, 3))
    axes.text(5.55, 3.1, "patchify", ha="center")

    images, height, left = 2, 0.4, 7.1
    top = 4.6
    for row in range(images * S):
        y = top - height * (row + 1)
        color = PHASE_COLORS[row // TILE_M * TILE_M % S]
        rectangle(axes, left, y, 1.1, height, color, f"{row}", color="white")
        for i, text in enumerate(("line 0", "line 1", "...", "line p-1")):
            rectangle(axes, left + 1.1 + 0.9 * i, y, 0.9, height, GRAY, text, fontsize=7)
        rectangle(axes, left + 4.7, y, 0.6, height, "white", "0 0 0", edge=GRAY, fontsize=7)
        axes.text(left + 6.05, y + height / 2, row % S, ha="center", va="center")
    for image in range(images):
        y = top - height * S * (image + 1)
        axes.plot([left - 0.12] * 2, [y + 0.05, y + height * S - 0.05], color=DARK, lw=2)
        axes.text(
            left - 0.2, y + height * S / 2, f"image {image}", ha="right", va="center", rotation=90
        )
    for tile in range(images * S // TILE_M):
        y = top - height * TILE_M * (tile + 1)
        first = tile * TILE_M % S
        axes.plot([left + 6.5] * 2, [y + 0.05, y + height * TILE_M - 0.05], color=DARK, lw=2)
        axes.text(
            left + 6.65,
            y + height * TILE_M / 2,
            f"tile {tile}\nphase {first}",
            va="center",
            color=PHASE_COLORS[first],
            weight="bold",
        )
    for x, text in (
        (0.55, "row"),
        (2.9, "a patch: p lines of 3 p values"),
        (6.05, "row of\nthe table"),
    ):
        axes.text(left + x, top + 0.12, text, ha="center", va="bottom")
    axes.text(left + 5.0, top - height * images * S - 0.1, "pads K", ha="center", va="top")
    axes.set_xlim(-0.1, 15)
    axes.set_ylim(-0.65, 5.4)
    save(figure, axes, "patches")


def draw_stationary() -> None:
    """Draws patches that stream past a slice of the weight, which stays in shared memory."""
    figure, axes = plt.subplots(figsize=(7, 3.6))
    tiles, slices, current = 6, 4, 2
    for t in range(tiles):
        y = 3.6 - 0.72 * (t + 1)
        color, text = (PATCHES, "tile 2") if t == current else (GRAY, f"tile {t}")
        rectangle(axes, 0, y, 3, 0.66, color, text, color="white" if t == current else DARK)
        for s in range(slices):
            written = s == 1 and t <= current
            rectangle(axes, 6 + s, y, 0.94, 0.66, RESULT if written else GRAY)
    for s in range(slices):
        rectangle(axes, 6 + s, 4.3, 0.94, 1.7, WEIGHT if s == 1 else GRAY)
    axes.text(7.47, 5.15, "slice 1", color="white", ha="center", va="center", rotation=90)
    axes.text(1.5, 3.72, "patches [M, K]", ha="center")
    axes.text(7.97, 6.1, "weight [N, K]", ha="center")
    axes.text(7.97, 3.72, "y [M, N]", ha="center")
    axes.text(5.5, 5.15, "stays in shared\nmemory of a worker", ha="right", va="center")
    arrow(axes, (5.6, 5.15), (6.95, 5.15))
    arrow(axes, (3.15, 3.6 - 0.72 * 2.5), (5.85, 3.6 - 0.72 * 2.5))
    axes.text(4.5, 1.95, "multiply, scale,\nadd the table, round", ha="center", va="bottom")
    axes.set_xlim(-0.1, 10.1)
    axes.set_ylim(-0.8, 6.5)
    save(figure, axes, "stationary")


def draw_schedule() -> None:
    """Draws the tiles of all images, and the order in which each worker computes them."""
    images, workers = 12, 2
    tiles = images * S // TILE_M
    figure, axes = plt.subplots(figsize=(9, 4))
    for tile in range(tiles):
        color = PHASE_COLORS[tile * TILE_M % S]
        rectangle(axes, tile, 3, 1, 0.9, color, f"{tile}", color="white")
    for image in range(images):
        x, width = image * S / TILE_M, S / TILE_M
        axes.plot([x + 0.05, x + width - 0.05], [2.85] * 2, color=DARK, lw=2)
        axes.text(x + width / 2, 2.75, f"image {image}", ha="center", va="top", fontsize=7)
    axes.text(0, 4.08, "tiles, in the order of the rows of patches")
    # A worker has half of the tiles, so they are drawn twice as wide.
    for worker, segments in enumerate(schedule.segments(images * S, S, TILE_M, workers)):
        x, y = 0, 0.9 - 1.95 * worker
        axes.text(0, y + 1.05, f"tiles of worker {worker}, in the order in which it computes them")
        for first, count, stride, table_row in (segment for segment in segments if segment[1]):
            for i in range(count):
                tile = first + i * stride
                place = x + workers * i
                rectangle(
                    axes, place, y, workers, 0.9, PHASE_COLORS[table_row], tile, color="white"
                )
            rows = ", ".join(str((table_row + i) % S) for i in range(TILE_M))
            width = workers * count
            axes.plot([x + 0.1, x + width - 0.1], [y - 0.12] * 2, color="black", lw=2)
            text = f"segment: rows {rows} of the table"
            axes.text(x + width / 2, y - 0.2, text, ha="center", va="top", fontsize=8)
            x += width
    axes.set_xlim(-0.2, tiles + 0.2)
    axes.set_ylim(-1.6, 4.5)
    save(figure, axes, "schedule")


def save(figure: plt.Figure, axes: Axes, name: str) -> None:
    """Writes docs/figures/NAME.png."""
    axes.axis("off")
    FIGURES.mkdir(exist_ok=True)
    # The version of matplotlib is left out, so that the file changes only with the figure.
    figure.savefig(FIGURES / f"{name}.png", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_patches()
    draw_stationary()
    draw_schedule()
