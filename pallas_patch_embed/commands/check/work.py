"""The work of the child process, which lists, launches and compares the cases of every backend."""

import dataclasses
import functools
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_patch_embed import __version__
from pallas_patch_embed.backends import BACKENDS, ranked, triton
from pallas_patch_embed.backends.mosaic import SM90, SM100, MosaicBackend
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.backends.triton import TritonConfig
from pallas_patch_embed.base import versions
from pallas_patch_embed.base.child import Send
from pallas_patch_embed.base.chips import A100, B200, H200, Chip, Target
from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.dtypes import DTYPES
from pallas_patch_embed.base.problem import Problem
from pallas_patch_embed.commands.check import cases
from pallas_patch_embed.commands.check.cases import CheckCase
from pallas_patch_embed.commands.check.compare import Counts, Cut, Run, compared
from pallas_patch_embed.commands.check.process import Ended, Found, Launches, Listed, Prepares
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows

# Default number of launches of a case, on a GPU and without one.
RUNS_ON_GPU, RUNS = 20, 2


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a check.

    Attributes:
      backends: names of the backends.
      shapes: a name in `cases.SHAPES`.
      only: text that the description of a case must contain.
      runs: number of launches of each case; None for RUNS_ON_GPU or RUNS.
      seconds: time for which each case is launched repeatedly, instead of `runs`.
      seed: seed of the operands.
    """

    backends: tuple[str, ...] = tuple(BACKENDS)
    shapes: str = "few"
    only: str = ""
    runs: int | None = None
    seconds: float | None = None
    seed: int = 0


def run(options: Options, send: Send, done: frozenset[int]) -> None:
    """Launches and compares every case whose index is not in `done`."""
    check_devices()
    devices = jax.devices()
    found, refused = listed(options, devices)
    send(Listed(about(devices, found, refused), tuple(map(str, found))))
    for index, case in enumerate(found):
        if index in done:
            continue
        send(Prepares(index))
        try:
            for counts in launched(case, index, options, devices, send):
                send(Found(index, counts._asdict()))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                send(Ended(index, "crashed", str(error)))
                return  # After a CUDA error no kernel may run in this process.
            send(Ended(index, "left out", "the device does not have enough memory"))
        else:
            send(Ended(index, "ended"))


def launched(
    case: CheckCase, index: int, options: Options, devices: Sequence[jax.Device], send: Send
) -> Iterator[Counts]:
    """Launches a case, and yields the result of each launch."""
    launches = itertools.count(1)
    run, cut = runner(case, Target.of(devices[0]))
    found = compared(
        run,
        case.problem,
        seed=options.seed + index,
        devices=devices if case.on_every_device else devices[:1],
        how=case.launch,
        cut=cut,
        before_launch=lambda: send(Launches(index, next(launches))),
    )
    if options.seconds is None:
        runs = RUNS_ON_GPU if devices[0].platform == "gpu" else RUNS
        yield from itertools.islice(found, options.runs or runs)
        return
    yield next(found)
    # The time of the first launch, which also compiles, does not count.
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        yield next(found)


def listed(
    options: Options, devices: Sequence[jax.Device]
) -> tuple[list[CheckCase], dict[str, dict[str, str]]]:
    """Returns the cases, and by backend and dtype why a dtype is not served on this machine."""
    target = Target.of(devices[0])
    found: list[CheckCase] = []
    refused: dict[str, dict[str, str]] = {}
    for name in options.backends:
        reasons: dict[str, str] = {}

        def serves(case: CheckCase, reasons: dict[str, str] = reasons) -> bool:
            try:
                runner(case, target)
            except NotImplementedError as reason:
                reasons.setdefault(case.dtype, str(reason))
                return False
            return True

        of_backend = _cases(name, options, serves, target, len(devices))
        found += of_backend
        served = {case.dtype for case in of_backend}
        refused[name] = {dtype: why for dtype, why in reasons.items() if dtype not in served}
    return [case for case in found if options.only in str(case)], refused


def _cases(
    name: str, options: Options, serves: Callable[[CheckCase], bool], target: Target, devices: int
) -> list[CheckCase]:
    """Returns the cases of a backend: all launches on a GPU, small problems for interpreters."""
    # Only XLA serves float32, the first of DTYPES.
    dtypes = DTYPES if name == "xla" else DTYPES[1:]
    list_cases = functools.partial(cases.cases_of, name, serves, dtypes=dtypes)
    shapes = cases.SHAPES[options.shapes]
    if target.platform == "cuda":
        return list_cases(shapes=shapes, devices=devices, many=cases.MANY)
    if is_interpreted(name, target):
        return list_cases(shapes=(cases.SMALL,), batches=(3,), launches=("alone",))
    return list_cases(shapes=shapes, batches=(1, 3), launches=("alone", "on slices"))


def runner(case: CheckCase, target: Target) -> tuple[Run, Cut | None]:
    """Returns the function that a case launches, and the function by which XLA cuts its images.

    The second is None if XLA does not cut images for the case.

    Raises:
      NotImplementedError: the backend does not serve the case; the message is the reason.
    """
    problem = case.problem
    if is_interpreted(case.backend, target):
        if problem.geometry is not None:
            raise NotImplementedError("images are not checked in its interpreter, only patches.")
        return INTERPRETED[case.backend](problem), None
    options, refusals = ranked(problem, target, backend=case.backend, cut=case.cut)
    if not options:
        raise NotImplementedError(refusals[case.backend])
    option = options[0]
    if problem.geometry is None or option.cuts_images:
        return option.plan.run, None
    geometry, encoding = problem.geometry, Encoding(problem.dtype)
    return option.plan.run, lambda images: cut_into_rows(images, geometry, encoding)


# Interpreters, for machines without a GPU.


def is_interpreted(name: str, target: Target) -> bool:
    """Returns whether an interpreter executes the backend's kernel on this machine's CPU."""
    return target.platform == "cpu" and name in INTERPRETED


def _few(chip: Chip) -> Target:
    """Returns a chip with so few multiprocessors that each worker has several tiles."""
    return Target("cuda", dataclasses.replace(chip, multiprocessors=2))


def _by_pallas(backend: MosaicBackend, chip: Chip, config: Any, problem: Problem) -> Run:
    interpret = plgpu.InterpretGPUParams()
    return backend.plan(problem, _few(chip), config=config, interpret=interpret).run


def _by_triton(problem: Problem) -> Run:
    config = TritonConfig(32, 32, 64, warps=4, stages=2, programs=1)
    plan = triton.plan(problem, _few(A100), config=config)

    def call(*operands: jax.Array, out: jax.ShapeDtypeStruct, **options: Any) -> jax.Array:
        from pallas_patch_embed.backends.triton import interpreted

        function = functools.partial(interpreted.call, out=out, **options)
        return jax.pure_callback(function, out, *operands)

    def run(*operands: jax.Array) -> jax.Array:
        with mock.patch.object(triton, "_call", lambda: call):
            return plan.run(*operands)

    return run


INTERPRETED: dict[str, Callable[[Problem], Run]] = {
    "mosaic_sm100": functools.partial(
        _by_pallas, SM100, B200, BlackwellConfig(64, 4, collective=False)
    ),
    "mosaic_sm90": functools.partial(_by_pallas, SM90, H200, HopperConfig(64, 4)),
    "triton": _by_triton,
}


def about(
    devices: Sequence[jax.Device], found: Sequence[CheckCase], refused: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Describes the machine, the backends that are interpreted, and those that do not serve."""
    target = Target.of(devices[0])
    return {
        "pallas_patch_embed": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": versions.installed(versions.PACKAGES),
        "driver": versions.driver() or None,
        "devices": [
            {
                "kind": device.device_kind,
                "target": str(Target.of(device)),
                "multiprocessors": getattr(device, "core_count", None),
            }
            for device in devices
        ],
        "interpreted": sorted({c.backend for c in found if is_interpreted(c.backend, target)}),
        "refused": refused,
    }
