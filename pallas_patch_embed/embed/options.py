"""The options of the command `embed`, in one place: their names, defaults and help."""

import argparse
import dataclasses
import os
import re
from typing import Any, Literal

from pallas_patch_embed.base.dtypes import DTYPES, LAYER_DTYPES
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.embed.pictures import MOST_BYTES, MOST_PIXELS

MOST_WORKERS = 32

# What `--output` names besides the patches of a hidden state, which are layer:N.
OUTPUTS = ("pooled", "mean", "class", "patches")
LAYER = re.compile(r"layer:(0|-?[1-9][0-9]{0,5})")

# Help of options that would not fit into the lines of `add_parser`.
HELP_CALIBRATION = "for 8 bits (default: that beside the checkpoint)"
HELP_CHANGED = "what to do with pictures that have changed (default: report)"
HELP_DTYPE = "dtype that is written (default: float32)"
HELP_LAYERS = "of the dense layers; the same (default: bfloat16)"
HELP_PATCHES = "float32, bfloat16, float8_e4m3fn or int8"
HELP_MIN_COSINE = "in 8 bits: keep layers in bfloat16 for this cosine"
HELP_MOST = "larger pictures are errors (default: %(default)s)"
HELP_MOVED = "the pictures that were in OLD are now in NEW"
HELP_RESIZE = "what resizes pictures (default: auto, a GPU)"
HELP_OUTPUT = "pooled, mean, class, patches or layer:N (default: pooled)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How pictures are embedded. The manifest and every shard record these options.

    Attributes:
      size: side of the square images in pixels; NaFlex images get at most as many patches as such
        an image. None for the size in the checkpoint.
      patch_dtype, dtype, calibration, min_cosine: as for `load_encoder`, and of texts as for
        `load_text_encoder`; in 8 bits there must be a file of a calibration.
      output: what an embedding is, one of OUTPUTS or "layer:N", as for `Embedder`.
      normalize: whether every vector of an embedding is divided by its Euclidean norm.
      embedding_dtype: dtype of the embeddings that are written, "float32" or "float16".
      image_column, id_column: columns of parquet files, as in `parquet.Parquet`.
      text_column: column of parquet files with texts, which are embedded instead of pictures.
      keep: names of the columns that are carried into the shards.
      repeated_ids: whether several pictures may have the same id.
      changed: what happens with pictures that have changed since they were embedded: "report" or
        "embed". None for "report" without asking servers about pictures at URLs that were named
        one by one.
      moved: pairs of an earlier and a present path or URL of a folder or file of pictures.
      allow_truncated: whether pictures are embedded whose end is missing.
      max_bytes: largest size of an encoded picture in bytes.
      max_pixels: largest number of pixels of a picture.
      retry_errors: whether pictures that an earlier run could not embed are retried.
      overwrite: whether the contents of the folder are removed first.
      batch: number of images that one device computes at a time; None for the platform's default.
      workers: number of pictures that are decoded at a time; None for one for each CPU.
      resize: what resizes pictures: the "host", with Pillow; the "device", with the same pixels; or
        "auto", the device if it is a GPU and can.
      ray: address of a Ray cluster, or "local" for a new one on this machine; None to run without
        Ray.
      quiet: whether to show no progress.

    Raises:
      ValueError: there is no such output.
    """

    size: int | None = None
    patch_dtype: str | None = None
    dtype: str = "bfloat16"
    calibration: str | None = None
    min_cosine: float | None = None
    output: str = "pooled"
    normalize: bool = False
    embedding_dtype: str = "float32"
    image_column: str | None = None
    text_column: str | None = None
    id_column: str | None = None
    keep: tuple[str, ...] = ()
    repeated_ids: bool = False
    changed: Literal["report", "embed"] | None = None
    moved: tuple[tuple[str, str], ...] = ()
    allow_truncated: bool = False
    max_bytes: int = MOST_BYTES
    max_pixels: int = MOST_PIXELS
    retry_errors: bool = False
    overwrite: bool = False
    batch: int | None = None
    workers: int | None = None
    resize: Literal["auto", "device", "host"] = "auto"
    ray: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        check_output(self.output)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Options":
        """Makes the options from a parsed command line."""
        given = {field.name: getattr(arguments, field.name) for field in _FIELDS}
        return cls(**given | {"moved": tuple(map(tuple, given["moved"]))})


_FIELDS = dataclasses.fields(Options)


def check_output(output: Any) -> str:
    """Returns the output; raises ValueError if there is none of this name."""
    if not isinstance(output, str) or (output not in OUTPUTS and not LAYER.fullmatch(output)):
        raise ValueError(
            f"output is {quoted(output)}, expected {', '.join(OUTPUTS)}, or layer:N with the "
            "number of a hidden state, such as layer:-2."
        )
    return output


def layer_of(output: str) -> int | None:
    """Returns the N of "layer:N", and None for the other outputs."""
    found = LAYER.fullmatch(output)
    return None if found is None else int(found[1])


def is_of_patches(output: str) -> bool:
    """Returns whether an embedding has a vector for each patch, and not a single one."""
    return output == "patches" or layer_of(output) is not None


def default_workers() -> int:
    """Returns the number of CPUs that this process may use, but at most MOST_WORKERS."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return min(os.cpu_count() or 1, MOST_WORKERS)


