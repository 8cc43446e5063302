"""Measures the kernel for attention beside cuDNN on a Hopper GPU.

  python -m benchmarks.attention --out bench
  python -m benchmarks.attention --shapes "B/16 224" --configs 2,256,2 3,128,3
  python -m benchmarks.attention --sweep 64 --images 8 --seconds 0
  python -m benchmarks.attention --shapes "NaFlex B/16" --packed
  python -m benchmarks.attention --chosen --levels int8

Every result is compared with float32. Times are in milliseconds, in bursts and sustained; all
contenders of a shape are timed in one process, in turn. With lengths the bound is the time of whole
images times the part of the tiles that have tokens. With --packed the images lie behind one another
in rows; without a kernel each is gathered. With --levels results are in 8 bits, and "+ pass" is the
kernel in bfloat16 with a pass that rounds its result. The records are written to attention.jsonl.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.base.chips import Chip, Target, default_device
from pallas_patch_embed.base.dtypes import EIGHT_BITS, TABLE
from pallas_patch_embed.base.levels import to_levels
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.encoders.naflex import first_fit
from pallas_patch_embed.layers import attention, attention_sm90
from pallas_patch_embed.layers.attention_sm90 import Config, Shape

SHAPES = {
    "B/16 224": Shape(512, 196, 12, 64),
    "L/16 384": Shape(256, 576, 16, 64),
    "So400m/14 384": Shape(64, 729, 16, 72),
    "NaFlex B/16 64": Shape(1024, 64, 12, 64),
    "NaFlex B/16 256": Shape(256, 256, 12, 64),
    "NaFlex B/16": Shape(64, 1024, 12, 64),
    "NaFlex So400m/16 256": Shape(256, 256, 16, 72),
    "NaFlex So400m/16": Shape(64, 1024, 16, 72),
}
CONFIGS = [
    Config(consumers, keys, slots)
    for consumers, keys in ((2, 256), (2, 192), (2, 128), (2, 64), (3, 128), (3, 64))
    for slots in (2, 3, 4)
]

# A sweep has the numbers of tokens of the usual encoders, up to 4096, and 12 heads. Unless told
# otherwise, it has as many images as have about 100,000 tokens.
SWEEP = [
    50,
    64,
    145,
    196,
    197,
    256,
    257,
    324,
    400,
    576,
    577,
    729,
    784,
    1024,
    1025,
    1369,
    2304,
    4096,
]
SWEEP_HEADS, SWEEP_TOKENS = 12, 100_000
MIXES = ("full", "uniform", "bimodal", "one long")

# Largest relative error (Frobenius norm) of a contender: probabilities and results are bfloat16.
MOST_ERROR = 2.0**-7

# The same in 8 bits, for values with this deviation. Results then have deviations from 15, with
# which the rounding error of int8, 0.29 on average, is 1.9%.
MOST_ERROR_OF_LEVELS, DEVIATION = 2.0**-5, 300


def draw_lengths(mix: str, shape: Shape) -> np.ndarray:
    """Draws the numbers of tokens of the images."""
    rng = np.random.default_rng(0)
    found = np.full(shape.B, shape.S if mix == "full" else shape.S // 8)
    if mix == "uniform":
        found = rng.integers(1, shape.S + 1, shape.B)
    elif mix == "bimodal":
        found[::2] = shape.S
    elif mix == "one long":
        found[0] = shape.S
    return found.astype(np.int32)


def tiles_of(lengths: np.ndarray, shape: Shape, config: Config) -> int:
    """Returns the number of pairs of query tiles and key tiles that have tokens."""
    step = config.consumers * attention_sm90.ROWS
    return int((-(-lengths // step) * -(-lengths // config.keys)).sum())


@functools.partial(jax.jit, static_argnames="largest")
def relative_error(
    y: Any, q: Any, k: Any, v: Any, lengths: Any, largest: float = math.inf
) -> jax.Array:
    """Returns the relative error of y [B, S, H, D] in rows that have tokens, by float32.

    Its magnitudes are clipped to `largest`.
    """
    images = math.gcd(len(y), 8)  # The scores of more images may not fit into memory.
    inside = attention.prefix_mask(lengths, y.shape[1])[..., None, None]

    def errors(part: Any) -> Any:
        y, q, k, v, lengths, inside = part
        with jax.default_matmul_precision("highest"):
            wanted = jax.nn.dot_product_attention(
                *(x.astype(jnp.float32) for x in (q, k, v)),
                key_value_seq_lengths=lengths,
                implementation="xla",
            )
            wanted = jnp.clip(wanted, -largest, largest)
        difference = jnp.where(inside, y.astype(jnp.float32) - wanted, 0)
        return jnp.square(difference).sum(), jnp.where(inside, jnp.square(wanted), 0).sum()

    parts = [x.reshape(-1, images, *x.shape[1:]) for x in (y, q, k, v, lengths, inside)]
    wrong, whole = jax.lax.map(errors, parts)
    return jnp.sqrt(wrong.sum() / whole.sum())


def contenders(
    shape: Shape, operands: tuple[Any, ...], configs: list[Config], chip: Chip, levels: str
) -> dict[str, timing.Contender]:
    """Returns cuDNN and the kernel with each config that fits."""
    _, _, _, *more = operands
    longest = shape.S if len(more) == 2 else None
    formula = functools.partial(attention.formula, longest=longest, levels=levels)
    found = {"cudnn": timing.Contender(jax.jit(formula), operands)}
    for config in configs:
        if not config.fits(shape, chip, lengths=bool(more)):
            continue

        def kernel(*operands: Any, config: Config = config, **static: Any) -> jax.Array:
            ordered = attention_sm90.with_order(config, *operands, longest=longest)
            static |= dict(longest=longest, config=config, chip=chip)
            return attention_sm90.kernel(*ordered, **static)

        if levels:

            def rounded(*operands: Any, kernel: Any = kernel) -> jax.Array:
                return to_levels(kernel(*operands).astype(jnp.float32), levels)

            found[f"{name_of(config)} + pass"] = timing.Contender(jax.jit(rounded), operands)
        one = functools.partial(kernel, levels=levels)
        found[name_of(config)] = timing.Contender(jax.jit(one), operands)
    return found


def name_of(config: Config) -> str:
    """Returns consumers,keys,slots."""
    return ",".join(map(str, dataclasses.astuple(config)))


def results_of(compared: dict[str, timing.Contender]) -> Iterator[tuple[str, Any]]:
    """Yields the result of each contender; prints why one fails, and leaves it out."""
    for name, contender in list(compared.items()):
        try:
            y = contender()
        except Exception as error:  # A kernel may not compile.
            print(f"{name}: {str(error).splitlines()[0]}")
            del compared[name]
        else:
            yield name, y


def compare(
    shape: Shape,
    lengths: np.ndarray | None,
    configs: list[Config] | None,
    chip: Chip,
    seconds: float,
    *,
    packed: bool = False,
    levels: str = "",
) -> list[dict[str, Any]]:
    """Checks and times all contenders for one shape; without configs, the one that is chosen.

    `packed` says whether images with lengths lie behind one another in rows, and `levels` is the
    dtype of results in 8 bits.
    """
    if configs is None:
        configs = [attention_sm90.choose(shape, chip, lengths=lengths is not None)]
    rows, more = tuple(shape), [] if lengths is None else [jnp.asarray(lengths)]
    segments = None
    if packed and lengths is not None:
        places, number = first_fit(lengths.tolist(), tokens := 8 * shape.S)
        rows = (number, tokens, shape.H, shape.D)
        more.append(jnp.asarray([row * tokens + start for row, start in places], jnp.int32))
        segments = attention.Segments(more[1], more[0], shape.S)
    drawn = (
        jax.random.normal(key, rows, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)
    )
    q, k, v = drawn
    operands = (q, k, v * DEVIATION if levels else v, *more)
    compared = contenders(shape, operands, configs, chip, levels)
    timing.compile_all(compared.values())
    whole = jnp.full(shape.B, shape.S) if lengths is None else more[0]
    errors = {}
    for name, y in results_of(compared):
        images = [x.reshape(rows) for x in (y, *operands[:3])]
        if segments is not None:
            images = list(map(segments.gather, images))
        largest, most = math.inf, MOST_ERROR
        if levels:
            largest, most = TABLE[levels].largest, MOST_ERROR_OF_LEVELS
        errors[name] = float(relative_error(*images, whole, largest=largest))
        if not errors[name] <= most:
            raise SystemExit(f"{name} has a relative error of {errors[name]} for {shape}.")
    burst = timing.burst(compared, rounds=3, rest=0.2 if seconds else 0.05)
    sustained = timing.sustained(compared, seconds=seconds, rounds=1) if seconds else {}
    found = {
        name: {
            "shape": list(shape),
            "packed": packed,
            "levels": levels,
            "program": name,
            "error": errors[name],
            "burst": burst[name].milliseconds,
        }
        for name in compared
    }
    for name, time in sustained.items():
        found[name]["sustained"] = time.milliseconds
    for config in configs if lengths is not None else ():
        if row := found.get(name_of(config)):
            all_tiles = tiles_of(np.full(shape.B, shape.S), shape, config)
            row["tiles"] = tiles_of(lengths, shape, config) / all_tiles
    return list(found.values())


def main() -> None:
    """Prints and records the times."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--sweep", type=int, nargs="+", help="instead, heads of these widths")
    parser.add_argument("--tokens", type=int, nargs="+", default=SWEEP, help="of the sweep")
    parser.add_argument("--configs", nargs="+", help="consumers,keys,slots; by default many")
    parser.add_argument("--chosen", action="store_true", help="only the config that is chosen")
    parser.add_argument("--images", type=int, nargs="+", help="instead of those of the shapes")
    parser.add_argument("--packed", action="store_true", help="packs the images of the mixes")
    parser.add_argument("--levels", choices=EIGHT_BITS, default="", help="dtype of the results")
    parser.add_argument("--mixes", nargs="*", default=list(MIXES), help="mixes for NaFlex")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a sustained turn; 0: none")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    chosen = parser.parse_args()
    chip = Target.of(default_device()).chip
    if chip is None or chip.capability != attention.CAPABILITY:
        raise SystemExit("benchmarks.attention: the kernel needs a Hopper GPU, but there is none.")
    configs = None if chosen.chosen else CONFIGS
    if chosen.configs:
        configs = [Config(*map(int, text.split(","))) for text in chosen.configs]
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "attention.jsonl"
    path.write_text(json.dumps({"kind": "environment", "text": timing.environment()}) + "\n")
    print(timing.environment())
    shapes = [(name, SHAPES[name]) for name in chosen.shapes]
    if chosen.sweep:
        pairs = itertools.product(chosen.sweep, chosen.tokens)
        shapes = [("sweep", Shape(-(-SWEEP_TOKENS // S), S, SWEEP_HEADS, D)) for D, S in pairs]
    if chosen.images:
        shapes = [(name, shape._replace(B=B)) for B in chosen.images for name, shape in shapes]
    for name, shape in shapes:
        for mix in (None, *chosen.mixes) if "NaFlex" in name else (None,):
            lengths = None if mix is None else draw_lengths(mix, shape)
            packed = chosen.packed and lengths is not None
            more = dict(packed=packed, levels=chosen.levels)
            for row in compare(shape, lengths, configs, chip, chosen.seconds, **more):
                row |= {"kind": "attention", "name": name, "mix": mix}
                times = f"{row['burst']:8.4f} {row.get('sustained', math.nan):8.4f}"
                tiles = f"tiles {row['tiles']:.3f}" if "tiles" in row else ""
                print(
                    f"{name:18} {'x'.join(map(str, shape)):16} {mix or '':9} {row['program']:14} "
                    f"{times} error {row['error']:.5f} {tiles}",
                    flush=True,
                )
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
