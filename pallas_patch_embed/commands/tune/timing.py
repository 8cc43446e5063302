"""Interleaved timing of contenders in one process.

The power limit lowers the clock of a GPU that works for more than a moment. So two times are
measured: in a burst of a few calls after a rest, and sustained, over calls without a pause. Clock
and power are recorded with sustained times. The contenders take turns, so that all run at the same
temperature. The operands of a small problem would stay in the L2 cache from one call to the next.
If a contender has further operands, every call uses the next ones, which are not in the cache.

On a GPU the time of a burst is the time of the kernels of a call, measured by CUPTI. All other
times are wall times.
"""

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic.gpu import profiler

from pallas_patch_embed.base import versions

SAMPLES_A_SECOND = 20

# Packages that contenders may use, if they are installed.
PEERS = ("torch", "nvidia-cutlass")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A call that is measured.

    Attributes:
      function: a compiled function of arrays.
      operands: operands of a call.
      further: other operands with the same shapes. The calls cycle through all operands.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...] = ()
    further: tuple[tuple[Any, ...], ...] = ()
    _turns: Iterator[tuple[Any, ...]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_turns", itertools.cycle((self.operands, *self.further)))

    def __call__(self) -> Any:
        return self.function(*next(self._turns))


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one contender.

    Attributes:
      milliseconds: median time of a call in milliseconds.
      low, high: the 10th and 90th percentile in milliseconds.
      calls: number of measured calls.
      clock: median clock of the multiprocessors during the calls, in MHz; None if it is not known.
      power: median power of the GPU during the calls, in W; None if it is not known.
    """

    milliseconds: float
    low: float
    high: float
    calls: int
    clock: float | None = None
    power: float | None = None

    @classmethod
    def of(cls, milliseconds: list[float], samples: "Samples | None" = None) -> "Timing":
        """Computes a timing from the times of single calls."""
        many = len(milliseconds) > 1
        tenths = statistics.quantiles(milliseconds, n=10, method="inclusive") if many else None
        return cls(
            statistics.median(milliseconds),
            tenths[0] if tenths else milliseconds[0],
            tenths[-1] if tenths else milliseconds[0],
            len(milliseconds),
            samples.median("clock") if samples else None,
            samples.median("power") if samples else None,
        )


class Sample(NamedTuple):
    """Clock of the multiprocessors in MHz and power of the GPU in W at one moment."""

    seconds: float
    clock: float
    power: float


class Samples(list[Sample]):
    """Clock and power of the GPU over time."""

    def between(self, start: float, end: float) -> "Samples":
        """Returns the samples between two times in seconds."""
        return Samples(sample for sample in list(self) if start <= sample.seconds <= end)

    def median(self, name: str) -> float | None:
        """Returns the median of "clock" or "power"; None if there is no sample."""
        return statistics.median(getattr(x, name) for x in self) if self else None


def gpu_id() -> str:
    """Returns the index or UUID of JAX's default device for nvidia-smi."""
    number = jax.devices()[0].local_hardware_id
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


@contextlib.contextmanager
def sampled() -> Iterator[Samples]:
    """Samples clock and power with nvidia-smi during the block, if there is a GPU."""
    samples = Samples()
    query = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw.instant",
        "--format=csv,noheader,nounits",
    ]
    if not on_gpu() or shutil.which(query[0]) is None:
        yield samples
        return
    process = subprocess.Popen(
        [*query, f"--id={gpu_id()}", f"--loop-ms={1000 // SAMPLES_A_SECOND}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                clock, power = map(float, line.split(","))
                samples.append(Sample(time.perf_counter(), clock, power))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
        reader.join()


def on_gpu() -> bool:
    """Returns whether JAX's default device is a GPU."""
    return jax.devices()[0].platform == "gpu"


class _Profiled:
    """A contender with the methods `lower` and `trace` of a jitted function.

    The profiler would jit a function without these methods, which would make its operands
    constants.
    """

    def __init__(self, contender: Contender):
        self.contender = contender

    def lower(self) -> None:
        raise NotImplementedError("A contender is called, not compiled.")

    trace = lower

    def __call__(self) -> Any:
        return self.contender()


def _milliseconds(contender: Contender, calls: int) -> list[float]:
    """Times `calls` calls one after the other."""
    if on_gpu():
        _, found = profiler.measure(_Profiled(contender), iterations=calls)()
        if found is None:
            raise RuntimeError("CUPTI recorded no kernel of a contender.")
        return [found] if isinstance(found, float) else found
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(contender())
        times.append(1e3 * (time.perf_counter() - start))
    return times


def compile_all(contenders: Iterable[Contender]) -> None:
    """Compiles the jitted contenders in parallel; errors are raised later, by the first calls.

    XLA times programs while it compiles, and lets nothing else use the GPU during that time.
    """

    def compile_one(contender: Contender) -> None:
        if hasattr(contender.function, "lower"):
            with contextlib.suppress(Exception):
                contender.function.lower(*contender.operands).compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, contenders))


