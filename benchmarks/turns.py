"""Lets programs that cannot share a process take turns on a device.

Each program runs in its own process, which calls `serve` with an object. The parent process calls
the object's methods with `Process.call`. Arguments and results are passed as JSON.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Process:
    """A process that serves the methods of an object."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path):
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | environment,
        )

    def tell(self, method: str, **arguments: Any) -> None:
        """Calls a method; `answer` waits for its result."""
        line = json.dumps({"method": method, "arguments": arguments}, default=dataclasses.asdict)
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Waits for the result of the last call of `tell`.

        Raises:
          RuntimeError: the method raised an exception, or the process ended.
        """
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process {self.name!r} ended, see above.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method and returns its result; raises as `answer` does."""
        self.tell(method, **arguments)
        return self.answer()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(served: Any) -> None:
    """Calls the methods of an object that standard input names, until the input ends."""
    # Output of libraries must not be mistaken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"answer": getattr(served, call["method"])(**call["arguments"])}
        except Exception as reason:
            answer = {"error": first_line(reason)}
        print(json.dumps(answer), file=answers, flush=True)


def first_line(reason: Exception) -> str:
    """Formats an exception in one line."""
    return f"{type(reason).__name__}: {reason}".splitlines()[0][:300]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Time and energy of one turn of calls.

    Attributes:
      milliseconds: median time of a call.
      joules: energy of the GPU per call; None if it is unknown.
    """

    milliseconds: float
    joules: float | None = None


def burst(call: Callable[[], Any], wait: Callable[[Any], Any], calls: int, rest: float) -> Turn:
    """Measures the wall time of single calls after a rest, each until its result is ready."""
    wait(call())
    time.sleep(rest)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        wait(call())
        times.append(1e3 * (time.perf_counter() - start))
    return Turn(statistics.median(times))


def sustained(call: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> Turn:
    """Measures wall time and energy of calls without a pause.

    Clock and power settle in the first half, which is not counted. Calls are submitted in groups of
    about a tenth of a second.
    """
    start = time.perf_counter()
    wait(call())
    calls = max(1, min(100, round(0.1 / (time.perf_counter() - start))))

    def run(seconds: float) -> int:
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(calls):
                result = call()
            wait(result)
            done += calls
        return done

    run(seconds / 2)
    energy, start = millijoules(), time.perf_counter()
    done = run(seconds / 2)
    spent = time.perf_counter() - start
    used = millijoules()
    joules = None if energy is None or used is None else (used - energy) / 1e3 / done
    return Turn(1e3 * spent / done, joules)


def millijoules() -> int | None:
    """Returns the energy of the first visible GPU since its driver was loaded; None if unknown."""
    try:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:
        # NVML fails with several exception types. Without it, times are still measured.
        return None
