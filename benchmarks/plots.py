"""Draws the recorded measurements; each picture has a caption that explains it."""

import textwrap
from pathlib import Path

import numpy as np

from benchmarks.results import REGIMES, Measurement

# This package's backends are drawn in colours, and peers in grey.
OURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:cyan")
PEERS = ("0.25", "0.45", "0.6", "0.7", "0.8", "0.5", "0.35")
MARKERS = "osD^vP*Xh"

# Caption of every bar chart.
KEY = (
    "Colours: this package's backends. Grey: peers, which use bfloat16 from images. Bare: without "
    "scale and positions. [N, K], [K, N]: layout of the weight."
)
KEY_OF_TIMES = (
    "Whiskers: 10th to 90th percentile. Floor: lower bound from the rates of memory and of matrix "
    "units measured in the same run, or the time of the fastest contender if that is less."
)


def _figure(width: float, height: float, title: str, caption: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    figure.supxlabel(textwrap.fill(caption, int(18 * width)), fontsize=7, color="0.4")
    return figure


def _colours(results: list[Measurement]) -> dict[str, str]:
    names = {
        ours: list(dict.fromkeys(r.contender for r in results if r.ours is ours))
        for ours in (True, False)
    }
    found = {name: OURS[i % len(OURS)] for i, name in enumerate(names[True])}
    return found | {name: PEERS[i % len(PEERS)] for i, name in enumerate(names[False])}


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path


def _bars(
    results: list[Measurement], measure: str, end: str, digits: int, title: str, caption: str
):
    """Draws a measure of every contender as bars, with a panel for each source and dtype.

    Args:
      results: results of one shape, number of images, pixels and regime.
      measure: attribute of a result; its name gives the unit.
      end: attribute with the position at which the number is written, right of bar and whisker.
      digits: decimal places of the number.
      title: title of the figure.
      caption: text below the figure.

    Returns:
      The figure, and for each panel its axes and its results, from bottom to top.
    """
    colours, panels = _colours(results), []
    sources, dtypes = (
        list(dict.fromkeys(getattr(r, n) for r in results)) for n in ("source", "dtype")
    )
    # The title and the legend need a width of 12 inches.
    width = max(12, 5.5 * len(dtypes))
    figure = _figure(width, 1 + 0.2 * len(colours) * len(sources), title, caption)
    for row, source in zip(figure.subplots(len(sources), len(dtypes), squeeze=False), sources):
        for axes, dtype in zip(row, dtypes):
            shown = [r for r in results if (r.source, r.dtype) == (source, dtype)]
            shown.sort(key=lambda r: -getattr(r, measure))
            names = [r.contender for r in shown]
            numbers = [getattr(r, measure) for r in shown]
            axes.barh(names, numbers, color=[colours[name] for name in names])
            for i, r in enumerate(shown):
                text, place = f"{getattr(r, measure):.{digits}f}", (getattr(r, end), i)
                offset = dict(xytext=(4, 0), textcoords="offset points", va="center")
                axes.annotate(text, place, fontsize=7, **offset)
            axes.margins(x=0.18)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(measure.replace("_", " "), fontsize=8)
            axes.set_title(f"from {source}, {dtype}", fontsize=9)
            panels.append((axes, shown))
    return figure, panels


def _problem(result: Measurement) -> str:
    """Describes the problem and regime that all results of a picture share."""
    problem = f"{result.images} images, {result.shape}, {result.pixels} pixels"
    return f"{problem}, {result.regime}: {REGIMES[result.regime]}"


def times(results: list[Measurement], caption: str, path: Path) -> Path:
    """Draws bars with the milliseconds of every contender, their spread, and the floor.

    Args:
      results: results of one shape, number of images, pixels and regime.
      caption: device, day and versions.
      path: path of the PNG.
    """
    title = f"Patch embedding of {_problem(results[0])}"
    key = f"{KEY} {KEY_OF_TIMES} {caption}"
    figure, panels = _bars(results, "milliseconds", "high", 3, title, key)
    for axes, shown in panels:
        middle = [r.milliseconds for r in shown]
        ends = [
            [m - r.low for m, r in zip(middle, shown)],
            [r.high - r.milliseconds for r in shown],
        ]
        axes.errorbar(
            middle, range(len(shown)), xerr=np.maximum(ends, 0), fmt="none", color="black", lw=0.8
        )
        floor = axes.axvline(shown[0].floor, color="black", ls="--", lw=0.8, label="floor")
    figure.legend(handles=[floor], fontsize=7, loc="outside upper right")
    return _save(figure, path)


def energy(results: list[Measurement], caption: str, path: Path) -> Path:
    """Draws bars with every contender's joules per million images; arguments as for `times`."""
    title = f"Energy of the patch embedding of {_problem(results[0])}"
    measure, key = "joules_a_million_images", f"{KEY} {caption}"
    return _save(_bars(results, measure, measure, 0, title, key)[0], path)


def throughput(results: list[Measurement], caption: str, path: Path) -> Path:
    """Draws images per second against the number of images, with a panel for each source."""
    first, colours = results[0], _colours(results)
    sources = list(dict.fromkeys(r.source for r in results))
    title = (
        f"Images per second by batch size, {first.shape}, {first.dtype}, {first.pixels} pixels, "
    )
    title += f"{first.regime}: {REGIMES[first.regime]}"
    figure = _figure(7.6 * len(sources), 4.4, title, caption)
    for axes, source in zip(figure.subplots(1, len(sources), squeeze=False)[0], sources):
        of_source = [r for r in results if r.source == source]
        for i, name in enumerate(dict.fromkeys(r.contender for r in of_source)):
            own = sorted((r for r in of_source if r.contender == name), key=lambda r: r.images)
            axes.plot(
                [r.images for r in own],
                [r.images_a_second for r in own],
                marker=MARKERS[i % len(MARKERS)],
                color=colours[name],
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="images per call", ylabel="images per second")
        axes.set_title(f"from {source}", fontsize=9)
        axes.grid(alpha=0.3, which="both", lw=0.4)
        axes.legend(fontsize=7, bbox_to_anchor=(1, 1), loc="upper left", frameon=False)
    return _save(figure, path)


def roofline(
    results: list[Measurement], ceilings: dict[str, float], caption: str, path: Path
) -> Path:
    """Draws operations per second against operations per byte, with the measured ceilings.

    Args:
      results: results of one shape, pixels and regime.
      ceilings: "memory" -> bytes per second; dtype -> operations per second of a large product.
      caption: device, day and versions.
      path: path of the PNG.
    """
    colours = _colours(results)
    first = results[0]
    title = f"Roofline of the patch embedding, {first.shape}, {first.pixels} pixels, {first.regime}"
    figure = _figure(8, 5, title, caption)
    axes = figure.subplots()
    intensity = [r.operations / r.bytes for r in results]
    x = np.geomspace(min(intensity) / 4, max(intensity) * 4, 200)
    slope, peaks = ceilings["memory"] / 1e12, {}
    for dtype, rate in ceilings.items():
        if dtype != "memory":
            # All one-byte dtypes multiply at the same rate up to noise, so they share one roof.
            same = (p for p in peaks if abs(np.log(rate / p)) < 0.1)
            peaks.setdefault(next(same, rate), []).append(dtype)
    for rate, dtypes in peaks.items():
        roof = np.minimum(x * slope, rate / 1e12)
        axes.plot(x, roof, color="0.3", lw=0.9)
        text = f"{', '.join(dtypes)}: {rate / 1e12:.4g} TFLOP/s"
        axes.annotate(text, (x[-1], roof[-1]), fontsize=7, ha="right", va="bottom")
    text = f"  memory: {slope:.3g} TB/s"
    axes.annotate(text, (x[0], x[0] * slope), fontsize=7, ha="left", va="center")
    markers = dict(zip(dict.fromkeys(r.dtype for r in results), MARKERS))
    for r in results:
        place = (r.operations / r.bytes, r.teraflops)
        axes.scatter(*place, marker=markers[r.dtype], color=colours[r.contender], s=28, alpha=0.8)
    # The marker distinguishes dtypes of the same size, whose points have the same abscissa.
    for images, intensity in dict.fromkeys((r.images, r.operations / r.bytes) for r in results):
        highest = max(r.teraflops for r in results if r.operations / r.bytes == intensity)
        text = f"{images} image{'s' * (images > 1)}   "
        axes.annotate(text, (intensity, highest), fontsize=7, ha="right", va="center")
    for name, colour in colours.items():
        axes.plot([], color=colour, lw=5, label=name)
    for dtype, marker in markers.items():
        axes.plot([], color="0.3", ls="", marker=marker, label=dtype)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must be moved",
        ylabel="TFLOP/s",
    )
    axes.grid(alpha=0.3, which="both", lw=0.4)
    axes.legend(fontsize=7, bbox_to_anchor=(1, 1), loc="upper left", frameon=False)
    return _save(figure, path)
