"""Runs the command `embed`, and measures pictures per second, the GPUs' utilisation and the cores.

A rate counts the pictures between the first and the last whole shard, so starting and compiling are
excluded. Utilisation (from the driver) and cores in use cover the same time.
"""

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.picture_files import inputs

PLACES = ("one", "all", "each")

# Seconds between two samples of the GPUs and the processes.
INTERVAL = 0.1


def gpus() -> list[str]:
    """Lists the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    try:
        import pynvml

        pynvml.nvmlInit()
        return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:
        # NVML fails with several exception types. Without it there are no GPUs to list.
        return []


def busy(gpu: str) -> float | None:
    """Returns a GPU's utilisation as NVML reports it; None if it is unknown."""
    try:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except Exception:
        return None


def cpu_seconds(process: int) -> float:
    """Returns the CPU time of a process and its descendants; 0 if it is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return 0.0
    # User and system time of the process, then those of its children that have ended.
    spent = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for thread in threads:
        # The file is missing if the thread has ended, or if the kernel does not provide such files.
        with contextlib.suppress(OSError):
            spent += sum(map(cpu_seconds, map(int, (thread / "children").read_text().split())))
    return spent


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample: seconds since the epoch, the GPUs' utilisation, and CPU seconds."""

    seconds: float
    busy: list[float]
    cpu: float


