"""Reads the records of benchmarks/, and writes numbers as the pages have them."""

import collections

from benchmarks import headline, results
from tests.repository import ROOT

# Names of contenders in encoder_peers.jsonl.
IN_JIT = "this encoder"
BY_CUBLAS = "this encoder, epilogues by cuBLAS"
CONVOLUTION = f"{IN_JIT} with the convolution"
OUTSIDE = "this encoder, called outside of jit"
INT8 = "this encoder, blocks in int8"
INT8_WITHOUT_OUT = f"{INT8} except out of every block"
COMPILED = "transformers, torch.compile"
CUDA_GRAPHS = f"{COMPILED}, reduce-overhead"
AUTOTUNED = f"{COMPILED}, max-autotune"


def records(name):
    """Returns the records of a file, given as "h200/results"."""
    return results.read(ROOT / f"benchmarks/{name}.jsonl")


def both(times, digits=2):
    """Returns the times in a burst and sustained."""
    return " / ".join(f"{times[regime]:.{digits}f}" for regime in ("burst", "sustained"))


def span(values, digits=2):
    """Returns the range of numbers, and a single one if they are rounded to the same."""
    ends = [f"{x:.{digits}f}" for x in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def newest_encoder_peers(folder="h200"):
    """Returns the newest records by encoder, number of images and contender."""
    return {
        (r["encoder"], r["images"], r["contender"]): r
        for r in records(f"{folder}/encoder_peers")
        if "contender" in r
    }


def encoder_peer_runs(encoder, images):
    """Returns the records of an encoder and a number of images by contender, for each run."""
    runs = headline.runs(ROOT / "benchmarks/h200/encoder_peers.jsonl")
    found = (
        {r["contender"]: r for r in run if (r.get("encoder"), r.get("images")) == (encoder, images)}
        for _, run in runs
    )
    return [run for run in found if run]


def loops_over_blocks():
    """Returns records by encoder, number of images, and how the loop over blocks is compiled."""
    return {
        (r["encoder"], r["images"], r["variant"]): r
        for r in records("h200/encoder_variants")
        if r.get("kind") == "loop over blocks"
    }


def operator_times(name, images=4736, shape="B/16 224"):
    """Returns milliseconds by (source, contender, dtype, pixels), and then by regime."""
    found = collections.defaultdict(dict)
    for r in records(name):
        if r["kind"] == "time" and (r["shape"], r["images"]) == (shape, images):
            key = r["source"], r["contender"], r["dtype"], r["pixels"]
            found[key][r["regime"]] = r["milliseconds"]
    return dict(found)


def fastest(times):
    """Returns the shortest time of each regime."""
    return {regime: min(t[regime] for t in times) for regime in times[0]}
