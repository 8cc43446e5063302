"""Measures the time and the memory of the exact search of `pallas-patch-embed search`.

  python -m benchmarks.searching

Random vectors are written in the layout of `embed`: normally distributed numbers in bfloat16, which
is what an encoder computes. Shards after the first DISTINCT ones are copies, and a search reads all
of them once before it is timed, so that they are in the disk cache.
"""

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.embed.folder import SHARD_ROWS
from pallas_patch_embed.embed.place import Local
from pallas_patch_embed.embed.ranking import nearest
from pallas_patch_embed.embed.tables import embeddings_table, parquet_bytes
from pallas_patch_embed.embed.units import Entry, Origin
from pallas_patch_embed.embed.written import Part, Shard

# Number of shards with different vectors.
DISTINCT = 16


def write(folder: Path, rows: int, width: int, dtype: str) -> list[Part]:
    """Writes shards of random vectors."""
    random = np.random.default_rng(0)
    parts: list[Part] = []
    for number, begin in enumerate(range(0, rows, SHARD_ROWS)):
        path = folder / f"{number:06}.parquet"
        n = min(SHARD_ROWS, rows - begin)
        if number >= DISTINCT and n == SHARD_ROWS:
            shutil.copy(folder / f"{number % DISTINCT:06}.parquet", path)
        else:
            vectors = np.asarray(random.standard_normal((n, width)), jnp.bfloat16).astype(dtype)
            names = [f"/photos/{begin + i:09}.jpg" for i in range(n)]
            entries = [Entry(name, Origin(name, "", 100_000, "2026-11-27")) for name in names]
            path.write_bytes(parquet_bytes(embeddings_table(entries, list(vectors)), {}))
        parts.append(Shard(str(folder), Local(str(folder)), path.name, width))
    return parts


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """Prints the median time of a search for each dtype."""
    query = np.random.default_rng(1).standard_normal(chosen.width)
    print("| dtype | GB in files | seconds | CPU seconds |\n|---|---|---|---|")
    for dtype in chosen.dtypes:
        place = folder / dtype
        place.mkdir()
        parts = write(place, chosen.rows, chosen.width, dtype)
        size = sum(path.stat().st_size for path in place.iterdir())
        nearest(parts, query, 10)
        seconds, cpu = [], []
        for _ in range(chosen.searches):
            began, of_cpu = time.perf_counter(), time.process_time()
            assert nearest(parts, query, 10).searched == chosen.rows
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - of_cpu)
        shutil.rmtree(place)
        times = f"{statistics.median(seconds):.3g} | {statistics.median(cpu):.3g}"
        print(f"| {dtype} | {size / 1e9:.3g} | {times} |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\nPeak memory of the process: {peak / 1e9:.2f} GB.")


def main() -> None:
    """Measures all dtypes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.searching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--searches", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        measure(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    main()