@contextlib.contextmanager
def monitor(processes: list[subprocess.Popen], devices: list[str]) -> Iterator[list[Sample]]:
    """Samples GPUs and processes while the `with` block runs."""
    samples: list[Sample] = []
    stop = threading.Event()

    def take_samples():
        while not stop.wait(INTERVAL):
            shares = [share for gpu in devices if (share := busy(gpu)) is not None]
            cpu = sum(cpu_seconds(process.pid) for process in processes)
            samples.append(Sample(time.time(), shares, cpu))

    thread = threading.Thread(target=take_samples, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class EmbedRun:
    """One run of the command.

    Attributes:
      encoder, form, place: the encoder, the form of the pictures, and one of `PLACES`.
      devices: number of GPUs; 0 on CPUs.
      pictures: number of pictures in the run.
      seconds: duration of the whole run, including start and compilation.
      rate: pictures per second between the first and the last whole shard, or of the whole run if
        it has fewer than two whole shards.
      busy: mean utilisation of the GPUs in that time; None if it is unknown.
      cores: average number of CPU cores in use.
      allowed: number of cores that the command could use.
      options: further arguments of the command.
    """

    encoder: str
    form: str
    place: str
    devices: int
    pictures: int
    seconds: float
    rate: float
    busy: float | None
    cores: float
    allowed: int
    options: str = ""

    def __str__(self) -> str:
        share = "" if self.busy is None else f"{self.busy:.0%}"
        return (
            f"{self.encoder:15}{self.form:9}{self.place:5}{self.devices:4}{self.pictures:9}"
            f"{self.seconds:9.1f}{self.rate:12,.0f}{share:>9}{self.cores:7.1f}{self.allowed:5}"
            f" {self.options}"
        )


HEAD = (
    f"{'encoder':15}{'form':9}{'GPUs':>9}{'pictures':>9}{'seconds':>9}{'pictures/s':>12}"
    f"{'GPU use':>9}{'cores':>7}{'of':>5}"
)


def shards(out: Path) -> list[tuple[float, int]]:
    """Lists when each shard of embeddings was written, and its number of rows, in order of time."""
    import pyarrow.parquet

    found = (out / "embeddings").glob("*.parquet")
    rows = pyarrow.parquet.read_metadata
    return sorted((path.stat().st_mtime, rows(path).num_rows) for path in found)


def steady(written: list[tuple[float, int]]) -> tuple[float, float, float] | None:
    """Returns (begin, end, pictures per second) between the first and the last whole shard.

    A run's last shard holds the remaining pictures, and is not whole if it has fewer rows.
    """
    whole = written[:-1] if written and written[-1][1] < max(n for _, n in written) else written
    if len(whole) < 2:
        return None
    begin, end = whole[0][0], whole[-1][0]
    return begin, end, sum(n for _, n in whole[1:]) / (end - begin)


def start(
    checkpoint: Path, arguments: Sequence[str], out: Path, visible: list[str], cores: list[int]
) -> subprocess.Popen:
    """Starts the command on some GPUs and cores."""
    command = [sys.executable, "-m", "pallas_patch_embed", "embed", *arguments]
    command += ["--checkpoint", str(checkpoint), "--out", str(out), "--quiet"]
    environment = dict(os.environ)
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    process = subprocess.Popen(command, env=environment)
    # The process has just started, so all of its threads will inherit the affinity.
    os.sched_setaffinity(process.pid, cores)
    return process


def run(
    name: str,
    checkpoint: Path,
    folder: Path,
    form: str,
    place: str,
    out: Path,
    devices: list[str],
    options: Sequence[str] = (),
) -> EmbedRun:
    """Runs the command on pictures in a form: on one GPU, on all GPUs, or as a process per GPU.

    A process on one GPU gets that GPU's share of the machine's cores. `options` are further
    arguments of the command.

    Raises:
      RuntimeError: the command failed.
    """
    every = sorted(os.sched_getaffinity(0))
    share = max(1, len(every) // max(1, len(devices)))
    if place == "one":
        groups, cores = [devices[:1]], [every[:share]]
    elif place == "all" or not devices:
        groups, cores = [devices], [every]
    else:
        groups = [[gpu] for gpu in devices]
        cores = [every[i * share : (i + 1) * share] for i in range(len(devices))]
    arguments = [[*each, *options] for each in inputs(folder, form, len(groups))]
    outs = [out / f"{i}" for i in range(len(groups))]
    begin = time.time()
    processes = [start(checkpoint, *each) for each in zip(arguments, outs, groups, cores)]
    used = [gpu for group in groups for gpu in group]
    with monitor(processes, used) as samples:
        codes = [process.wait() for process in processes]
    seconds = time.time() - begin
    if any(codes):
        raise RuntimeError(f"embed exited with {codes} (pictures: {form}; GPUs: {place}).")
    written = [shards(path) for path in outs]
    pictures = sum(n for each in written for _, n in each)
    windows = [steady(each) for each in written]
    if None in windows:
        window, rate = (begin, begin + seconds), pictures / seconds
    else:
        # Every process is in its steady state during the intersection of the windows.
        window = max(w[0] for w in windows), min(w[1] for w in windows)
        rate = sum(w[2] for w in windows)
    within = [sample for sample in samples if window[0] <= sample.seconds <= window[1]] or samples
    shares = [x for sample in within for x in sample.busy]
    spent = within[-1].seconds - within[0].seconds if len(within) > 1 else 0
    cpu = (within[-1].cpu - within[0].cpu) / spent if spent else 0.0
    return EmbedRun(
        name,
        form,
        place,
        len(used),
        pictures,
        seconds,
        rate,
        statistics.mean(shares) if shares else None,
        cpu,
        sum(map(len, cores)),
        " ".join(options),
    )


def embeddings(outs: Sequence[Path]) -> dict[str, np.ndarray]:
    """Reads the embedding of every id; a duplicate id is an error."""
    import pyarrow.parquet

    found: dict[str, np.ndarray] = {}
    for path in (shard for out in outs for shard in (out / "embeddings").glob("*.parquet")):
        table = pyarrow.parquet.read_table(path)
        rows = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
        for id, row in zip(table["id"].to_pylist(), rows):
            if found.setdefault(id, row) is not row:
                raise RuntimeError(f"{id} occurs twice.")
    return found


def resumed(
    checkpoint: Path, folder: Path, expected: Path, out: Path, devices: list[str]
) -> dict[str, Any]:
    """Kills a run when it has half of its shards, and resumes it.

    Raises:
      RuntimeError: the resumed run failed, or its embeddings differ from the uninterrupted run's.
    """
    every = sorted(os.sched_getaffinity(0))
    (arguments,) = inputs(folder, "jpeg", 1)
    half = max(1, len(shards(expected)) // 2)
    process = start(checkpoint, arguments, out, devices, every)
    while process.poll() is None and len(list((out / "embeddings").glob("*.parquet"))) < half:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    before = sum(n for _, n in shards(out)) if (out / "embeddings").exists() else 0
    code = start(checkpoint, arguments, out, devices, every).wait()
    if code:
        raise RuntimeError(f"The resumed run exited with {code}.")
    right, found = embeddings([expected]), embeddings([out])
    if right.keys() != found.keys():
        raise RuntimeError(f"The resumed run has {len(found)} ids, expected {len(right)}.")
    if wrong := sum(not np.array_equal(right[id], found[id]) for id in right):
        raise RuntimeError(f"{wrong} of {len(right)} embeddings of the resumed run differ.")
    return {"killed": killed, "embedded_before": before, "equal": len(right)}