def output_name(text: str) -> str:
    try:
        return check_output(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive integer")
    return value


def names(text: str) -> tuple[str, ...]:
    """Parses names that are separated by commas."""
    found = tuple(name.strip() for name in text.split(","))
    if "" in found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} does not name different columns")
    return found


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of the command; `docs/embed.md` describes what a person rarely needs."""
    parser = commands.add_parser(
        "embed",
        help="embed pictures or texts with the encoders of a checkpoint",
        description="Writes the embeddings of pictures, or of texts, to an .npz file or a folder "
        "of parquet shards. If it ended early, the same command resumes the work. Exit code: 0 if "
        "every picture has an embedding; 3 if some have none; 2 if nothing was found or the "
        "arguments are bad; 4 if not everything could be written; 130, 143 or 129 after a signal. "
        "More: docs/embed.md.",
        usage="%(prog)s --checkpoint CHECKPOINT --out OUT [options] [pictures ...]",
    )
    add: Any = parser.add_argument
    add(
        "pictures",
        nargs="*",
        help="pictures, folders, tars (WebDataset) and parquet files, as paths or URLs, or .txt "
        "files with a text on each line; {000..099} and wildcards are expanded",
    )
    add(
        "--list",
        action="append",
        default=[],
        metavar="FILE",
        help="file with one of these on each line, or - for stdin",
    )
    add("--checkpoint", required=True, help="path, or name of a model on the Hugging Face hub")
    add("--out", required=True, help="a folder, or an .npz file for few pictures")
    group: Any = parser.add_argument_group("embeddings").add_argument
    group("--size", type=positive_integer, metavar="N", help="side of the images in pixels")
    group("--patch-dtype", choices=DTYPES, metavar="DTYPE", help=HELP_PATCHES)
    group("--dtype", choices=LAYER_DTYPES, default="bfloat16", metavar="DTYPE", help=HELP_LAYERS)
    group("--calibration", metavar="FILE", help=HELP_CALIBRATION)
    group("--min-cosine", type=float, metavar="X", help=HELP_MIN_COSINE)
    group("--output", type=output_name, default="pooled", metavar="WHAT", help=HELP_OUTPUT)
    group("--normalize", action="store_true", help="divide each vector by its norm")
    group("--embedding-dtype", choices=("float32", "float16"), default="float32", help=HELP_DTYPE)
    group = parser.add_argument_group("columns and ids").add_argument
    group("--image-column", metavar="NAME", help="column of parquet files with the pictures")
    group("--text-column", metavar="NAME", help="column of parquet files with texts to embed")
    group("--id-column", metavar="NAME", help="column of parquet files with ids (default: id)")
    group("--keep", type=names, default=(), metavar="A,B", help="carry these columns into shards")
    group("--repeated-ids", action="store_true", help="several pictures may have the same id")
    group = parser.add_argument_group("pictures").add_argument
    group("--allow-truncated", action="store_true", help="embed pictures whose end is missing")
    group("--max-pixels", type=positive_integer, default=MOST_PIXELS, metavar="N", help=HELP_MOST)
    group("--max-bytes", type=positive_integer, default=MOST_BYTES, metavar="N", help=HELP_MOST)
    group = parser.add_argument_group("resuming").add_argument
    group("--retry-errors", action="store_true", help="retry what earlier runs could not embed")
    group("--changed", choices=("report", "embed"), help=HELP_CHANGED)
    group("--moved", nargs=2, action="append", default=[], metavar=("OLD", "NEW"), help=HELP_MOVED)
    group("--overwrite", action="store_true", help="remove the shards in the folder first")
    group = parser.add_argument_group("running").add_argument
    group(
        "--batch",
        type=positive_integer,
        metavar="N",
        help="pictures at a time (default: 128; CPU: 4)",
    )
    group("--workers", type=positive_integer, metavar="N", help="decoders (default: one per CPU)")
    group("--resize", choices=("auto", "device", "host"), default="auto", help=HELP_RESIZE)
    group("--ray", nargs="?", const="local", metavar="ADDRESS", help="run on a Ray cluster")
    group("--quiet", action="store_true", help="do not show progress")
    return parser