def check(contender: Contender) -> None:
    """Raises RuntimeError with the reason if the contender cannot be timed."""
    _milliseconds(contender, 2)


def _call_once(contenders: dict[Any, Contender]) -> None:
    for contender in contenders.values():
        jax.block_until_ready(contender())


def burst[Name](
    contenders: dict[Name, Contender], *, rounds: int = 5, calls: int = 5, rest: float = 1.0
) -> dict[Name, Timing]:
    """Times every contender in bursts after a rest, in interleaved rounds.

    Args:
      contenders: contenders by name. Each is first called once, to compile it.
      rounds: number of turns of each contender.
      calls: number of calls in a turn.
      rest: idle seconds before a turn.
    """
    _call_once(contenders)
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            time.sleep(rest)
            times[name] += _milliseconds(contender, calls)
    return {name: Timing.of(found) for name, found in times.items()}


def sustained[Name](
    contenders: dict[Name, Contender], *, seconds: float = 2.5, rounds: int = 2, calls: int = 20
) -> dict[Name, Timing]:
    """Times every contender while it runs without a pause, in interleaved rounds.

    The first half of each turn is not counted, because clock and power settle in it. The time of a
    call is the wall time of `calls` calls, which are submitted together, divided by their number.
    """
    _call_once(contenders)
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    seen = {name: Samples() for name in contenders}
    with sampled() as samples:
        for _ in range(rounds):
            for name, contender in contenders.items():
                begin = last = time.perf_counter()
                while last - begin < seconds:
                    for _ in range(calls):
                        result = contender()
                    jax.block_until_ready(result)
                    now = time.perf_counter()
                    if now - begin > seconds / 2:
                        times[name].append(1e3 * (now - last) / calls)
                    last = now
                seen[name] += samples.between(begin + seconds / 2, last)
    return {name: Timing.of(found, seen[name]) for name, found in times.items()}


def latency[Name](contenders: dict[Name, Contender], *, rounds: int = 200) -> dict[Name, Timing]:
    """Times every contender from a call to its result, by wall time and in interleaved rounds.

    Each round has an order of its own, because the time of a call depends on the contender before
    it. On an H200 a call of the CUDA kernel took 107 us in one order, and 85 us in another.
    """
    _call_once(contenders)
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name, contender in order.sample([*contenders.items()], len(contenders)):
            start = time.perf_counter()
            jax.block_until_ready(contender())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing.of(found) for name, found in times.items()}


def environment() -> str:
    """Returns a line with device, date and versions, for the head of a table."""
    device = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    driver = versions.driver() if on_gpu() else ""
    packages = versions.installed((*versions.PACKAGES, *PEERS))
    found = [*([f"driver {driver}"] if driver else []), *map(" ".join, packages.items())]
    return ", ".join([device, time.strftime("%Y-%m-%d"), *found])
