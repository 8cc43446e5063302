"""Measures the peak memory of `pallas-patch-embed embed` for each kind of source.

  python -m benchmarks.embedding_memory

150 black BMP files of 40 MB (4216 x 3162 pixels) are embedded with a tiny random checkpoint on the
CPU: from a folder, from URLs, from tars and from a parquet file. Decoder processes start after 512
pictures, so with several workers as many small pictures are embedded first. The files take 30 MB on
the disk, because zeros are stored as holes or compressed. The peak is the sum over all processes,
and memory that several of them share counts once (PSS, Linux).
"""

import argparse
import contextlib
import gzip
import io
import itertools
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, PICTURES = 4216, 3162, 150
SIZE = 54 + 3 * WIDTH * HEIGHT
HEAD = struct.pack("<2sIHHI", b"BM", SIZE, 0, 0, 54)
HEAD += struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 24, 0, SIZE - 54, 0, 0, 0, 0)

# Number of rows in a row group of the parquet file. pyarrow stores them as one page.
ROWS = 5

# Seconds between two samples.
INTERVAL = 0.02


def write_folder(path: Path, pictures: int) -> None:
    path.mkdir()
    for i in range(pictures):
        with open(path / f"{i:04}.bmp", "wb") as file:
            file.write(HEAD)
            file.truncate(SIZE)


def write_tar(path: Path, pictures: int) -> None:
    rest = SIZE - 54 + -SIZE % 512
    zeros = bytes(rest)
    compressed = path.suffix == ".gz"
    with gzip.open(path, "wb", 1) if compressed else open(path, "wb") as file:
        for i in range(pictures):
            member = tarfile.TarInfo(f"{i:04}.bmp")
            member.size = SIZE
            file.write(member.tobuf() + HEAD)
            file.write(zeros) if compressed else file.seek(rest, os.SEEK_CUR)
        file.write(bytes(1024))


def write_parquet(path: Path, pictures: int) -> None:
    import pyarrow
    import pyarrow.parquet

    content = HEAD + bytes(SIZE - 54)
    schema = pyarrow.schema([("image", pyarrow.binary())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in itertools.batched(range(pictures), ROWS):
            writer.write_table(pyarrow.table({"image": [content] * len(rows)}, schema=schema))


SOURCES: dict[str, tuple[str, Callable[[Path, int], None], str]] = {
    "folder": ("bmp", write_folder, "{}"),
    "files at URLs": ("bmp", write_folder, "file://{}"),
    "tar": ("a.tar", write_tar, "{}"),
    "tar.gz": ("a.tar.gz", write_tar, "{}"),
    "tar.gz at a URL": ("a.tar.gz", write_tar, "file://{}"),
    "parquet": ("a.parquet", write_parquet, "{}"),
}


def write_small(folder: Path, pictures: int) -> None:
    """Writes small pictures, after which the command starts processes."""
    from PIL import Image

    folder.mkdir()
    for i in range(pictures):
        content = io.BytesIO()
        Image.new("RGB", (8, 6), (i % 256, i // 256, 0)).save(content, "PNG")
        (folder / f"{i:04}.png").write_bytes(content.getvalue())


def with_children(process: int) -> list[int]:
    """Returns the ids of a process and its descendants."""
    found = [process]
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            children = (thread / "children").read_text().split()
            found += itertools.chain.from_iterable(map(with_children, map(int, children)))
    return found


def memory(process: int) -> int:
    """Returns a process's share of memory in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def peak(checkpoint: Path, inputs: list[str], workers: int) -> int:
    """Runs the command; returns the largest sum of its processes' memory in bytes.

    Raises:
      RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "pallas_patch_embed", "embed", *inputs, "--quiet"]
        command += ["--checkpoint", str(checkpoint), "--out", f"{out}/out"]
        command += ["--workers", str(workers)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        most = 0
        while process.poll() is None:
            most = max(most, sum(map(memory, with_children(process.pid))))
            time.sleep(INTERVAL)
    if process.returncode:
        raise RuntimeError(f"embed exited with {process.returncode} ({' '.join(inputs)}).")
    return most


def measure(chosen: argparse.Namespace, config: Any, folder: Path) -> None:
    """Prints the peak for each source and number of workers."""
    from benchmarks import checkpoints
    from pallas_patch_embed.embed.decoders import DECODED_HERE

    checkpoint = folder / "checkpoint"
    checkpoints.write(config, checkpoint)
    write_small(folder / "small", DECODED_HERE)
    small = str(folder / "small")
    print("| source | workers | peak in MB |\n|---|---|---|")
    for workers in chosen.workers:
        print(
            f"| small pictures alone | {workers} | {peak(checkpoint, [small], workers) / 1e6:.0f} |"
        )
    for name, (file, write, place) in SOURCES.items():
        path = folder / file
        if not path.exists():
            write(path, chosen.pictures)
        for workers in chosen.workers:
            inputs = [*([small] if workers > 1 else []), place.format(path)]
            most = peak(checkpoint, inputs, workers)
            print(f"| {name} | {workers} | {most / 1e6:.0f} |", flush=True)


def main() -> None:
    """Measures all sources."""
    from pallas_patch_embed.siglip2 import Config

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedding_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 8])
    config = Config(32, 1, 2, 64, 8, (4, 4), image_size=(32, 32))
    with tempfile.TemporaryDirectory() as folder:
        measure(parser.parse_args(), config, Path(folder))


if __name__ == "__main__":
    main()
