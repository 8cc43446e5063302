"""The benchmark of resizing: what it measures, in a small form on the CPU."""

import argparse

import numpy as np
import pytest
from PIL import Image

from benchmarks import embed_runs, resizing
from pallas_patch_embed.siglip2 import Config

SMALL = argparse.Namespace(
    shapes=(((60, 45), 32), ((45, 60), 24)),
    filters=["bicubic"],
    batch=3,
    rest=0.0,
    seconds=0.01,
    parts=["resize", "copies", "decoding"],
)


@pytest.mark.slow("compiles programs for two shapes")
def test_the_device_the_copies_and_the_decoders_are_timed(tmp_path):
    _, *found = resizing.measure(SMALL, {}, tmp_path)
    times = [r for r in found if r["kind"] == "resize"]
    assert [(r["width"], r["side"]) for r in times] == [(60, 32), (45, 24)]
    assert all(r["microseconds a picture"] > 0 for r in times)
    copies = [r for r in found if r["kind"] == "copies"]
    assert {r["step"] for r in copies} >= {"host, new array", "transfer", "all, and resize"}
    assert all(r["GB/s of the pictures"] > 0 for r in copies)
    decoders = [(r["name"], r["side"]) for r in found if r["kind"] == "decoding"]
    assert len(set(decoders)) == 4


def test_a_wrong_pixel_ends_the_benchmark(monkeypatch):
    pictures = resizing.photographs(2, (40, 30))
    resizing.check(pictures, 16, "bicubic")
    wanted = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda *arguments: Image.fromarray(np.asarray(wanted(*arguments)) ^ np.uint8(1)),
    )
    with pytest.raises(RuntimeError, match="a pixel differs"):
        resizing.check(pictures, 16, "bicubic")


@pytest.mark.slow("runs the command twice")
def test_the_command_gives_equal_embeddings_with_both_options(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny = {"tiny": Config(32, 1, 2, 64, 8, (4, 4), image_size=(32, 32))}
    chosen = argparse.Namespace(
        parts=["embed"], encoders=["tiny"], forms=["jpeg"], pictures=10, distinct=5
    )
    found = list(resizing.measure(chosen, tiny, tmp_path))
    runs = [r for r in found if isinstance(r, embed_runs.EmbedRun)]
    assert [r.options for r in runs] == ["--resize host", "--resize device"]
    assert all(r.pictures == 10 and r.rate > 0 for r in runs)
    assert found[-1] == {"kind": "equal", "encoder": "tiny", "form": "jpeg", "embeddings": 10}
