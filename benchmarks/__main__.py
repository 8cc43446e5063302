"""Measures the operator and its alternatives on this machine's device.

  python -m benchmarks --quick                 # under a minute
  python -m benchmarks --out bench             # tables, bench/results.jsonl and pictures
  python -m benchmarks --draw bench            # redraws the pictures of bench/results.jsonl

Every output is checked before it is timed. Contenders are timed in one process, interleaved.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import accuracy, contenders, encoder, plots, results
from benchmarks.ceilings import Ceiling, memory_ceilings, product_ceiling
from benchmarks.contenders import SOURCES, BenchmarkProblem, Entry
from benchmarks.results import REGIMES, Measurement
from pallas_patch_embed.base.dtypes import DTYPES
from pallas_patch_embed.base.problem import NAMED_SHAPES, named_shape
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender, Timing

PARTS = ("operator", "encoder", "accuracy")

# Yields the records of a part in groups, as soon as they are measured.
Records = Iterator[list[dict[str, Any]]]

# NaFlex is left out: its positions differ between images, which only this operator accepts.
SHAPES = tuple(shape.name for shape in NAMED_SHAPES if not shape.name.startswith("NaFlex"))

# Bytes that evict an operand from every cache when they are accessed: twice the L2 cache of a B200.
OUT_OF_CACHE = 2 * 126 * 2**20

# Single calls are measured for at most CALL_IMAGES images, sustained runs for at least
# SUSTAINED_IMAGES.
CALL_IMAGES, SUSTAINED_IMAGES = 64, 1024

ENCODER_IMAGES = {"B/16 224": 512, "So400m/14 384": 64}


def ceilings(dtypes: list[str], gigabytes: float, size: int) -> dict[str, float]:
    """Measures bytes per second by kind of access and operations per second by dtype, in bursts."""
    limits: dict[str, Ceiling] = memory_ceilings(gigabytes)
    limits |= {dtype: product_ceiling(dtype, size) for dtype in dtypes}
    compared = {name: limit.contender for name, limit in limits.items()}
    timing.compile_all(compared.values())
    found = timing.burst(compared, rounds=3, rest=0.2)
    return {
        name: (limits[name].bytes or limits[name].operations) / found[name].milliseconds * 1e3
        for name in limits
    }


def regimes(case: BenchmarkProblem, chosen: list[str]) -> dict[str, str | None]:
    """Maps each chosen regime to the reason why this case is not measured in it, or to None."""
    small, many = case.bytes("patches") < OUT_OF_CACHE // 2, case.images >= SUSTAINED_IMAGES
    told = {
        "burst": (True, None),
        "cold": (small, "the operands do not fit in a cache anyway."),
        "sustained": (
            many or not timing.on_gpu(),
            f"it is only measured for {SUSTAINED_IMAGES} images or more.",
        ),
        "call": (
            case.images <= CALL_IMAGES,
            f"it is only measured for {CALL_IMAGES} images or fewer.",
        ),
    }
    found = {regime: None if says else reason for regime, (says, reason) in told.items()}
    return {regime: found[regime] for regime in chosen}


def measure(
    case: BenchmarkProblem, limits: dict[str, float], chosen: argparse.Namespace
) -> tuple[list[Measurement], dict[str, str]]:
    """Measures every contender in every regime and from every source.

    Returns:
      The results; and for each contender or regime that was left out, name -> reason.
    """
    data = contenders.draw(case)
    found, left_out = contenders.entries(
        case, data, tuple(chosen.sources), built=not chosen.quick, chosen=chosen.contenders
    )
    measured = []
    for regime, reason in regimes(case, chosen.regimes).items():
        if reason:
            left_out[regime] = reason
            continue
        entries = cold(case, found) if regime == "cold" else found
        for source in chosen.sources:
            own = {name: e for (of, name), e in entries.items() if of == source}
            compared = {name: entry.contender for name, entry in own.items()}
            times = run(regime, compared, chosen)
            measured += [
                results.result(case, source, name, own[name].ours, regime, t)
                for name, t in times.items()
            ]
    return results.compared(measured, limits), left_out


def cold(
    case: BenchmarkProblem, found: dict[tuple[str, str], Entry]
) -> dict[tuple[str, str], Entry]:
    """Returns the entries with contenders whose calls cycle through copies of the operands."""
    copies = math.ceil(OUT_OF_CACHE / case.bytes("patches"))

    def copy(x):
        return x.copy() if isinstance(x, jax.Array) else x.clone()

    def with_copies(entry):
        operands = entry.contender.operands
        further = tuple(jax.tree.map(copy, operands) for _ in range(copies))
        contender = dataclasses.replace(entry.contender, further=further)
        return dataclasses.replace(entry, contender=contender)

    return {key: with_copies(entry) for key, entry in found.items()}


def run[Name](
    regime: str, compared: dict[Name, Contender], chosen: argparse.Namespace, **calls: int
) -> dict[Name, Timing]:
    """Times contenders in a regime; `calls=` sets the calls of a burst or sustained turn."""
    if regime == "sustained":
        return timing.sustained(compared, seconds=chosen.seconds, **calls)
    if regime == "call":
        return timing.latency(compared, rounds=20 * chosen.rounds)
    return timing.burst(compared, rounds=chosen.rounds, rest=chosen.rest, **calls)


def operator(chosen: argparse.Namespace) -> Records:
    """Measures the operator's cases; prints a table for each source and regime."""
    gpu = timing.on_gpu()
    limits = ceilings(chosen.dtypes, *((1.0, 8192) if gpu else (0.05, 1024)))
    units = dict.fromkeys(limits, "GFLOP/s") | {"copy": "GB/s", "widen": "GB/s"}
    rates = (f"{name} {rate / 1e9:,.0f} {units[name]}" for name, rate in limits.items())
    print(f"measured ceilings of this device: {', '.join(rates)}")
    print("  copy writes as many bytes as it reads, and widen writes twice as many; a dtype stands")
    print("  for a matrix product")
    print(results.legend(power=gpu), flush=True)
    yield [{"kind": "ceiling", "name": name, "rate": rate} for name, rate in limits.items()]
    cases, without = [], collections.defaultdict(list)
    for name, images, dtype, pixels in itertools.product(
        chosen.shapes, chosen.images, chosen.dtypes, chosen.pixels
    ):
        case = BenchmarkProblem(named_shape(name), images, dtype, pixels)
        measured, left_out = measure(case, limits, chosen)
        cases.append(case)
        title = f"{name}, {images} images, {dtype}, {pixels} pixels"
        for source, regime in dict.fromkeys((r.source, r.regime) for r in measured):
            own = [r for r in measured if (r.source, r.regime) == (source, regime)]
            print(f"\n{title}, from {source}, {regime}: {REGIMES[regime]}")
            print(results.table(own), flush=True)
        for what, reason in left_out.items():
            without[what, reason].append(case)
        case_record = dict(kind="left out", shape=name, images=images, dtype=dtype)
        yield [case_record | dict(what=w, reason=r) for w, r in left_out.items()]
        yield [r.record() for r in measured]
    if without:
        print(f"\n{results.left_out(without, cases)}", flush=True)


