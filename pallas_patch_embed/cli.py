"""The command line: `check`, `demo`, `embed`, `info` and `tune`."""

import argparse
import os
import platform
import signal
import sys
import warnings
from pathlib import Path

import jax
from absl import app, logging
from absl.flags import argparse_flags

from pallas_patch_embed import __version__, demo, streams
from pallas_patch_embed.backends import BACKENDS, Explanation, explain, stored
from pallas_patch_embed.check import command as check
from pallas_patch_embed.chips import Target
from pallas_patch_embed.embed import command as embed
from pallas_patch_embed.embed import output
from pallas_patch_embed.embed.pictures import printable
from pallas_patch_embed.files import check_place
from pallas_patch_embed.problem import (
    DTYPES,
    NAMED_SHAPES,
    VIT_SHAPES,
    PatchLayout,
    Problem,
    padded,
)
from pallas_patch_embed.tune import command as tune
from pallas_patch_embed.versions import PACKAGES, version

# The commands that need an extra of the same name.
EXTRAS = ("demo", "embed")

INFO_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


def _explanations(device: jax.Device) -> list[tuple[str, dict[str, Explanation]]]:
    """For each named shape, with one uint8 image or video (NaFlex: its patches): the answers."""
    found = []
    for shape in (*NAMED_SHAPES, *VIT_SHAPES):
        K = padded(shape.K)
        naflex = shape.name.startswith("NaFlex")
        table = (1, shape.S, shape.N) if naflex else (shape.S, shape.N)
        frames = () if shape.frames is None else (shape.frames,)
        by_dtype = {}
        for dtype in INFO_DTYPES:
            problem = Problem(
                patches=(1, shape.S, K),
                weight=(shape.N, K),
                scale=(shape.N,),
                table=table,
                dtype=dtype,
                table_dtype="bfloat16",
                out_dtype="bfloat16",
                layout=None if naflex else PatchLayout(shape.patch, shape.frames, shape.prefix),
                images=None if naflex else (1, *frames, shape.image, shape.image, 3),
            )
            by_dtype[dtype] = explain(problem, Target.of(device))
        found.append((f"{shape.name:<20} S {shape.S:>4}  K {K:>4}  N {shape.N:>4}", by_dtype))
    return found


def info() -> None:
    """Prints versions, devices, and which backend serves the shapes of released models, and why."""
    print(f"pallas_patch_embed {__version__}, Python {platform.python_version()}")
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))
    for device in jax.devices():
        print(f"device {device.id}: {device.device_kind} ({Target.of(device)})")
    device = jax.devices()[0]
    print(f"\nBackend for each shape on device {device.id}:\n")
    explanations = _explanations(device)
    width = len(explanations[0][0])
    print(" " * width, *(f"{dtype:<14}" for dtype in INFO_DTYPES))
    for note in stored.ignored(Target.of(device)):
        print(f"\n{note}")
    reasons = set()
    for name, by_dtype in explanations:
        print(name, *(f"{explanation.chosen:<14}" for explanation in by_dtype.values()))
        for explanation in by_dtype.values():
            reasons |= {(r.backend, r.reason) for r in explanation if r.reason}
    if reasons:
        print("\nWhy not the others:")
        for backend, reason in sorted(reasons):
            print(f"  {backend}: {reason}")
    print("\nWhy to trust them:")
    for name, module in BACKENDS.items():
        print(f"  {name}: {module.EVIDENCE}")


