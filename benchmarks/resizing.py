"""Measures who resizes pictures for `pallas-patch-embed embed`: the host, or the device.

  python -m benchmarks.resizing --out bench

"resize" times the device's kernels on a batch of pictures that it already has, whose pixels are
first compared with Pillow's. "copies" times ways to bring a batch to the device: the host's copy of
decoded pictures into one array, the transfer of that array as a whole, in pieces and from pinned
memory, and all steps of `embed`. "decoding" measures the CPU time of a decoder for a picture.

"embed" runs the command on JPEG files, tars and parquet files on one GPU, first with `--resize
host` and then with `--resize device`, as `benchmarks.embedding` does, with pictures of 500 x 375
pixels. The embeddings of both must be equal.
"""

import argparse
import dataclasses
import functools
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import embed_runs, picture_files
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.embed import jpeg
from pallas_patch_embed.embed.preprocessing import Preprocessing, Whole
from pallas_patch_embed.embed.resizing import Resizer
from pallas_patch_embed.layers.resize import (
    FILTERS,
    MOST_SIDE,
    most_taps,
    padded,
    resize,
    stacked,
    taps,
)

PARTS = ("resize", "copies", "decoding", "embed")

# (width, height) of pictures, and the side of the images that they become.
SHAPES = (((500, 375), 224), ((500, 375), 384), ((375, 500), 384), ((1024, 768), 224))

# Numbers of pieces in which a batch is transferred.
PIECES = (2, 4, 8, 16)

FORMS = ("jpeg", "tar", "parquet")
RESIZED_BY = ("host", "device")


def photographs(number: int, size: tuple[int, int]) -> list[np.ndarray]:
    """Returns crops of the package's photographs of a (width, height)."""
    from PIL import Image

    found = []
    for i in range(number):
        with Image.open(io.BytesIO(picture_files.picture(i % 16))) as picture:
            found.append(np.asarray(picture.resize(size)))
    return found


def milliseconds(function: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """Returns the median, 10th and 90th percentile of the wall time of calls one after another."""
    jax.block_until_ready(function())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(1e3 * (time.perf_counter() - begin))
    low, *_, high = statistics.quantiles(times, n=10)
    return statistics.median(times), low, high


def sharding() -> NamedSharding:
    """Returns the sharding of a batch on the first device."""
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("batch",)), PartitionSpec("batch"))


def preprocessing(side: int, filter: str = "bicubic") -> Preprocessing:
    from PIL import Image

    return Preprocessing(int(Image.Resampling[filter.upper()]), (side, side), 16, 1024)


def packed(pictures: list[np.ndarray]) -> np.ndarray:
    """Returns the pixels of pictures one after another."""
    return np.concatenate([picture.ravel() for picture in pictures])


def check(pictures: list[np.ndarray], side: int, name: str) -> None:
    """Raises RuntimeError if a pixel that the device computes differs from Pillow's."""
    from PIL import Image

    found = Resizer(preprocessing(side, name), sharding()).copy(pictures, [True] * len(pictures))()
    for picture, image in zip(pictures, np.asarray(found), strict=True):
        filter = Image.Resampling[name.upper()]
        if not np.array_equal(image, Image.fromarray(picture).resize((side, side), filter)):
            raise RuntimeError(f"{picture.shape} to {side}, {name}: a pixel differs from Pillow's.")


