"""Measures the throughput of `pallas-patch-embed embed`, the GPUs' utilisation, and what limits it.

  python -m benchmarks.embedding --pictures 40000 --out bench

Pictures of 500 x 375 pixels are cropped from the package's photographs and written as JPEG files,
tars and parquet files. The command runs on each form with a random checkpoint. Throughput counts
the pictures between the first and the last whole shard, so starting and compiling are excluded.
GPU utilisation (from the driver) and CPU cores in use cover the same time.

"decoders" measures decoding alone. "arrays" measures the encoder on decoded pictures. "resumed"
kills a run after half of the shards and resumes it; its embeddings must equal those of the run on
JPEG files.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.picture_files import inputs, picture, write

FORMS = ("decoders", "arrays", "jpeg", "tar", "parquet", "resumed")
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


def arrays(checkpoint: Path, seconds: float) -> dict[str, float]:
    """Measures the encoder's pictures per second from decoded arrays on the host.

    As in `embed`, the next batch is copied to the GPU while one is computed.
    """
    from pallas_patch_embed.embed import Embedder
    from pallas_patch_embed.embed.pipeline import COMPUTED_AHEAD

    embedder = Embedder(checkpoint)
    height, width = embedder.encoder.config.image_size or (0, 0)
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (embedder.rows, height, width, 3), np.uint8))
    embedder.start(images)()
    pending, done = [], 0
    begin = time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        pending.append(embedder.start(images))
        if len(pending) > COMPUTED_AHEAD:
            pending.pop(0)()
            done += len(images)
    return {"rate": done / spent}


def decoders(checkpoint: Path) -> dict[str, Callable[[bytes], Any]]:
    """Returns JPEG decoders by name: this package's, which also resizes, and the peers'."""
    from PIL import Image

    from pallas_patch_embed.embed import Decoder

    own = Decoder.of(checkpoint)

    def pillow(content):
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))

    found = {"embed: decoded and resized": lambda x: own.decode(lambda: io.BytesIO(x))}
    found["Pillow, decoded alone"] = pillow
    with contextlib.suppress(ImportError):
        import cv2

        cv2.setNumThreads(1)
        found["OpenCV, decoded alone"] = lambda content: cv2.imdecode(
            np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB
        )
    return found


def decoding(checkpoint: Path, distinct: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Measures decoded pictures per second: on one CPU thread, on a thread per core, and on a GPU.

    The GPU decodes batches with nvJPEG, if torchvision is installed.
    """
    made = [picture(i) for i in range(min(distinct, 64))]

    def rate(decode_all):
        decode_all()
        begin, done = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            decode_all()
            done += len(made)
        return done / spent

    for name, decode in decoders(checkpoint).items():
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            with ThreadPoolExecutor(threads) as pool:
                found = rate(lambda f=decode, p=pool: list(p.map(f, made)))
            yield {"kind": "decoder", "name": name, "threads": threads, "rate": found}
    try:
        found = rate(gpu_decoder(made))
    except (ImportError, RuntimeError):
        return
    yield {"kind": "decoder", "name": "torchvision, nvJPEG, decoded alone", "rate": found}


def gpu_decoder(made: list[bytes]) -> Callable[[], Any]:
    """Returns a function that decodes JPEG files on the GPU.

    Raises:
      ImportError: torchvision is not installed.
      RuntimeError: there is no GPU.
    """
    import torch
    from torchvision.io import decode_jpeg

    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU")
    files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in made]

    def decode_all():
        decode_jpeg(files, device="cuda")
        torch.cuda.synchronize()

    return decode_all


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    from benchmarks.encoder import ENCODERS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument(
        "--pictures",
        type=int,
        nargs="+",
        default=[40000, 16384],
        help="number of pictures for each encoder; default: %(default)s",
    )
    parser.add_argument("--distinct", type=int, default=2000, help="number of different pictures")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument(
        "--gpus",
        nargs="+",
        choices=PLACES,
        default=["one"],
        help="one GPU; all GPUs in one process; or a process for each GPU",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="duration of each measurement of arrays, decoders",
    )
    parser.add_argument("--out", type=Path, help="folder for embedding.jsonl")
    chosen = parser.parse_args()
    if len(chosen.pictures) not in (1, len(chosen.encoders)):
        parser.error("--pictures takes one number, or one for each of --encoders")
    return chosen


def measure(
    chosen: argparse.Namespace, configs: dict[str, Any], folder: Path
) -> Iterator[dict[str, Any] | EmbedRun]:
    """Runs all measurements in an empty folder, and yields a record of each."""
    from benchmarks import checkpoints

    devices = gpus()
    numbers = chosen.pictures * (len(chosen.encoders) if len(chosen.pictures) == 1 else 1)
    for name, number in zip(chosen.encoders, numbers):
        own = folder / str(chosen.encoders.index(name))
        checkpoint = own / "checkpoint"
        checkpoints.write(configs[name], checkpoint)
        begin = time.perf_counter()
        facts = write(number, min(number, chosen.distinct), own, chosen.forms)
        facts["written in seconds"] = time.perf_counter() - begin
        yield {"kind": "pictures", "encoder": name, "pictures": number} | facts
        if "decoders" in chosen.forms and name == chosen.encoders[0]:
            yield from decoding(checkpoint, chosen.distinct, chosen.seconds)
        if "arrays" in chosen.forms:
            # A separate process releases the GPU's memory before the command runs.
            code = "import sys; from pathlib import Path; from benchmarks import embedding; "
            code += "print(embedding.arrays(Path(sys.argv[1]), float(sys.argv[2]))['rate'])"
            command = [sys.executable, "-c", code, str(checkpoint), str(chosen.seconds)]
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": devices[0]} if devices else {})
            found = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            yield {"kind": "arrays", "encoder": name, "rate": float(found.stdout.split()[-1])}
        expected = None
        for form, place in itertools.product(chosen.forms, chosen.gpus):
            if form in ("decoders", "arrays", "resumed"):
                continue
            out = own / f"{form} {place}"
            yield run(name, checkpoint, own, form, place, out, devices)
            if form == "jpeg" and place != "each":
                expected = (out / "0", devices[:1] if place == "one" else devices)
            else:
                shutil.rmtree(out)
        if "resumed" in chosen.forms and expected and name == chosen.encoders[0]:
            found = resumed(checkpoint, own, expected[0], own / "resumed", expected[1])
            yield {"kind": "resumed", "encoder": name, "devices": len(expected[1])} | found
        shutil.rmtree(own)


def main() -> None:
    """Prints and records every run."""
    chosen = arguments()
    from benchmarks.encoder import ENCODERS

    path = chosen.out and chosen.out / "embedding.jsonl"
    if path:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(chosen, ENCODERS, Path(folder)):
            print(found, flush=True)
            record = found
            if isinstance(found, EmbedRun):
                record = {"kind": "embed"} | dataclasses.asdict(found)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
