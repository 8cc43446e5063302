"""Compares whole encoders with Hugging Face's under torch.compile, and with one in flax.

  python -m benchmarks.encoder_peers --minutes 8 --out bench

The contenders have the same random weights, from a checkpoint in Hugging Face's layout, and compute
embeddings of the same uint8 images on the device in bfloat16. An encoder whose activation is not
the tanh GELU is also measured with it: the difference is the activation's cost. With --dtypes the
encoder is also measured in 8 bits, as `load_encoder` loads it. Its name says which layers stay in
bfloat16. Transformers' model then has torchao's layers in its blocks, which compute a scale for
each token. It is compiled in mode reduce-overhead if that is measured, and otherwise in the default
mode. JAX and torch each run in their own process, and the contenders take turns. Times are wall
times. A burst times single calls, each until its result is ready; in the sustained turns calls
follow one another, and the GPU's energy is measured. Peak memory includes weights, images and all
intermediate results. Each case is written to encoder_peers.jsonl as soon as it is measured.

Peers that are not installed, or have no encoder of the family, are left out.
"""

import argparse
import collections
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoder_contenders import FRAMEWORKS
from benchmarks.turns import Process

HERE = Path(__file__).resolve().parents[1]

# Modes of torch.compile, and up to and from how many images a call which of them are measured.
MODES = ("default", "reduce-overhead", "max-autotune")
FEW_IMAGES, MANY_IMAGES = 16, 512

# Calls of a burst of few images, whose times vary more.
BURST, BURST_OF_FEW = 5, 50


@dataclasses.dataclass(frozen=True)
class EncoderCase:
    """An encoder, a number of images, modes of torch.compile, and dtypes of 8 bits."""

    encoder: str
    images: int
    modes: tuple[str, ...]
    dtypes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EncoderMeasurement:
    """The measurements of one contender in one case.

    Attributes:
      encoder, images: the case.
      contender: name of the contender.
      burst, sustained: milliseconds per call in each regime, median over all turns.
      joules: energy per image in the sustained regime; None if it is unknown.
      compile_seconds, peak_bytes: as in `encoder_contenders.Contender`.
      difference: relative difference between its embeddings and those of the first contender.
    """

    encoder: str
    images: int
    contender: str
    burst: float
    sustained: float
    joules: float | None
    compile_seconds: float
    peak_bytes: int | None
    difference: float


def measure(
    case: EncoderCase, folder: Path, processes: dict[str, Process], chosen: argparse.Namespace
) -> tuple[list[EncoderMeasurement], dict[str, str]]:
    """Measures all contenders of a case; returns the results, and why contenders were left out."""
    arguments = dict(folder=str(folder), images=case.images, modes=case.modes, dtypes=case.dtypes)
    found: dict[str, dict[str, Any]] = {}
    if "max-autotune" in case.modes:
        # Both frameworks autotune by timing, and would disturb each other if they did at once.
        found = {name: p.call("prepare", **arguments) for name, p in processes.items()}
    else:
        for process in processes.values():
            process.tell("prepare", **arguments)
        found = {name: process.answer() for name, process in processes.items()}
    left_out = {k: v for answer in found.values() for k, v in answer["left_out"].items()}
    compiled = {
        (framework, name): facts
        for framework, answer in found.items()
        for name, facts in answer["compiled"].items()
    }
    outputs = {}
    for framework, name in list(compiled):
        try:
            found_embeddings = processes[framework].call("embeddings", name=name)
            outputs[framework, name] = np.asarray(found_embeddings)
        except RuntimeError as reason:
            del compiled[framework, name]
            left_out[name] = str(reason)
    turns = collections.defaultdict(list)
    for regime, rounds in (("burst", chosen.turns), ("sustained", max(1, chosen.turns - 1))):
        for _, key in ((i, key) for i in range(rounds) for key in compiled):
            options = dict(regime=regime, rest=chosen.rest, seconds=chosen.seconds)
            options["calls"] = BURST_OF_FEW if case.images <= FEW_IMAGES else BURST
            turns[key, regime].append(processes[key[0]].call("turn", name=key[1], **options))

    def median(key, regime, what):
        values = [turn[what] for turn in turns[key, regime]]
        return None if None in values else statistics.median(values)

    expected = next(iter(outputs.values()))
    results = []
    for key, facts in compiled.items():
        joules = median(key, "sustained", "joules")
        off = np.linalg.norm(outputs[key] - expected) / np.linalg.norm(expected)
        results.append(
            EncoderMeasurement(
                case.encoder,
                case.images,
                key[1],
                median(key, "burst", "milliseconds"),
                median(key, "sustained", "milliseconds"),
                joules and joules / case.images,
                facts["compile_seconds"],
                facts["peak_bytes"],
                float(off),
            )
        )
    return results, left_out