def resizing(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times resizing of pictures on the device, for each shape and filter."""
    B = chosen.batch
    for (width, height), side in chosen.shapes:
        pictures = photographs(B, (width, height))
        begins = np.arange(B, dtype=np.int32) * pictures[0].size
        places = packed(pictures), np.stack([begins, np.full(B, width, np.int32)])
        function = functools.partial(resize, shape=(padded(height), padded(width), 3))
        contenders = {}
        for name in chosen.filters:
            check(pictures, side, name)
            axes = [
                stacked([taps(n, side, name)] * B, B, most_taps(padded(n), side, name))
                for n in (height, width)
            ]
            contenders[name] = timing.Contender(function, tuple(jax.device_put([*places, *axes])))
        found = timing.burst(contenders, rounds=3, rest=chosen.rest)
        for name, time_of in found.items():
            record = {"kind": "resize", "width": width, "height": height, "side": side}
            record["filter"] = name
            yield record | {
                "batch": B,
                "microseconds a picture": 1e3 * time_of.milliseconds / B,
                **dataclasses.asdict(time_of),
            }


def in_pinned_memory(pixels: np.ndarray) -> jax.Array | None:
    """Returns an array in pinned memory of the host; None if the device has none."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds or device.platform == "cpu":
        return None
    kind = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(pixels, kind)


def copies(pictures: list[np.ndarray], side: int) -> dict[str, Callable[[], Any]]:
    """Returns the copies that bring pictures to the device, and all steps of `Resizer`, by name."""
    device = jax.devices()[0]
    pixels, pinned = packed(pictures), in_pinned_memory(packed(pictures))
    padded_to = padded(pictures[0].shape[0]), padded(pictures[0].shape[1])
    rows = np.zeros((len(pictures), *padded_to, 3), np.uint8)
    images = np.zeros((len(pictures), side, side, 3), np.uint8)
    resizer = Resizer(preprocessing(side), sharding())
    same = np.empty_like(pixels)

    def copy(target: np.ndarray) -> None:
        begin = 0
        for picture in pictures:
            target[begin : begin + picture.size] = picture.reshape(-1)
            begin += picture.size

    found: dict[str, Callable[[], Any]] = {
        "host, new array": lambda: copy(np.empty_like(pixels)),
        "host, same array": lambda: copy(same),
        "transfer": lambda: jax.device_put(pixels, device),
        "transfer, padded": lambda: jax.device_put(rows, device),
        "transfer of images": lambda: jax.device_put(images, device),
        "all, and resize": lambda: resizer.copy(pictures, [True] * len(pictures))(),
    }
    for number in PIECES:
        pieces = np.array_split(pixels, number)
        found[f"transfer in {number} pieces"] = functools.partial(jax.device_put, pieces, device)
    if pinned is not None:
        on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        found["transfer, pinned"] = lambda: jax.device_put(pinned, on_device)
    return found


def copying(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the copies of a batch for each shape."""
    for (width, height), side in chosen.shapes:
        pictures = photographs(chosen.batch, (width, height))
        for step, function in copies(pictures, side).items():
            median, low, high = milliseconds(function, chosen.seconds)
            record = {"kind": "copies", "step": step, "width": width, "height": height}
            yield record | {
                "side": side,
                "batch": chosen.batch,
                "microseconds a picture": 1e3 * median / chosen.batch,
                "GB/s of the pictures": sum(p.nbytes for p in pictures) / median / 1e6,
                "milliseconds": median,
                "low": low,
                "high": high,
            }


def decoding(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the CPU time of one decoder for a JPEG picture of 500 x 375 pixels."""
    contents = [picture_files.picture(i) for i in range(16)]
    for side in (224, 384):
        host = preprocessing(side)
        whole = dataclasses.replace(host, whole=Whole(2**22, MOST_SIDE))
        for name, how in (("decoded and resized", host), ("decoded", whole)):
            times = []
            end = time.perf_counter() + chosen.seconds
            while time.perf_counter() < end or len(times) < 3:
                begin = time.process_time()
                for content in contents:
                    how.image(lambda _, content=content: io.BytesIO(content))
                times.append(1e3 * (time.process_time() - begin) / len(contents))
            yield {
                "kind": "decoding",
                "name": name,
                "side": side,
                "simplejpeg": jpeg.version(),
                "milliseconds a picture": statistics.median(times),
            }


def embedded(
    chosen: argparse.Namespace, configs: dict[str, Any], folder: Path
) -> Iterator[dict[str, Any] | embed_runs.EmbedRun]:
    """Runs the command with both options, for each encoder and form of the pictures.

    Raises:
      RuntimeError: the command failed, or the embeddings differ.
    """
    from benchmarks import checkpoints

    devices = embed_runs.gpus()
    facts = picture_files.write(
        chosen.pictures, min(chosen.pictures, chosen.distinct), folder, chosen.forms
    )
    yield {"kind": "pictures", "pictures": chosen.pictures} | facts
    for name in chosen.encoders:
        checkpoint = folder / f"checkpoint{chosen.encoders.index(name)}"
        checkpoints.write(configs[name], checkpoint)
        for form in chosen.forms:
            outs = {by: folder / f"{chosen.encoders.index(name)} {form} {by}" for by in RESIZED_BY}
            for by, out in outs.items():
                yield embed_runs.run(
                    name, checkpoint, folder, form, "one", out, devices, ["--resize", by]
                )
            host, device = (embed_runs.embeddings([out / "0"]) for out in outs.values())
            if host.keys() != device.keys() or any(
                not np.array_equal(host[id], device[id]) for id in host
            ):
                raise RuntimeError(f"{name}, {form}: the embeddings differ.")
            yield {"kind": "equal", "encoder": name, "form": form, "embeddings": len(host)}


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    from benchmarks.encoder import ENCODERS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resizing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch", type=int, default=64, help="pictures in a call")
    parser.add_argument("--filters", nargs="+", choices=FILTERS, default=["bicubic", "lanczos"])
    parser.add_argument("--rest", type=float, default=0.2, help="idle seconds before a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a measurement")
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=["B/16 224"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--pictures", type=int, default=40000, help="pictures of the command")
    parser.add_argument("--distinct", type=int, default=2000, help="number of different pictures")
    parser.add_argument("--out", type=Path, help="folder for resizing.jsonl")
    chosen = parser.parse_args()
    chosen.shapes = SHAPES
    return chosen


def measure(
    chosen: argparse.Namespace, configs: dict[str, Any], folder: Path
) -> Iterator[dict[str, Any] | embed_runs.EmbedRun]:
    """Runs the chosen parts, and yields a record of each measurement."""
    yield {"kind": "run", "versions": timing.environment(), "time": time.strftime("%FT%T%z")}
    functions = {"resize": resizing, "copies": copying, "decoding": decoding}
    for part in chosen.parts:
        if part == "embed":
            yield from embedded(chosen, configs, folder)
        else:
            yield from functions[part](chosen)


def main() -> None:
    """Prints and records every measurement."""
    chosen = arguments()
    from benchmarks.encoder import ENCODERS

    path = chosen.out and chosen.out / "resizing.jsonl"
    if path:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(chosen, ENCODERS, Path(folder)):
            print(found, flush=True)
            record = found
            if isinstance(found, embed_runs.EmbedRun):
                record = {"kind": "embed"} | dataclasses.asdict(found)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
