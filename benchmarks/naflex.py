"""Measures NaFlex pictures that are packed into rows of tokens beside padded ones.

  python -m benchmarks.naflex --out bench
  python -m benchmarks.naflex --fills  # only how full batches and rows are, which needs no GPU

The encoder is a B/16 with random weights in bfloat16; its pooled outputs of both must agree. Three
mixes of pictures are drawn: photographs, panoramas and icons in equal parts, and squares that all
have the largest number of patches. SigLIP2's image processor, and so `embed`, enlarges small
pictures; "kept" are pictures that are only made smaller. Fill is the part of the tokens that are
patches. Packed pictures should reach 0.90 / fill of the padded batch times the rate of padded ones,
and 0.97 times if all are equal. The records are written to naflex.jsonl.
"""

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallas_patch_embed as ppe
from benchmarks import encoder as encoders
from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.encoders.naflex import aligned, first_fit
from pallas_patch_embed.encoders.program import BY_CUBLAS
from pallas_patch_embed.siglip2 import Encoder, batch_naflex, pack_naflex

type Size = tuple[int, int]  # Height and width in pixels.

PATCHES = (64, 256, 1024)
PATCH = 16

# Number of pictures of a folder whose fill is computed.
FOLDER = 2048

# Rows are this many times as long as the largest picture, which is the default of pack_naflex.
PICTURES_A_ROW = 8

# Largest relative difference (Frobenius norm) of pooled outputs, which are bfloat16.
MOST_DIFFERENCE = 2.0**-6


def photographs(rng: np.random.Generator, pictures: int) -> list[Size]:
    """Draws sizes of photographs: usual aspect ratios, a third upright, 400 to 6000 pixels long."""
    ratios = rng.choice([4 / 3, 3 / 2, 16 / 9, 1], pictures, p=[0.5, 0.3, 0.15, 0.05])
    longer = np.exp(rng.uniform(np.log(400), np.log(6000), pictures))
    sizes = np.stack([longer / ratios, longer], 1).round().astype(int)
    upright = rng.random(pictures) < 1 / 3
    sizes[upright] = sizes[upright, ::-1]
    return list(map(tuple, sizes.tolist()))


def panoramas_and_icons(rng: np.random.Generator, pictures: int) -> list[Size]:
    """Draws sizes of panoramas, 2 to 10 times as wide as high, and of square icons in turn."""
    height = np.exp(rng.uniform(np.log(200), np.log(2000), pictures))
    wide = np.stack([height, height * rng.uniform(2, 10, pictures)], 1).round().astype(int)
    side = rng.choice([16, 24, 32, 48, 64, 96, 128, 256], pictures)
    wide[::2] = side[::2, None]
    return list(map(tuple, wide.tolist()))


def squares(rng: np.random.Generator, pictures: int) -> list[Size]:
    """Returns the sizes of equal large squares."""
    del rng
    return [(1000, 1000)] * pictures


MIXES: dict[str, Callable[[np.random.Generator, int], list[Size]]] = {
    "photographs": photographs,
    "panoramas and icons": panoramas_and_icons,
    "all equal": squares,
}


def grids(mix: str, pictures: int, most: int, kept: bool) -> list[Size]:
    """Draws pictures of a mix; returns the height and width of each in patches.

    Args:
      mix: one of MIXES.
      pictures: number of pictures.
      most: largest number of patches.
      kept: whether pictures that have fewer patches are not enlarged.
    """
    found = []
    for H, W in MIXES[mix](np.random.default_rng(0), pictures):
        own = math.ceil(H / PATCH), math.ceil(W / PATCH)
        fits = math.prod(own) <= most
        found.append(own if kept and fits else largest_grid(H, W, PATCH, most))
    return found


def fills(drawn: list[Size], most: int) -> tuple[float, float]:
    """Returns how full a padded batch of these pictures is, and how full rows are."""
    lengths = [math.prod(grid) for grid in drawn]
    row = PICTURES_A_ROW * aligned(most)
    _, rows = first_fit(lengths, row)
    return sum(lengths) / (len(lengths) * most), sum(lengths) / (rows * row)


def draw(patch_dtype: str) -> Encoder:
    """Draws a B/16 with random weights for pictures of any aspect ratio."""
    fixed, drawn = encoders.draw("B/16 224", patch_dtype, "bfloat16")
    config = dataclasses.replace(fixed.config, naflex=True, image_size=None, grid=(16, 16))
    params = ppe.pack(drawn["kernel"], drawn["bias"], None, patch_size=PATCH, dtype=patch_dtype)
    positions = 0.02 * jax.random.normal(jax.random.key(1), (*config.grid, config.width))
    return dataclasses.replace(fixed, patch_embed=params, positions=positions, config=config)


