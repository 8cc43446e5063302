"""Times the options among which a backend is chosen, each problem's in turns, in bursts.

  python -m benchmarks.options --out options.jsonl

It times the options whose predicted time is at most `--within` times that of the fastest, for all
named shapes unless some are named. Results are compared with the first option's.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import recorded
from pallas_patch_embed.backends import Option, ranked
from pallas_patch_embed.base import versions
from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.problem import NAMED_SHAPES, VIT_SHAPES, Problem
from pallas_patch_embed.commands.tune import search, timing
from pallas_patch_embed.commands.tune.command import SOURCES, has_images
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows

# Relative difference of two options' results, in units of the largest result: two roundings to
# bfloat16, or the float8 sums of Hopper's tensor cores.
DIFFERENCE = 2.0**-6

# Largest number of bytes of a problem's patches and result.
LARGEST = 8 * 10**9


def call_of(option: Option, problem: Problem) -> Callable[..., jax.Array]:
    """Returns the function of the call's operands that computes it with an option."""
    if option.cuts_images or problem.geometry is None:
        return option.plan.run
    geometry, encoding = problem.geometry, Encoding(problem.dtype)
    return lambda images, *rest: option.plan.run(cut_into_rows(images, geometry, encoding), *rest)


def name_of(option: Option, problem: Problem) -> str:
    """Returns the name of the contender in the records."""
    if option.cuts_images:
        return f"{option.backend}, cut by the kernel"
    return option.backend if problem.images is None else f"patchify + {option.backend}"


def timed(problem: Problem, within: float) -> dict[str, timing.Timing]:
    """Times the options of a problem whose predictions are close to the smallest one."""
    target = Target.of(default_device())
    options = ranked(problem, target).options
    times = [option.microseconds or 0 for option in options]
    asked = [x for x, time in zip(options, times) if time <= within * times[0]]
    operands = search._operands(problem, target)
    contenders = {
        name_of(option, problem): timing.Contender(
            jax.jit(call_of(option, problem)), operands[0], tuple(operands[1:])
        )
        for option in asked
    }
    timing.compile_all(contenders.values())
    first = None
    for name, contender in contenders.items():
        y = np.asarray(contender.function(*operands[0]), np.float32)
        first = y if first is None else first
        off = np.abs(y - first).max() / np.abs(first).max()
        if not off <= DIFFERENCE:
            raise SystemExit(f"{name}: {problem} differs by {off}")
    return timing.burst(contenders, rounds=5, calls=5, rest=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to which lines are appended")
    names = [shape.name for shape in (*NAMED_SHAPES, *VIT_SHAPES)]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8", "float8_e4m3fn"])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--within", type=float, default=1.3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after this time")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    device = default_device()
    shapes = [shape for shape in (*NAMED_SHAPES, *VIT_SHAPES) if shape.name in args.shapes]
    with args.out.open("a") as file:

        def write(**record: Any) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        text = ", ".join(
            [f"{device.device_kind} x 1", time.strftime("%Y-%m-%d"), f"driver {versions.driver()}"]
            + [f"{k} {v}" for k, v in versions.installed(versions.PACKAGES).items()]
        )
        write(
            kind="run", versions=text, time=time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime())
        )
        every = itertools.product(args.images, args.sources, shapes, args.dtypes)
        for images, source, shape, dtype in every:
            if source == "images" and not has_images(shape):
                continue
            problem = recorded.problem_of(shape.name, images, dtype, source)
            if problem.rows * (problem.K + 4 * problem.N) > LARGEST:
                continue
            if time.monotonic() > end:
                raise SystemExit("The time is over.")
            for name, found in timed(problem, args.within).items():
                write(
                    kind="time",
                    contender=name,
                    source=source,
                    regime="burst",
                    shape=shape.name,
                    images=images,
                    dtype=dtype,
                    milliseconds=found.milliseconds,
                    low=found.low,
                    high=found.high,
                )


if __name__ == "__main__":
    main()
