"""Draws the figures of docs/kernels.md: python docs/figures.py."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from pallas_patch_embed.backends import schedule

FIGURES = Path(__file__).parent / "figures"
COLORS = plt.colormaps["tab10"].colors


def draw_stationary() -> None:
    """Patches stream past a slice of the weight that stays in shared memory."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    tiles = 6
    for t in range(tiles):
        active = t == 2
        axes.add_patch(
            plt.Rectangle((0, -t), 3, 0.9, color=COLORS[0] if active else "#d5dde8", lw=0)
        )
        for s in range(4):
            color = COLORS[2] if (active and s == 1) or (t < 2 and s == 1) else "#e7efe3"
            axes.add_patch(plt.Rectangle((6 + 1.05 * s, -t), 1, 0.9, color=color, lw=0))
    for s in range(4):
        color = COLORS[1] if s == 1 else "#f2e4d4"
        axes.add_patch(plt.Rectangle((6 + 1.05 * s, 1.6), 1, 1.6, color=color, lw=0))
    axes.text(1.5, 1.2, "patches [M, K]", ha="center")
    axes.text(8.1, 3.35, "weight [N, K]", ha="center")
    axes.text(8.1, 1.2, "y [M, N]", ha="center")
    axes.text(1.5, -2 + 0.45, "one tile of rows", ha="center", va="center", color="white")
    axes.annotate(
        "a slice stays in\nshared memory",
        (7.05, 2.4),
        (3.6, 2.6),
        va="center",
        arrowprops=dict(arrowstyle="->"),
    )
    axes.annotate("", (5.9, -1.55), (3.1, -1.55), arrowprops=dict(arrowstyle="->"))
    axes.text(4.5, -1.35, "multiply", ha="center")
    axes.set_xlim(-0.2, 10.5)
    axes.set_ylim(-5.2, 3.8)
    axes.axis("off")
    save(figure, "stationary")


def draw_schedule() -> None:
    """Tiles by the position at which they start, and the worker that computes each."""
    images, S, tile_m, workers = 12, 6, 4, 3
    segments = schedule.segments(images * S, S, tile_m, workers)
    owner = np.zeros(images * S // tile_m, int)
    order = np.zeros_like(owner)
    for worker, its_segments in enumerate(segments):
        number = 0
        for first, count, stride, _ in its_segments:
            for i in range(count):
                owner[first + i * stride], order[first + i * stride] = worker, number
                number += 1
    figure, axes = plt.subplots(figsize=(7.5, 2.9))
    for t, worker in enumerate(owner):
        axes.add_patch(plt.Rectangle((t * tile_m, 0), tile_m - 0.15, 1, color=COLORS[worker], lw=0))
        center = t * tile_m + tile_m / 2
        axes.text(center, 0.62, f"{order[t]}", ha="center", va="center", color="white")
        phase = t * tile_m % S
        axes.text(center, 0.27, f"row {phase}", ha="center", va="center", fontsize=6, color="white")
    for i in range(images + 1):
        axes.plot([i * S - 0.07] * 2, [-0.35, 1.1], color="black", lw=0.8)
        if i < images:
            axes.text(i * S + S / 2, -0.3, f"image {i}", ha="center", fontsize=7)
    for worker in range(workers):
        axes.add_patch(plt.Rectangle((worker * 14, 1.45), 1.6, 0.3, color=COLORS[worker], lw=0))
        axes.text(worker * 14 + 2.1, 1.6, f"worker {worker}", va="center", fontsize=8)
    axes.text(
        0,
        -0.85,
        f"{images} images of {S} patches, in tiles of {tile_m} rows. Each tile names the first row "
        "of the table that it needs.\nThe large number is its order among the tiles of its worker.",
        fontsize=7.5,
        va="top",
    )
    axes.set_xlim(-0.5, images * S + 0.5)
    axes.set_ylim(-1.5, 1.9)
    axes.axis("off")
    save(figure, "schedule")


def save(figure: plt.Figure, name: str) -> None:
    """Writes docs/figures/NAME.png."""
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(
        FIGURES / f"{name}.png", dpi=130, bbox_inches="tight", metadata={"Software": None}
    )
    plt.close(figure)


if __name__ == "__main__":
    draw_stationary()
    draw_schedule()