def encoders(chosen: argparse.Namespace) -> Records:
    """Measures encoders end to end."""
    measures = {
        regime: functools.partial(run, regime, chosen=chosen, calls=3)
        for regime in chosen.regimes
        if regime in ("burst", "sustained")
    }
    if not measures:
        print("\nEncoder: skipped, because neither burst nor sustained is among the regimes.")
        return
    for name in chosen.shapes:
        if name not in ENCODER_IMAGES:
            print(f"\nEncoder: skipped for {name}; it exists for {', '.join(ENCODER_IMAGES)}.")
            continue
        images = ENCODER_IMAGES[name] if timing.on_gpu() else 1
        found = encoder.speeds(name, images, chosen.dtypes, measures)
        for regime in measures:
            title = f"{name}, bfloat16, {images} images per call"
            print(f"\nEncoder {title}, {regime}: {REGIMES[regime]}")
            print(encoder.table([s for s in found if s.regime == regime]), flush=True)
        yield [{"kind": "encoder"} | dataclasses.asdict(s) for s in found]


def accuracies(chosen: argparse.Namespace) -> Records:
    """Measures the errors of each dtype on photographs."""
    try:
        found = accuracy.accuracies(chosen.checkpoint)
    except ValueError as reason:
        raise SystemExit(str(reason)) from reason
    print(f"\nErrors against float32, {found[0].images} photographs, {found[0].weights}")
    print(accuracy.table(found), flush=True)
    yield [{"kind": "accuracy"} | dataclasses.asdict(a) for a in found]