def compare(
    encoder: Encoder, drawn: list[Size], most: int, *, rest: float, seconds: float
) -> dict[str, Any]:
    """Compares the pooled outputs of packed and padded pictures, and times both.

    Raises:
      RuntimeError: the outputs differ.
    """
    rng = np.random.default_rng(0)
    p, C = encoder.config.patch, encoder.config.channels
    pictures = [rng.integers(0, 256, (h * p, w * p, C), np.uint8) for h, w in drawn]
    patches, sides, _ = batch_naflex(pictures, encoder.config, most)
    packed = pack_naflex(pictures, encoder.config, most)
    jit = functools.partial(jax.jit, compiler_options=BY_CUBLAS if timing.on_gpu() else None)
    functions = {
        "padded": jit(lambda e, x, sides: e(x, spatial_shapes=sides).pooler_output),
        "packed": jit(lambda e, x: e.packed(x).pooler_output),
    }
    operands = {"padded": (encoder, patches, sides), "packed": (encoder, packed)}
    compared = {
        way: timing.Contender(function, jax.device_put(operands[way]))
        for way, function in functions.items()
    }
    timing.compile_all(compared.values())
    wanted, found = (np.asarray(contender(), np.float32) for contender in compared.values())
    difference = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    if not difference <= MOST_DIFFERENCE:
        raise RuntimeError(f"packed and padded pictures differ by {difference:.4f}.")
    burst = timing.burst(compared, rounds=3, rest=rest)
    times = {"burst": burst, "sustained": burst}
    if seconds:
        times["sustained"] = timing.sustained(compared, seconds=seconds, rounds=2, calls=5)
    record: dict[str, Any] = {
        "pictures": len(pictures),
        "rows": list(packed.patches.shape[:2]),
        "fill of the batch": sum(map(math.prod, drawn)) / (len(drawn) * most),
        "fill of the rows": packed.fill,
        "difference": difference,
    }
    for regime, measured in times.items():
        rates = {way: 1e3 * len(pictures) / t.milliseconds for way, t in measured.items()}
        record[regime] = rates | {"packed / padded": rates["packed"] / rates["padded"]}
    return record


def measure(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the fills, and unless only they are asked for the rates, of each mix."""
    encoder = None if chosen.fills else jax.device_put(draw(chosen.patch_dtype))
    for most in chosen.patches:
        for mix in chosen.mixes:
            for kept in (False, True) if mix != "all equal" else (False,):
                named = {"mix": mix, "patches": most, "kept": kept}
                batch, rows = fills(grids(mix, FOLDER, most, kept), most)
                yield {"kind": "fills", **named, "batch": batch, "rows": rows}
                if encoder is None:
                    continue
                # A batch cannot have all tokens of its rows if the last row is not full.
                drawn = grids(mix, max(1, chosen.tokens // most), most, kept)
                found = compare(encoder, drawn, most, rest=chosen.rest, seconds=chosen.seconds)
                least = 0.97 if mix == "all equal" else 0.90 / found["fill of the batch"]
                yield {"kind": "rates", **named, "wanted": least, **found}


def line(record: dict[str, Any]) -> str:
    """Describes a record."""
    about = f"{record['mix']}{', kept' if record['kept'] else ''}"
    start = f"{about:26} {record['patches']:5}"
    if record["kind"] == "fills":
        return f"{start}  folder: batch {record['batch']:.3f}, rows {record['rows']:.3f}"
    text = (
        f"{start}  {record['pictures']} pictures: batch {record['fill of the batch']:.3f}, rows "
        f"{record['fill of the rows']:.3f}"
    )
    for regime in ("burst", "sustained"):
        rates = record[regime]
        text += (
            f"; {regime} {rates['padded']:.1f} and {rates['packed']:.1f} pictures/s, "
            f"{rates['packed / padded']:.3f}"
        )
    return f"{text} (wanted {record['wanted']:.3f})"


def main() -> None:
    """Prints and records every measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.naflex",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--patches", nargs="+", type=int, default=list(PATCHES), help="at most")
    parser.add_argument("--tokens", type=int, default=2**16, help="of the padded batch")
    parser.add_argument("--patch-dtype", default="int8")
    parser.add_argument("--fills", action="store_true", help="measure no times")
    parser.add_argument("--rest", type=float, default=0.2, help="idle seconds before a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a sustained turn; 0: none")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "naflex.jsonl"
    path.write_text(json.dumps({"kind": "environment", "text": timing.environment()}) + "\n")
    print(timing.environment())
    for record in measure(chosen):
        print(line(record), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
