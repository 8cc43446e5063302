"""The command `search`, which ranks the pictures or texts in an output of `embed`."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.messages import printable, quoted
from pallas_patch_embed.commands import sheet
from pallas_patch_embed.embed.embedder import Embedder
from pallas_patch_embed.embed.options import is_of_patches, positive_integer
from pallas_patch_embed.embed.pictures import MOST_BYTES, reason
from pallas_patch_embed.embed.provenance import (
    DECIDING,
    DECIDING_TEXTS,
    CheckpointHash,
    file_sha256,
)
from pallas_patch_embed.embed.ranking import nearest
from pallas_patch_embed.embed.sources import Columns
from pallas_patch_embed.embed.text_embedder import FILES, TextEmbedder
from pallas_patch_embed.embed.units import LONGEST, Entry, opener
from pallas_patch_embed.embed.written import Written
from pallas_patch_embed.encoders.checkpoint import load_encoder
from pallas_patch_embed.encoders.hub import find_checkpoint


def add_parser(commands: Any) -> None:
    """Adds the command `search` and its arguments to the command line."""
    parser = commands.add_parser(
        "search",
        help="rank the pictures in an output of `embed` by a text or a picture",
        description="Prints the ids of the pictures in an output of `embed` that match a text, or "
        "another picture, best, and their cosines, of which it computes all. Exit code: 0, or 2 if "
        "the arguments are wrong or do not fit the output. More: docs/search.md.",
        usage='%(prog)s --checkpoint CHECKPOINT [options] OUT ("a text" | --image FILE)',
    )
    add: Any = parser.add_argument
    add("out", metavar="OUT", help="the --out of a run of `embed`: a folder or .npz file, or a URL")
    add("text", nargs="?", metavar="TEXT", help="the text")
    add("--checkpoint", required=True, help="the checkpoint of that run, or a model on the hub")
    add("--image", metavar="FILE", help="path or URL of a picture, instead of a text")
    add("--top", type=positive_integer, default=10, metavar="N", help="pictures (default: 10)")
    add("--json", action="store_true", help="print a JSON list, with the sources of the pictures")
    add("--sheet", type=Path, metavar="FILE.png", help="draw the best pictures, with their cosines")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
      OSError, ValueError: an argument is wrong, or the output does not fit it.
    """
    text, image = arguments.text, arguments.image
    if (text is None) == (image is None) or text == "":
        given = "neither is given" if text is image else "both are given" if text else "it is empty"
        raise ValueError(f"search: expected a text or an --image, but {given}.")
    if arguments.sheet is not None:
        sheet.check(arguments.sheet)
    checkpoint = find_checkpoint(arguments.checkpoint, FILES)
    written = Written.open(arguments.out)
    if written.has_texts and arguments.sheet is not None:
        raise ValueError(
            f"--sheet draws pictures, but {printable(written.url)} has texts. Leave it out."
        )
    _check_output(written, text)
    _check_checkpoint(written, checkpoint)
    check_devices()
    if text is not None:
        vector = _of_text(written, checkpoint, text)
    else:
        vector = _of_image(written, checkpoint, image)
    if not (np.isfinite(vector).all() and vector.any()):
        raise ValueError("The embedding of what is searched is zero or not finite.")
    ranking = nearest(written.parts, vector, arguments.top)
    if ranking.directionless:
        print(
            f"{ranking.directionless} of {ranking.searched} embeddings are zero or not finite, and "
            "left out.",
            file=sys.stderr,
        )
    if not len(ranking.found):
        raise ValueError(f"{printable(written.url)} has no other embeddings.")
    entries = _entries(written, ranking.found)
    cosines = ranking.found["cosine"].tolist()
    print(_json(entries, cosines) if arguments.json else _table(entries, cosines))
    if arguments.sheet is not None:
        options = written.options
        columns = Columns(options["image_column"], options["id_column"])
        sheet.write(arguments.sheet, entries, cosines, columns)
    return 0


def _check_output(written: Written, text: str | None) -> None:
    """Refuses an output that has no vectors, or none that can be compared with the query's."""
    output = written.settings["output"]
    if is_of_patches(output):
        raise ValueError(
            f"{printable(written.url)} was written with --output {output}, which has a vector for "
            "each patch, expected one for each picture. Embed the pictures into another output, "
            "with --output pooled."
        )
    if text is not None and output != "pooled":
        raise ValueError(
            f"{printable(written.url)} was written with --output {output}, which cannot be "
            "compared with a text. Search it with --image, or embed the pictures into another "
            "output, with --output pooled."
        )
    if not written.parts:
        raise ValueError(f"{printable(written.url)} has no embeddings yet. Run `embed` first.")


