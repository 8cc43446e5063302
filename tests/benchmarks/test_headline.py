"""The table and the pictures of the README are those of the newest records."""

import json

import pytest

from benchmarks import headline

OURS, TORCH = "this encoder, called outside of jit", "transformers, torch.compile"


def peer(contender, sustained, burst=9.0, images=512, encoder="B/16 224"):
    return dict(
        kind="encoder peer",
        encoder=encoder,
        images=images,
        contender=contender,
        sustained=sustained,
        burst=burst,
    )


def run_of(date):
    return {"kind": "run", "versions": f"NVIDIA H200 x 1, {date}, jax 0.11.2"}


RECORDS = [
    run_of("2026-01-02"),
    peer(OURS, 20.0),
    peer("this encoder", 1.0),
    peer("this encoder, blocks in int8", 16.0),
    peer(TORCH, 64.0),
    peer(f"{TORCH}, max-autotune", 32.0),
    peer(f"{TORCH}, torchao's int8", 25.6),
    run_of("2026-01-01"),
    peer(OURS, 10.0),
    run_of("2026-01-03"),
    peer(OURS, 0.5, 1.5, images=1),
    peer(TORCH, 0.25, 12.25, images=1),
]


EMBEDDED = dict(kind="embed", encoder="B/16 224", form="jpeg", devices=1, allowed=16)


def write(folder, records, name="encoder_peers.jsonl"):
    (folder / name).write_text("".join(f"{json.dumps(r)}\n" for r in records))


def test_the_newest_run_and_the_fastest_mode_count(tmp_path):
    write(tmp_path, RECORDS)
    many, one = headline.comparisons(tmp_path)
    assert many.values == {
        "this library, bfloat16": 25600.0,
        "this library, int8": 32000.0,
        "torch.compile": 16000.0,
        "torchao, int8": 20000.0,
    }
    assert (many.date, one.date) == ("2026-01-02", "2026-01-03")
    assert one.values == {"this library, bfloat16": 1.5, "torch.compile": 12.25}
    assert headline.table([many, one]).splitlines()[2:] == [
        "| SigLIP B/16 224, 512 pictures a call, pictures/s "
        "| **int8 32,000; bfloat16 25,600** | torchao, int8 20,000; torch.compile 16,000 |",
        "| SigLIP B/16 224, one picture, ms | **bfloat16 1.50** | torch.compile 12.2 |",
    ]


def test_the_command_embed_is_compared_with_nothing(tmp_path):
    slower, tars, more_cores = dict(rate=4000.4), dict(form="tar"), dict(allowed=32)
    records = [EMBEDDED | dict(rate=5000.4) | more for more in ({}, slower, tars, more_cores)]
    write(tmp_path, [run_of("2026-01-02"), *records], "embedding.jsonl")
    (found,) = headline.comparisons(tmp_path)
    assert headline.table([found]).splitlines()[2:] == [
        "| JPEG files to embeddings, SigLIP B/16 224, 16 cores, pictures/s "
        "| **bfloat16 5,000** | not compared |"
    ]


@pytest.mark.parametrize("name", headline.COLOURS)
def test_the_pictures_show_each_bar_in_its_colour(tmp_path, name):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    write(tmp_path, RECORDS)
    headline.draw(headline.comparisons(tmp_path), tmp_path / name)
    with image.open(tmp_path / name) as picture:
        assert picture.width == 1600  # Twice the width at which the README shows it.
        pixels = picture.convert("RGB").load()
        seen = {pixels[x, y] for x in range(0, picture.width, 4) for y in range(picture.height)}
    ours, others, _, page = (tuple(bytes.fromhex(c[1:])) for c in headline.COLOURS[name])
    assert {ours, others, page} <= seen
