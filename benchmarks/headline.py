"""The few numbers of README.md: its table and its pictures, from the records of this folder.

  python -m benchmarks.headline

It draws headline.png, and headline_dark.png for dark pages, and prints the table. The numbers are
the newest records on an H200 of these benchmarks:

  benchmarks.encoder_peers    encoder_peers.jsonl: whole encoders, many pictures a call and one
  benchmarks.embedding        embedding.jsonl: the command `embed`
  benchmarks.images           images.jsonl: the patch embedding of 4736 images
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import results

FOLDER = Path(__file__).parent / "h200"

# Encoders and pictures a call, in the order of the table.
THROUGHPUT = (("B/16 224", 512), ("So400m/14 384", 512))
ONE_PICTURE = ("B/16 224", "So400m/14 384")
EMBEDDED_IMAGES, SHAPE, CORES = 4736, "B/16 224", 16

# Labels of contenders by patterns that their names begin with; the first one that fits counts.
ENCODERS = {
    "this encoder, blocks in int8$": "this library, int8",
    "this encoder, called outside of jit": "this library, bfloat16",
    "transformers.* torchao's int8": "torchao, int8",
    "transformers.* torchao's float8": "torchao, float8",
    "transformers, torch.compile": "torch.compile",
    "flax": "flax",
}
OPERATORS = {
    "cuda, cut by the kernel": "this library, int8",
    r"patchify \+ jnp.dot": "patchify + jnp.dot, bfloat16",
    "convolution": "convolution, bfloat16",
}
OURS = "this library"

# Number of characters above which a title is broken, because a panel is not wider.
LONGEST_TITLE = 36

# Colours of this library's bars, of the others', of the text and of the page, by picture.
COLOURS = {
    "headline.png": ("#0969da", "#afb8c1", "#1f2328", "#ffffff"),
    "headline_dark.png": ("#4493f8", "#656c76", "#f0f6fc", "#0d1117"),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What one row of the table and one panel of the pictures compare.

    Attributes:
      what: what is measured.
      unit: unit of the numbers.
      more_is_better: whether larger numbers are faster.
      values: label -> number of the fastest contender with it.
      date: day of the record.
    """

    what: str
    unit: str
    more_is_better: bool
    values: dict[str, float]
    date: str

    @property
    def fastest_first(self) -> list[tuple[str, float]]:
        return sorted(self.values.items(), key=lambda x: x[1], reverse=self.more_is_better)