def _check_checkpoint(written: Written, checkpoint: Path) -> None:
    """Refuses an output of another checkpoint."""
    deciding = DECIDING_TEXTS if written.has_texts else DECIDING
    if CheckpointHash(checkpoint, deciding).is_that_of(written.settings["checkpoint_sha256"]):
        return
    if not _has_tower_of(written, checkpoint):
        raise ValueError(
            f"{printable(written.url)} was written with the checkpoint {quoted(written.model)}, "
            f"and --checkpoint {quoted(os.fspath(checkpoint))} is another one, whose vectors "
            "cannot be compared with those in the output. Give the checkpoint with which it was "
            "written, or embed the pictures into another output."
        )


def _has_tower_of(written: Written, checkpoint: Path) -> bool:
    """Returns whether the checkpoint has the same vision tower as that of an output.

    It may be in other files: for example, without the text tower. That is known only if the
    checkpoint of the output is still where it was.
    """
    earlier, dtype = Path(written.model), written.settings["patch_dtype"]
    if written.has_texts or not earlier.exists():
        return False
    if not CheckpointHash(earlier).is_that_of(written.settings["checkpoint_sha256"]):
        return False
    towers = [load_encoder(path, patch_dtype=dtype) for path in (earlier, checkpoint)]
    try:
        return jax.tree.all(jax.tree.map(np.array_equal, *towers))
    except ValueError:  # They have different configs.
        return False


def _of_text(written: Written, checkpoint: Path, text: str) -> np.ndarray:
    """Returns the embedding of a text."""
    try:
        embedder = TextEmbedder(checkpoint, batch=1, **_precision(written, written.has_texts))
    except ValueError as error:
        raise ValueError(f"{error} To search with a picture, give it with --image.") from error
    (vector,) = embedder.start(embedder.tokenizer([text]))()
    return vector


def _of_image(written: Written, checkpoint: Path, image: str) -> np.ndarray:
    """Returns the embedding of a picture, which is computed like those of pictures in the output.

    If the output has texts, it is computed in bfloat16, and the other options for pictures in the
    manifest are the defaults.
    """
    settings = written.settings
    embedder = Embedder(
        checkpoint,
        size=written.options["size"],
        patch_dtype=settings["patch_dtype"],
        output=settings["output"],
        batch=1,
        **_precision(written, not written.has_texts),
    )
    now = str(embedder.preprocessing)
    if now != settings["preprocessing"] and not written.has_texts:
        raise ValueError(
            f"{printable(written.url)} has pictures that were resized to "
            f"{printable(settings['preprocessing'])}, but --checkpoint "
            f"{quoted(os.fspath(checkpoint))} resizes them to {now}. Give the checkpoint with "
            "which the output was written, with its image processor."
        )
    try:
        decoded = embedder.preprocessing.image(opener(image, MOST_BYTES))
    except ImportError:
        raise  # It says what to install.
    except Exception as error:  # Pillow and packages for URLs raise many kinds of errors.
        raise ValueError(
            f"--image is {printable(image)}: it cannot be read ({printable(reason(error))}). "
            "Expected a picture, in a format that Pillow reads."
        ) from error
    (vector,) = embedder.start([decoded])()
    return vector


def _precision(written: Written, same_tower: bool) -> dict[str, Any]:
    """Returns the precision of a query: the output's if its tower is the same, or bfloat16."""
    if not same_tower:
        return {}
    settings = written.settings
    return dict(
        dtype=settings["dtype"],
        calibration=_calibration(written),
        min_cosine=settings["min_cosine"],
    )


def _calibration(written: Written) -> str | None:
    """Returns the path of the calibration with which an output was written, if it is in 8 bits."""
    settings = written.settings
    if settings["dtype"] not in EIGHT_BITS:
        return None
    path = str(written.options["calibration"])
    if not os.path.isfile(path) or file_sha256(Path(path)) != settings["calibration_sha256"]:
        raise ValueError(
            f"{printable(written.url)} was written with --dtype {settings['dtype']}, but its "
            f"calibration is missing or has changed: {printable(path)}. Restore this file, or "
            f"search with a {'picture' if written.has_texts else 'text'}."
        )
    return path


def _entries(written: Written, found: np.ndarray) -> list[Entry]:
    """Returns the pictures of embeddings that were found, in their order."""
    entries: dict[tuple[int, int], Entry] = {}
    for part in np.unique(found["part"]):
        rows = np.sort(found["row"][found["part"] == part]).tolist()
        entries |= zip([(part, row) for row in rows], written.parts[part].entries(rows))
    return [entries[part, row] for part, row in found[["part", "row"]].tolist()]


def _table(entries: list[Entry], cosines: list[float]) -> str:
    lines = [f"{c:>7.4f}  {printable(e.id, most=LONGEST)}" for e, c in zip(entries, cosines)]
    return "\n".join([f"{'cosine':>7}  id", *lines])


def _json(entries: list[Entry], cosines: list[float]) -> str:
    found = [
        {"id": e.id, "cosine": c, "source": e.origin.source or None, "row": e.origin.row or None}
        for e, c in zip(entries, cosines)
    ]
    return json.dumps(found, indent=1)