def parse(argv: list[str]) -> argparse.Namespace:
    """A command line, the program's name first; exits with 2 and the reason if it is wrong."""
    parser = argparse_flags.ArgumentParser(
        prog="pallas-patch-embed",
        description="The patch embedding of SigLIP and SigLIP2 vision encoders.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser(
        "demo", help="embed three photographs in every dtype; print a table, write a picture"
    )
    demo_parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="the picture (default: demo.png)"
    )
    demo_parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights that are drawn (default: 0)"
    )
    demo_parser.set_defaults(main=_run_demo)
    embed_parser = commands.add_parser(
        "embed",
        help="embed pictures with the vision encoder of a SigLIP or SigLIP2 checkpoint",
        description="Writes the embeddings of pictures to one .npz file, or to a folder of parquet "
        "shards. The same command goes on where it was ended, whatever ended it. "
        "Exit code: 0 if all pictures were embedded, 3 if some could not be, 2 if nothing was "
        "written because of the arguments, the checkpoint or all of the pictures, 4 if the rest "
        "could not be written, or an .npz file only elsewhere, 130 if it was interrupted (143 by "
        "SIGTERM, 129 by SIGHUP).",
    )
    embed_parser.add_argument(
        "pictures",
        nargs="*",
        help="pictures, folders, WebDataset tars and parquet files, on this machine or at URLs "
        "(s3://, gs://, hf://, ...); braces like {000..099} are expanded; links are followed, and "
        "every file is embedded once",
    )
    embed_parser.add_argument(
        "--list",
        action="append",
        default=[],
        metavar="FILE",
        help="a file with one of the above on each line; - for standard input",
    )
    embed_parser.add_argument(
        "--checkpoint",
        required=True,
        help="Hugging Face folder, .safetensors file, big_vision .npz file, or the name of a model "
        "on the Hugging Face hub",
    )
    embed_parser.add_argument(
        "--out",
        required=True,
        metavar="OUT",
        help="a name that ends in .npz, for a small number of pictures; or a folder, also at a "
        "URL, for any number",
    )
    embed_parser.add_argument(
        "--overwrite",
        action="store_true",
        help="remove first what is in the folder, and begin afresh",
    )
    embed_parser.add_argument(
        "--retry-errors",
        action="store_true",
        help="try pictures again that an earlier run into the folder could not embed",
    )
    embed_parser.add_argument(
        "--embedding-dtype",
        choices=("float32", "float16"),
        default="float32",
        help="dtype of the embeddings that are written (default: float32)",
    )
    embed_parser.add_argument(
        "--image-column",
        metavar="NAME",
        help="column of parquet files with the pictures (default: the only one of bytes)",
    )
    embed_parser.add_argument(
        "--id-column",
        metavar="NAME",
        help="column of parquet files with the ids (default: id, otherwise path#row)",
    )
    embed_parser.add_argument(
        "--size",
        type=positive_integer,
        metavar="N",
        help="side of the images in pixels; NaFlex images have as many patches as an image of "
        "N x N (default: as the checkpoint says)",
    )
    embed_parser.add_argument(
        "--batch",
        type=positive_integer,
        default=64,
        metavar="N",
        help="pictures that a device computes at a time (default: 64)",
    )
    embed_parser.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help="number of pictures that are decoded at a time, each in a process; it is smaller if "
        f"they are large, to bound the memory (default: one a CPU, up to {embed.MOST_WORKERS})",
    )
    embed_parser.add_argument(
        "--patch-dtype", choices=DTYPES, default="bfloat16", help="dtype of the patch embedding"
    )
    embed_parser.add_argument(
        "--normalize", action="store_true", help="divide every embedding by its Euclidean norm"
    )
    embed_parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run on a Ray cluster: its address, or none for one on this machine",
    )
    embed_parser.add_argument("--quiet", action="store_true", help="show no progress")
    embed_parser.set_defaults(main=_run_embed)
    check.add_parser(commands)
    info_parser = commands.add_parser("info", help="versions, devices, and what runs here and why")
    info_parser.set_defaults(main=_run_info)
    tune.add_parser(commands)
    return parser.parse_args(argv[1:])


def positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _run_demo(arguments: argparse.Namespace) -> int:
    out = arguments.out
    check_place(out, f"--out is {printable(out)}")
    if arguments.seed is not None and arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}, expected 0 or more.")
    demo.run(out, arguments.seed)
    sys.stdout.flush()
    return 0


def _run_embed(arguments: argparse.Namespace) -> int:
    # glibc returns freed blocks of more than 32 MiB to the system at once, but every thread keeps
    # some of 16 MiB, Pillow's default: 3.0 GB instead of 1.0 with 8 threads and pictures of
    # 13000 x 13000 pixels.
    os.environ.setdefault("PILLOW_BLOCK_SIZE", "64m")
    from PIL import Image

    # It warns of pictures above 89 million pixels. The memory for them is bounded here, and Pillow
    # refuses those above twice that number.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    if not arguments.pictures and not arguments.list:
        took = "" if arguments.ray in (None, "local") else f" --ray took {arguments.ray!r}."
        raise ValueError(f"embed: there are no pictures.{took} Name some, or a --list of them.")
    try:
        errors = embed.run(
            arguments.checkpoint,
            arguments.pictures,
            arguments.out,
            lists=arguments.list,
            size=arguments.size,
            batch=arguments.batch,
            patch_dtype=arguments.patch_dtype,
            normalize=arguments.normalize,
            embedding_dtype=arguments.embedding_dtype,
            image_column=arguments.image_column,
            id_column=arguments.id_column,
            overwrite=arguments.overwrite,
            retry_errors=arguments.retry_errors,
            workers=arguments.workers,
            quiet=arguments.quiet,
            ray=arguments.ray,
        )
    except (output.WrittenElsewhereError, output.UnfinishedError) as error:
        print(error, file=sys.stderr)
        return 4
    return 3 if errors else 0


def _run_info(arguments: argparse.Namespace) -> int:
    del arguments
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `info | head` ends quietly.
    info()
    sys.stdout.flush()
    return 0


def main(arguments: argparse.Namespace) -> int:
    """Runs one command; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    try:
        return arguments.main(arguments)
    except ImportError as error:
        extra = f"[{arguments.command}]" if arguments.command in EXTRAS else ""
        print(
            f"{error}. A package that `{arguments.command}` needs is missing or does not work: "
            f"pip install 'pallas_patch_embed{extra}'.",
            file=sys.stderr,
        )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
    except jax.errors.JaxRuntimeError as error:
        print(f"{error}\nIf memory ran out, choose a smaller --batch or --size.", file=sys.stderr)
    return 2


def run() -> None:
    """The command line; `pallas_patch_embed.__main__` has prepared signals and streams for it."""
    sys.stderr = streams.Forgiving(sys.stderr or open(os.devnull, "w"))
    try:
        app.run(main, flags_parser=parse)
    finally:
        if sys.stdout is not None:
            streams.Forgiving(sys.stdout).flush()