def runs(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the day and the records of each run in a file."""
    date, found = "", []
    for record in results.read(path) if path.exists() else ():
        if record["kind"] in ("run", "environment"):
            if found:
                yield date, found
            text = record.get("versions") or record["text"]
            date, found = re.search(r"\d{4}-\d\d-\d\d", text)[0], []
        found.append(record)
    if found:
        yield date, found


def compare(
    path: Path,
    wanted: dict[str, Any],
    labels: dict[str, str],
    number: Callable[[dict[str, Any]], float],
    **about: Any,
) -> Comparison | None:
    """Compares the contenders of the newest run that has the wanted fields; None if none has."""
    found = None
    better = max if about["more_is_better"] else min
    for date, records in runs(path):
        values: dict[str, float] = {}
        for record in records:
            if any(record.get(name) != value for name, value in wanted.items()):
                continue
            contender = record.get("contender", "")
            if label := next((labels[x] for x in labels if re.match(x, contender)), ""):
                values[label] = better(values.get(label, number(record)), number(record))
        if values and (found is None or date >= found.date):
            found = Comparison(values=values, date=date, **about)
    return found


def comparisons(folder: Path = FOLDER) -> list[Comparison]:
    """Returns the comparisons for which there are records."""
    peers = folder / "encoder_peers.jsonl"
    found = [
        compare(
            peers,
            dict(kind="encoder peer", encoder=encoder, images=images),
            ENCODERS,
            lambda r: 1e3 * r["images"] / r["sustained"],
            what=f"SigLIP {encoder}, {images} pictures a call",
            unit="pictures/s",
            more_is_better=True,
        )
        for encoder, images in THROUGHPUT
    ]
    found.append(
        compare(
            folder / "embedding.jsonl",
            dict(kind="embed", encoder=SHAPE, form="jpeg", devices=1, allowed=CORES),
            {"": f"{OURS}, bfloat16"},
            lambda r: r["rate"],
            what=f"JPEG files to embeddings, SigLIP {SHAPE}, {CORES} cores",
            unit="pictures/s",
            more_is_better=True,
        )
    )
    found += [
        compare(
            peers,
            dict(kind="encoder peer", encoder=encoder, images=1),
            ENCODERS,
            lambda r: r["burst"],
            what=f"SigLIP {encoder}, one picture",
            unit="ms",
            more_is_better=False,
        )
        for encoder in ONE_PICTURE
    ]
    found.append(
        compare(
            folder / "images.jsonl",
            dict(
                kind="time",
                shape=SHAPE,
                images=EMBEDDED_IMAGES,
                regime="sustained",
                pixels="random",
            ),
            OPERATORS,
            lambda r: r["milliseconds"],
            what=f"patch embedding of {EMBEDDED_IMAGES} images, {SHAPE}",
            unit="ms",
            more_is_better=False,
        )
    )
    return [comparison for comparison in found if comparison]


def written(value: float, unit: str) -> str:
    """Writes a number with three digits, or a rate as a whole number."""
    if unit != "ms":
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def table(found: list[Comparison]) -> str:
    """Returns the table of README.md."""
    lines = ["| on one H200 | this library | others |", "|---|---|---|"]
    for comparison in found:
        cells = []
        for ours in (True, False):
            own = [x for x in comparison.fastest_first if x[0].startswith(OURS) == ours]
            cells.append(
                "; ".join(
                    f"{label.removeprefix(f'{OURS}, ')} {written(value, comparison.unit)}"
                    for label, value in own
                )
                or "not compared"
            )
        cells[0] = f"**{cells[0]}**"
        lines.append(f"| {comparison.what}, {comparison.unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: list[Comparison], path: Path) -> None:
    """Draws a panel of bars for each comparison with others, to be read at 800 pixels of width."""
    from matplotlib.figure import Figure

    ours, others, text, page = COLOURS[path.name]
    found = [comparison for comparison in found if len(comparison.values) > 1]
    figure = Figure(figsize=(8, 1.5 * math.ceil(len(found) / 2)), layout="constrained")
    figure.set_facecolor(page)
    panels = list(figure.subplots(math.ceil(len(found) / 2), 2, squeeze=False).flat)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for axes, comparison in zip(panels, found, strict=False):
        names, values = zip(*reversed(comparison.fastest_first))
        colours = [ours if name.startswith(OURS) else others for name in names]
        axes.barh(names, values, color=colours, height=0.72)
        for i, value in enumerate(values):
            label = f" {written(value, comparison.unit)}"
            axes.text(value, i, label, va="center", fontsize=9, color=text)
        better = "more" if comparison.more_is_better else "less"
        what = comparison.what
        if len(what) > LONGEST_TITLE:
            what = ",\n".join(what.rsplit(", ", 1))
        title = f"{what}\n{comparison.unit}, {better} is better"
        axes.set_title(title, fontsize=9, color=text, loc="left")
        axes.set_xlim(0, 1.2 * max(values))
        axes.tick_params(labelsize=9, colors=text, length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.set_facecolor(page)
    figure.savefig(path, dpi=200, facecolor=page, metadata={"Software": None})


def main() -> None:
    """Draws the pictures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.headline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the records")
    chosen = parser.parse_args()
    found = comparisons(chosen.folder)
    for name in COLOURS:
        draw(found, chosen.folder / name)
    print(table(found))


if __name__ == "__main__":
    main()
