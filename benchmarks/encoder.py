"""A whole encoder, end to end: what a faster patch embedding is worth.

Random bfloat16 weights, random uint8 images; everything after the patch embedding is the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_patch_embed as ppe
from benchmarks import timing
from benchmarks.contenders import convolution, cut_and_product
from benchmarks.timing import Contender
from pallas_patch_embed.demo import draw_weights
from pallas_patch_embed.problem import named_shape
from pallas_patch_embed.siglip2 import Config, Encoder
from pallas_patch_embed.siglip2.encoder import transform

# Published architectures: google/siglip2-base-patch16-224, google/siglip2-so400m-patch14-384.
ENCODERS = {
    "B/16 224": Config(768, 12, 12, 3072, 16, (14, 14), image_size=(224, 224)),
    "So400m/14 384": Config(1152, 27, 16, 4304, 14, (27, 27), image_size=(384, 384)),
}

# The pooled output of bfloat16 encoders that differ in the patch embedding alone: bfloat16's
# rounding, and int8's and float8's of the weight, behind all layers.
LARGEST_DIFFERENCE = 0.1


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast an encoder with one way of embedding patches is.

    Attributes:
      encoder, images, dtype: the model, how many images a call, and the dtype of its patches.
      way: how images become embeddings.
      milliseconds, low, high: a call, after a rest: median, 10th and 90th percentile.
      images_a_second: in such calls.
      difference: relative, of its pooled output and that with the convolution.
    """

    encoder: str
    images: int
    dtype: str
    way: str
    milliseconds: float
    low: float
    high: float
    images_a_second: float
    difference: float


def draw(name: str, patch_dtype: str, dtype: str) -> tuple[Encoder, dict[str, np.ndarray]]:
    """An encoder with random weights, and its patch embedding before packing."""
    config, shape = ENCODERS[name], named_shape(name)
    D, L = config.width, config.depth
    drawn = draw_weights(np.random.default_rng(0), shape)
    keys = map(functools.partial(jax.random.fold_in, jax.random.key(0)), range(100))

    def dense(i, o, *leading):
        kernel = jax.random.normal(next(keys), (*leading, i, o)) * i**-0.5
        return {"kernel": kernel.astype(dtype), "bias": jnp.zeros((*leading, o), dtype)}

    def norm(*leading):
        return {"scale": jnp.ones((*leading, D)), "bias": jnp.zeros((*leading, D))}

    def mlp(*leading):
        return dict(
            norm=norm(*leading),
            fc1=dense(D, config.mlp, *leading),
            fc2=dense(config.mlp, D, *leading),
        )

    after = mlp(L)
    blocks = dict(
        norm1=norm(L), qkv=dense(D, 3 * D, L), out=dense(D, D, L), norm2=after.pop("norm")
    )
    query = jax.random.normal(next(keys), (D,)).astype(dtype)
    head = dict(query=query, kv=dense(D, 2 * D), out=dense(D, D), **mlp())
    params = ppe.pack(**drawn, patch_size=shape.patch, grid=shape.grid, dtype=patch_dtype)
    return Encoder(params, None, blocks | after, norm(), head, config, dtype), drawn


def ways(
    encoder: Encoder, drawn: dict[str, np.ndarray]
) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
    """name -> function (encoder, images, *more) to the pooled output, and `more`."""
    table = drawn["bias"] + drawn["position_embedding"]
    unpacked = jnp.asarray(drawn["kernel"]), jnp.asarray(table)

    def by(embed, encoder, images, *more):
        return transform(encoder, embed(images, *more)).pooler_output

    def by_backend(backend, encoder, images):
        y = ppe.embed_images(images, encoder.patch_embed, backend=backend, out_dtype=encoder.dtype)
        return transform(encoder, y).pooler_output

    found = {
        "convolution": (functools.partial(by, convolution), unpacked),
        "patchify + jnp.dot": (functools.partial(by, cut_and_product), unpacked),
    }
    S = drawn["position_embedding"].shape[0]
    for row in ppe.explain((1, S, encoder.patch_embed.K_padded), encoder.patch_embed):
        if row.serves:
            found[row.backend] = (functools.partial(by_backend, row.backend), ())
    return found


def speeds(name: str, images: int, patch_dtypes: list[str], **timed) -> list[Speed]:
    """Every way's speed.

    Raises:
      RuntimeError: a way's output is another one than the convolution's.
    """
    side = named_shape(name).image
    pixels = jax.random.bits(jax.random.key(1), (images, side, side, 3), jnp.uint8)
    contenders, differences = {}, {}
    for dtype in patch_dtypes:
        encoder, drawn = jax.device_put(draw(name, dtype, "bfloat16"))
        for way, (function, more) in ways(encoder, drawn).items():
            # Those of bfloat16 are the same for all dtypes.
            key = (way, dtype if not more else "bfloat16")
            if key in contenders:
                continue
            contenders[key] = Contender(jax.jit(function), (encoder, pixels, *more))
    timing.compile_all(contenders.values())
    for key, contender in contenders.items():
        pooled = np.asarray(contender(), np.float32)
        if not differences:
            expected = pooled
        off = float(np.linalg.norm(pooled - expected) / np.linalg.norm(expected))
        if not off <= LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name}, {key}: differs by {off:.3f} from the convolution.")
        differences[key] = off
    found = timing.burst({str(key): contender for key, contender in contenders.items()}, **timed)
    return [
        Speed(
            name,
            images,
            key[1],
            key[0],
            measured.milliseconds,
            measured.low,
            measured.high,
            1e3 * images / measured.milliseconds,
            differences[key],
        )
        for key, measured in zip(contenders, found.values())
    ]


def table(found: list[Speed]) -> str:
    """The speeds of one encoder as an aligned table, with the gain over the convolution."""
    slowest = next(s.milliseconds for s in found if s.way == "convolution")
    lines = [f"{'patch embedding':34}{'ms':>9}{'images/s':>12}{'gain':>8}{'difference':>12}"]
    for s in found:
        lines.append(
            f"{f'{s.way}, {s.dtype}':34}{s.milliseconds:9.2f}{s.images_a_second:12,.0f}"
            f"{slowest / s.milliseconds - 1:8.1%}{s.difference:12.2%}"
        )
    return "\n".join(lines)
