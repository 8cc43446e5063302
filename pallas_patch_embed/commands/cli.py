"""The command line: `accuracy`, `check`, `demo`, `embed`, `info`, `search` and `tune`."""

import argparse
import os
import platform
import signal
import sys
from pathlib import Path

import jax
from absl import app, logging
from absl.flags import argparse_flags

from pallas_patch_embed import __version__
from pallas_patch_embed.backends import Explanation, explain, stored
from pallas_patch_embed.base import streams
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.problem import (
    NAMED_SHAPES,
    VIT_SHAPES,
    PatchGeometry,
    Problem,
    padded,
)
from pallas_patch_embed.base.versions import PACKAGES, version
from pallas_patch_embed.commands import accuracy, demo, search
from pallas_patch_embed.commands.check import command as check
from pallas_patch_embed.commands.tune import command as tune
from pallas_patch_embed.embed import command as embed
from pallas_patch_embed.embed import options as embed_options
from pallas_patch_embed.embed import output

# The extras that commands need.
EXTRAS = {"accuracy": "demo,embed", "demo": "demo", "embed": "embed", "search": "embed,text"}

INFO_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


def _explanations(device: jax.Device) -> list[tuple[str, dict[str, Explanation]]]:
    """Explains the choice of backend for one uint8 image, video, or NaFlex batch of each shape.

    Returns a line of text and the explanation by dtype, for each named shape.
    """
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
                geometry=None if naflex else PatchGeometry(shape.patch, shape.frames, shape.prefix),
                images=None if naflex else (1, *frames, shape.image, shape.image, 3),
            )
            by_dtype[dtype] = explain(problem, Target.of(device))
        found.append((f"{shape.name:<20} S {shape.S:>4}  K {K:>4}  N {shape.N:>4}", by_dtype))
    return found


def info() -> None:
    """Prints versions, devices, the backend for the shapes of released models, and the reasons."""
    check_devices()
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
        print("\nWhy the other backends are not used:")
        for backend, reason in sorted(reasons):
            print(f"  {backend}: {reason}")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses a command line, which begins with the program's name.

    Exits with code 2 and prints the reason if the command line is wrong.
    """
    parser = argparse_flags.ArgumentParser(
        prog="pallas-patch-embed",
        description="Computes the patch embedding of vision encoders, and whole encoders.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser(
        "demo", help="embed three photographs in every dtype, print a table, and write a picture"
    )
    demo_parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.png"),
        help="path of the picture to write (default: demo.png)",
    )
    demo_parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random weights (default: 0)"
    )
    demo_parser.set_defaults(main=_run_demo)
    accuracy.add_parser(commands)
    embed_parser = embed_options.add_parser(commands)
    embed_parser.set_defaults(main=_run_embed)
    check.add_parser(commands)
    info_parser = commands.add_parser(
        "info", help="print versions, devices, and which backends run here and why"
    )
    info_parser.set_defaults(main=_run_info)
    search.add_parser(commands)
    tune.add_parser(commands)
    arguments, rest = parser.parse_known_args(argv[1:])
    # Before Python 3.12.7 argparse leaves a positional argument with nargs="?" behind an option.
    match rest if arguments.command == "search" and arguments.text is None else []:
        case ["--", text]:
            arguments.text, rest = text, []
        case [text] if not text.startswith("-"):
            arguments.text, rest = text, []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _run_demo(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None and arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}, expected 0 or more.")
    demo.run(arguments.out, arguments.seed)
    sys.stdout.flush()
    return 0


def _run_embed(arguments: argparse.Namespace) -> int:
    # glibc returns freed blocks of more than 32 MiB to the system at once, but keeps some smaller
    # blocks for every thread. With Pillow's default of 16 MiB, 8 threads that read pictures of
    # 13000 x 13000 pixels use 3.0 GB instead of 1.0 GB.
    os.environ.setdefault("PILLOW_BLOCK_SIZE", "64m")
    if not arguments.pictures and not arguments.list:
        address = arguments.ray not in (None, "local")
        taken = f" {arguments.ray!r} was read as the address of --ray." if address else ""
        raise ValueError(f"embed: no pictures are given.{taken} Give pictures, or a --list.")
    try:
        options = embed_options.Options.of(arguments)
        missing = embed.run(
            arguments.checkpoint, arguments.pictures, arguments.out, arguments.list, options
        )
    except (output.WrittenElsewhereError, output.UnfinishedError) as error:
        print(error, file=sys.stderr)
        return 4
    return 3 if missing else 0


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
        extra = f"[{EXTRAS[arguments.command]}]" if arguments.command in EXTRAS else ""
        print(
            f"{str(error).rstrip('.')}. A package that `{arguments.command}` needs is missing or "
            f"does not work. Install it with: pip install 'pallas_patch_embed{extra}'.",
            file=sys.stderr,
        )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
    except jax.errors.JaxRuntimeError as error:
        print(f"{error}\nIf memory ran out, pass a smaller --batch or --size.", file=sys.stderr)
    return 2


def run() -> None:
    """Runs the command line, after `__main__` has prepared signals and streams."""
    sys.stderr = streams.Forgiving(sys.stderr or open(os.devnull, "w"))
    try:
        app.run(main, flags_parser=parse)
    finally:
        if sys.stdout is not None:
            streams.Forgiving(sys.stdout).flush()
