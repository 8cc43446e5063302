"""The command line: `demo` and `info`."""

import argparse
import importlib.metadata
import platform
import signal
import sys
from pathlib import Path

import jax
from absl import app, logging
from absl.flags import argparse_flags

from pallas_patch_embed import __version__, demo
from pallas_patch_embed.backends import Explanation, explain
from pallas_patch_embed.problem import NAMED_SHAPES, Problem, Target, padded

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "numpy", "safetensors")
INFO_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _explanations(device: jax.Device) -> list[tuple[str, dict[str, Explanation]]]:
    """For each named shape, with one image: what the backends say, by dtype."""
    found = []
    for shape in NAMED_SHAPES:
        K = padded(shape.K)
        table = (1, shape.S, shape.N) if shape.name.startswith("NaFlex") else (shape.S, shape.N)
        by_dtype = {}
        for dtype in INFO_DTYPES:
            problem = Problem(
                (1, shape.S, K), (shape.N, K), (shape.N,), table, dtype, "bfloat16", "bfloat16"
            )
            by_dtype[dtype] = explain(problem, Target.of(device))
        found.append((f"{shape.name:<20} S {shape.S:>4}  K {K:>4}  N {shape.N:>4}", by_dtype))
    return found


def info() -> None:
    """Prints versions, devices, and which backend serves each named SigLIP2 shape, and why."""
    print(f"pallas_patch_embed {__version__}, Python {platform.python_version()}")
    print(", ".join(f"{package} {_version(package)}" for package in PACKAGES))
    for device in jax.devices():
        print(f"device {device.id}: {device.device_kind} ({Target.of(device)})")
    device = jax.devices()[0]
    print(f"\nBackend for each shape on device {device.id}:\n")
    explanations = _explanations(device)
    width = len(explanations[0][0])
    print(" " * width, *(f"{dtype:<14}" for dtype in INFO_DTYPES))
    reasons = set()
    for name, by_dtype in explanations:
        print(name, *(f"{explanation.chosen:<14}" for explanation in by_dtype.values()))
        for explanation in by_dtype.values():
            reasons |= {(r.backend, r.reason) for r in explanation if not r.serves}
    if reasons:
        print("\nWhy not the others:")
        for backend, reason in sorted(reasons):
            print(f"  {backend}: {reason}")


def _parse(argv: list[str]) -> argparse.Namespace:
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
        "--seed", type=int, help="of the weights that are drawn (default: another every time)"
    )
    commands.add_parser("info", help="versions, devices, and what runs here and why")
    return parser.parse_args(argv[1:])


def main(arguments: argparse.Namespace) -> int | None:
    """Runs one command; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    if arguments.command == "info":
        return info()
    if arguments.seed is not None and arguments.seed < 0:
        print(f"--seed is {arguments.seed}, expected 0 or more.", file=sys.stderr)
        return 2
    if not arguments.out.absolute().parent.is_dir():
        print(f"--out is {arguments.out}: there is no such folder.", file=sys.stderr)
        return 2
    try:
        demo.run(arguments.out, arguments.seed)
    except ImportError as error:
        print(
            f"{error}. The demo needs Pillow and matplotlib: "
            "pip install 'pallas_patch_embed[demo]'.",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(f"Cannot write {arguments.out}: {error}", file=sys.stderr)
        return 1
    return 0


def run() -> None:
    """The console script."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `info | head` ends quietly.
    app.run(main, flags_parser=_parse)
