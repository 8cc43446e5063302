"""The pictures of `benchmarks.embedding`: JPEG files, and tars and parquet files of them."""

import io
import itertools
import multiprocessing
import os
import statistics
import tarfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

# Width and height, and the quality of a JPEG file.
SIZE = (500, 375)
QUALITY = 92

# Number of pictures in each tar and parquet file.
GROUP = 2500


def picture(number: int) -> bytes:
    """Returns a JPEG file with a random crop of one of the package's photographs."""
    from importlib import resources

    from PIL import Image

    rng = np.random.default_rng(number)
    folder = resources.files("pallas_patch_embed") / "photos"
    files = sorted(f.name for f in folder.iterdir() if f.name.endswith(".png"))
    with (folder / files[number % len(files)]).open("rb") as stream, Image.open(stream) as image:
        whole = image.convert("RGB")
    scale = max(SIZE[0] / whole.width, SIZE[1] / whole.height) * rng.uniform(1, 1.5)
    whole = whole.resize((round(whole.width * scale) + 1, round(whole.height * scale) + 1))
    left, top = (int(rng.integers(0, whole.size[i] - SIZE[i] + 1)) for i in (0, 1))
    part = whole.crop((left, top, left + SIZE[0], top + SIZE[1]))
    file = io.BytesIO()
    part.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def write(pictures: int, distinct: int, folder: Path, forms: Sequence[str]) -> dict[str, float]:
    """Writes pictures in these forms; `distinct` different pictures repeat under new names.

    Returns:
      The mean size of a picture in kilobytes, and the number of different pictures.
    """
    # Spawned instead of forked, because JAX may have threads in this process.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        made = list(pool.map(picture, range(distinct), chunksize=max(1, distinct // 256)))
    names = [f"{i:07d}" for i in range(pictures)]
    contents = itertools.cycle(made)
    if {"jpeg", "resumed"} & set(forms):
        (folder / "jpeg").mkdir(parents=True)
        first = [folder / "jpeg" / f"{name}.jpg" for name in names[:distinct]]
        for path, content in zip(first, contents):
            path.write_bytes(content)
        for i, name in enumerate(names[distinct:]):
            os.link(first[i % distinct], folder / "jpeg" / f"{name}.jpg")
    groups = list(itertools.batched(zip(names, itertools.cycle(made)), GROUP))
    if "tar" in forms:
        (folder / "tar").mkdir(parents=True)
        for i, group in enumerate(groups):
            with tarfile.open(folder / "tar" / f"{i:04d}.tar", "w") as tar:
                for name, content in group:
                    member = tarfile.TarInfo(f"{name}.jpg")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if "parquet" in forms:
        import pyarrow
        import pyarrow.parquet

        (folder / "parquet").mkdir(parents=True)
        for i, group in enumerate(groups):
            ids, images = zip(*group)
            table = pyarrow.table({"id": list(ids), "image": list(images)})
            pyarrow.parquet.write_table(table, folder / "parquet" / f"{i:04d}.parquet")
    return {"kilobytes": statistics.mean(map(len, made)) / 1e3, "distinct": len(made)}


def inputs(folder: Path, form: str, parts: int) -> list[list[str]]:
    """Divides the pictures among `parts` processes, and returns the inputs of each."""
    if form == "jpeg":
        if parts == 1:
            return [[str(folder / form)]]
        found = sorted(map(str, (folder / form).iterdir()))
        lists = []
        for i in range(parts):
            path = folder / f"list{i}of{parts}.txt"
            path.write_text("\n".join(found[i::parts]) + "\n")
            lists.append(["--list", str(path)])
        return lists
    found = sorted(map(str, (folder / form).iterdir()))
    return [found[i::parts] for i in range(parts)]