def draw(records: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draws every picture for which there are records, and returns the paths."""
    found = [results.result_of(r) for r in records if r["kind"] == "time"]
    if not found:
        return []
    caption = next(r["versions"] for r in records if r["kind"] == "run")
    limits = {r["name"]: r["rate"] for r in records if r["kind"] == "ceiling"}

    def only(**fields):
        return [r for r in found if all(getattr(r, k) == v for k, v in fields.items())]

    def file(kind, *names):
        words = "_".join(str(name) for name in names)
        return out / f"{kind}_{''.join(c if c.isalnum() else '_' for c in words)}.png"

    def alike(*names):
        return dict.fromkeys(tuple(getattr(r, name) for name in names) for r in found)

    made = []
    for shape, images, pixels, regime in alike("shape", "images", "pixels", "regime"):
        own = only(shape=shape, images=images, pixels=pixels, regime=regime)
        made.append(plots.times(own, caption, file("times", shape, images, pixels, regime)))
        if powered := [r for r in own if r.power is not None]:
            made.append(plots.energy(powered, caption, file("energy", shape, images, pixels)))
    for shape, dtype, pixels in alike("shape", "dtype", "pixels"):
        own = only(shape=shape, dtype=dtype, regime="burst", pixels=pixels)
        if len({r.images for r in own}) > 1:
            path = file("throughput", shape, dtype, pixels)
            made.append(plots.throughput(own, caption, path))
    roofs = {k: v for k, v in limits.items() if k not in ("copy", "widen")}
    roofs["memory"] = max(limits["copy"], limits["widen"])
    for shape, pixels in alike("shape", "pixels"):
        burst = only(shape=shape, pixels=pixels, regime="burst", source="patches")
        if own := [r for r in burst if "+" not in r.contender]:
            made.append(plots.roofline(own, roofs, caption, file("roofline", shape, pixels)))
    return made


def at_least(minimum: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a parser for an argument that is a number of at least `minimum`."""

    def number(text: str):
        found = kind(text)
        if found < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return found

    return number


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="takes only a few measurements, in under a minute"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run; default: all")
    shapes = f"shapes: operator ({', '.join(SHAPES)}); encoder ({', '.join(ENCODER_IMAGES)})"
    regimes = "; ".join(f"{name}: {text}" for name, text in REGIMES.items())
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="NAME", help=shapes)
    images = "images per call"
    parser.add_argument("--images", type=at_least(1, int), nargs="+", help=images)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="dtypes of patches and weight")
    pixels = ["random", "photographs"]
    parser.add_argument("--pixels", nargs="+", choices=pixels, help="the operator's pixels")
    sources = "whether the operator and its peers start from patches or from images"
    parser.add_argument(
        "--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help=sources
    )
    named = "the operator's contenders, by their names in the tables; default: all"
    parser.add_argument("--contenders", nargs="+", default=[], metavar="NAME", help=named)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, help=regimes)
    parser.add_argument("--rounds", type=at_least(1, int), help="number of turns of each contender")
    parser.add_argument("--rest", type=at_least(0, float), help="idle seconds before each turn")
    parser.add_argument(
        "--seconds", type=at_least(0.01, float), help="duration of a sustained turn in seconds"
    )
    parser.add_argument("--checkpoint", type=Path, help="encoder whose accuracy is measured")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and pictures")
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="FOLDER",
        help="only redraws the pictures of this folder",
    )
    chosen = parser.parse_args()
    if chosen.draw and not (chosen.draw / "results.jsonl").exists():
        parser.error(f"{chosen.draw / 'results.jsonl'} does not exist")
    if chosen.checkpoint and not chosen.checkpoint.exists():
        parser.error(f"{chosen.checkpoint} does not exist")
    if chosen.out and chosen.out.exists() and not chosen.out.is_dir():
        parser.error(f"{chosen.out} is not a folder")
    gpu = timing.on_gpu()
    quick = dict(
        parts=["operator"],
        shapes=["B/16 224"],
        images=[1024] if gpu else [4],
        # bfloat16 alone takes 22 seconds on an H200; int8 as well would take 55 to 65.
        dtypes=["bfloat16"] if gpu else ["int8", "bfloat16"],
        pixels=["random"],
        regimes=["burst"],
        rounds=2,
        rest=0.1,
        seconds=1.0,
    )
    whole = dict(
        parts=list(PARTS),
        shapes=["B/16 224", "So400m/14 384"] if gpu else ["B/16 224"],
        images=[1, 64, 1024, 4736] if gpu else [1, 16],
        dtypes=["float8_e4m3fn", "int8", "bfloat16"],
        pixels=["random", "photographs"] if gpu else ["random"],
        regimes=list(REGIMES),
        rounds=3,
        rest=1.0 if gpu else 0.2,
        seconds=2.5 if gpu else 0.5,
    )
    for name, value in (quick if chosen.quick else whole).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    return chosen


def main() -> None:
    """Prints the tables, and writes records and pictures."""
    chosen = arguments()
    if chosen.draw:
        made = draw(results.read(chosen.draw / "results.jsonl"), chosen.draw)
        print(*made or ["results.jsonl has no times to draw."], sep="\n")
        return
    print(timing.environment(), flush=True)
    head = {"kind": "run", "versions": timing.environment(), "time": time.strftime("%FT%T%z")}
    run_part = dict(zip(PARTS, (operator, encoders, accuracies)))
    everything = itertools.chain([[head]], *(run_part[part](chosen) for part in chosen.parts))
    if not chosen.out:
        collections.deque(everything, maxlen=0)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "results.jsonl"
    path.unlink(missing_ok=True)
    for records in everything:
        results.append(path, records)
    try:
        made = draw(results.read(path), chosen.out)
    except ImportError as missing:
        print(
            f"No pictures: {missing}. To draw them later: python -m benchmarks --draw {chosen.out}"
        )
    else:
        print(f"\nWrote results.jsonl and {len(made)} pictures to {chosen.out}.")


if __name__ == "__main__":
    main()
