"""The contact sheet of the command `search`."""

import collections
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pallas_patch_embed.base.files import check_place, written_atomically
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import sources
from pallas_patch_embed.embed.parquet import pictures_of
from pallas_patch_embed.embed.pictures import MOST_PIXELS, LimitError, decode_upright, quiet, reason
from pallas_patch_embed.embed.units import Entry, Picture

if TYPE_CHECKING:
    from PIL import Image

# Largest number of pictures on a sheet.
MOST = 100

# Side of a picture, height of the line below it, and margin, in pixels.
SIDE, LINE, MARGIN = 224, 20, 8

# Largest number of characters of an id below its picture, and the size of letters in pixels.
CHARACTERS, LETTERS = 22, 14

# The PNG's text by which `is_own` recognizes a sheet.
CREATOR = "pallas-patch-embed search"


def check(path: Path) -> None:
    """Refuses a path at which no sheet can be written, or at which there is another file.

    Raises:
      ValueError: the path is refused.
    """
    what = f"--sheet is {printable(path)}"
    if path.suffix.lower() != ".png":
        raise ValueError(f"{what}, expected a name that ends in .png.")
    check_place(path, what, is_own)


def is_own(path: Path) -> bool:
    """Returns whether `write` wrote this file."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return bool(picture.info.get("Creator") == CREATOR)
    except Exception:  # Pillow raises many kinds of errors for other files.
        return False


def write(
    path: Path, entries: Sequence[Entry], cosines: Sequence[float], columns: sources.Columns
) -> None:
    """Draws the first MOST pictures in rows, with cosines and ids, and says which it lacks.

    Args:
      path: path of the PNG file.
      entries: the pictures, the best first.
      cosines: their cosines.
      columns: columns of parquet files, as in the run that embedded the pictures.
    """
    from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

    if len(entries) > MOST:
        print(f"--sheet draws only the first {MOST} pictures.", file=sys.stderr)
    entries = entries[:MOST]
    across = math.ceil(math.sqrt(len(entries)))
    down = -(-len(entries) // across)
    width, height = SIDE + MARGIN, SIDE + 2 * LINE + MARGIN
    drawn = Image.new("RGB", (across * width + MARGIN, down * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(drawn), ImageFont.load_default(LETTERS)
    found = _thumbnails(entries, columns)
    for i, (entry, cosine) in enumerate(zip(entries, cosines)):
        x, y = i % across * width + MARGIN, i // across * height + MARGIN
        thumbnail = found[i]
        if isinstance(thumbnail, str):
            print(f"--sheet lacks {printable(entry.id)}: {printable(thumbnail)}.", file=sys.stderr)
            draw.rectangle((x, y, x + SIDE, y + SIDE), "lightgrey")
        else:
            left, top = (SIDE - thumbnail.width) // 2, (SIDE - thumbnail.height) // 2
            drawn.paste(thumbnail, (x + left, y + top))
        for line, text in enumerate((f"{cosine:.4f}", printable(entry.id, CHARACTERS))):
            draw.text((x, y + SIDE + line * LINE), text, "black", font)
    about = PngImagePlugin.PngInfo()
    about.add_text("Creator", CREATOR)
    with written_atomically(path) as file:
        drawn.save(file, "PNG", pnginfo=about)


def _thumbnails(entries: Sequence[Entry], columns: sources.Columns) -> "list[Image.Image | str]":
    """Reads the pictures of entries; the result has reasons in place of those that it lacks."""
    found: list[Image.Image | str] = ["its source does not have it any more"] * len(entries)
    wanted: dict[str, dict[str, list[int]]] = collections.defaultdict(dict)
    for i, entry in enumerate(entries):
        # Of pictures that an early version embedded only the ids are known.
        rows = wanted[entry.origin.source or entry.id]
        rows.setdefault(entry.origin.row, []).append(i)
    with quiet():
        for source, rows in wanted.items():
            for row, thumbnail in _of_source(source, rows.keys(), columns):
                for i in rows.pop(row):
                    found[i] = thumbnail
                if not rows:
                    break
    return found


def _of_source(
    source: str, rows: Collection[str], columns: sources.Columns
) -> "Iterator[tuple[str, Image.Image | str]]":
    """Yields the pictures in these rows of a file, or the reasons why they cannot be read."""
    for unit in sources.find([source], columns, lambda *_: None):
        for picture in pictures_of(unit):
            row = picture.origin.row
            if row in rows:
                yield row, _thumbnail(picture)
            elif not row:  # It has the reason why the tar or the table cannot be read.
                why = _thumbnail(picture)
                yield from [(each, why) for each in list(rows)]


def _thumbnail(picture: Picture) -> "Image.Image | str":
    def check(pixels: int, copies: int) -> None:
        if pixels > MOST_PIXELS:
            raise LimitError(f"it has {pixels} pixels, more than {MOST_PIXELS}")

    try:
        with picture.open(math.inf) as file:
            thumbnail, _ = decode_upright(file, check, allow_truncated=True)
    except Exception as error:  # Pillow and packages for URLs raise many kinds of errors.
        return reason(error)
    thumbnail.thumbnail((SIDE, SIDE))
    return thumbnail
