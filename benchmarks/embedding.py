"""Measures the throughput of `pallas-patch-embed embed`, the GPUs' utilisation, and what limits it.

  python -m benchmarks.embedding --pictures 40000 --out bench

Pictures of 500 x 375 pixels are cropped from the package's photographs and written as JPEG files,
tars and parquet files. The command runs on each form with a random checkpoint, as
`benchmarks.embed_runs` describes.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.embed_runs import HEAD, PLACES, EmbedRun, gpus, resumed, run
from benchmarks.picture_files import picture, write

FORMS = ("decoders", "arrays", "jpeg", "tar", "parquet", "resumed")


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