def table(found: list[EncoderMeasurement]) -> str:
    """Tabulates the contenders of one case, the fastest first."""
    head = f"{'':45}{'burst ms':>10}{'sustained':>11}{'images/s':>11}{'J/image':>9}"
    lines = [f"{head}{'GB':>7}{'compile s':>11}{'difference':>12}"]
    for r in sorted(found, key=lambda r: r.sustained):
        joules = "" if r.joules is None else f"{r.joules:.4f}"
        peak = "" if r.peak_bytes is None else f"{r.peak_bytes / 1e9:.2f}"
        rate = 1e3 * r.images / r.sustained
        lines.append(
            f"{r.contender:45}{r.burst:10.2f}{r.sustained:11.2f}{rate:11,.0f}{joules:>9}"
            f"{peak:>7}{r.compile_seconds:11.1f}{r.difference:12.3%}"
        )
    return "\n".join(lines)


def modes_for(images: int) -> tuple[str, ...]:
    """Returns the modes of torch.compile that are measured for a number of images per call.

    With few images they are those that record CUDA graphs.
    """
    if images <= FEW_IMAGES:
        return ("reduce-overhead", "max-autotune")
    return ("max-autotune",) if images >= MANY_IMAGES else ("default",)


def run(
    chosen: argparse.Namespace,
) -> Iterator[tuple[list[EncoderMeasurement], dict[str, str]]]:
    """Measures the cases of a command line until the time limit is reached."""
    from benchmarks import checkpoints

    pythons = {"jax": sys.executable, "torch": chosen.torch_python}
    end = time.monotonic() + 60 * chosen.minutes
    cases = [
        EncoderCase(name, n, tuple(chosen.modes or modes_for(n)), tuple(chosen.dtypes))
        for n in sorted(chosen.images, reverse=True)
        for name in chosen.encoders
    ]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
        processes = {
            name: Process(
                name,
                [pythons[name], "-m", "benchmarks.encoder_contenders", name],
                environment,
                HERE,
            )
            for name in chosen.frameworks
        }
        try:
            for case in cases:
                if time.monotonic() > end:
                    print(
                        f"{case.encoder}, {case.images} images: skipped, out of time.", flush=True
                    )
                    continue
                own = checkpoints.kept(case.encoder, chosen.checkpoints or Path(temporary))
                yield measure(case, own, processes, chosen)
        finally:
            for process in processes.values():
                process.end()


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    from benchmarks.checkpoints import ENCODERS, add_folder
    from pallas_patch_embed.base.dtypes import EIGHT_BITS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoder_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument(
        "--images",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 64, 512],
        help="images per call; default: %(default)s",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        help="modes of torch.compile; by default both that record CUDA graphs for at most "
        f"{FEW_IMAGES} images, max-autotune for at least {MANY_IMAGES}, and otherwise its default",
    )
    parser.add_argument(
        "--dtypes", nargs="*", choices=EIGHT_BITS, default=[], help="also in 8 bits"
    )
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--torch-python", default=sys.executable, help="Python with torch")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--turns", type=int, default=3, help="number of turns of each contender")
    parser.add_argument("--rest", type=float, default=0.5, help="idle seconds before each burst")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="duration of a sustained turn in seconds"
    )
    add_folder(parser)
    parser.add_argument("--out", type=Path, help="folder for encoder_peers.jsonl")
    return parser.parse_args()


def main() -> None:
    """Prints and records every case."""
    chosen = arguments()
    path = chosen.out and chosen.out / "encoder_peers.jsonl"
    if path:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    for found, left_out in run(chosen):
        for name, reason in left_out.items():
            print(f"without {name}: {reason}")
        if found:
            print(f"\n{found[0].encoder}, {found[0].images} images\n{table(found)}", flush=True)
        records = [{"kind": "encoder peer"} | dataclasses.asdict(r) for r in found]
        records += [{"kind": "left out", "what": k, "reason": v} for k, v in left_out.items()]
        if path:
            with path.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
