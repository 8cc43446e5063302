"""Measures whole encoders, which shows how much they gain from a faster patch embedding.

Weights are random bfloat16, and images are random uint8. Only the patch embedding differs.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_patch_embed as ppe
from benchmarks.contenders import (
    LARGEST_ERROR,
    convolution,
    cut_and_product,
    data_of,
    draw_images,
    error,
)
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.demo import draw_weights
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender, Timing
from pallas_patch_embed.encoders.encoder import transform
from pallas_patch_embed.encoders.layouts import by_outputs
from pallas_patch_embed.siglip2 import Config, Encoder

# The architectures of google/siglip2-base-patch16-224 and google/siglip2-so400m-patch14-384.
ENCODERS = {
    "B/16 224": Config(768, 12, 12, 3072, 16, (14, 14), image_size=(224, 224)),
    "So400m/14 384": Config(1152, 27, 16, 4304, 14, (27, 27), image_size=(384, 384)),
}


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of an encoder with one implementation of the patch embedding.

    Attributes:
      encoder, images, dtype: the model, the images per call, and the dtype of patches.
      way: the implementation of the patch embedding.
      regime: one of `results.REGIMES`.
      milliseconds, low, high: median, 10th and 90th percentile of a call's time.
      images_a_second: images per second at the median time.
      difference: relative difference of the pooled output from that with the convolution.
    """

    encoder: str
    images: int
    dtype: str
    way: str
    regime: str
    milliseconds: float
    low: float
    high: float
    images_a_second: float
    difference: float


def draw(name: str, patch_dtype: str, dtype: str) -> tuple[Encoder, dict[str, np.ndarray]]:
    """Draws an encoder's random weights; returns it and its patch embedding before packing."""
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
    blocks |= after
    if dtype == "bfloat16":
        blocks = jax.device_put(by_outputs(jax.device_get(blocks), config))
    return Encoder(params, None, blocks, norm(), head, config, dtype), drawn


def in_8_bits(folder: str | Path, images: Any, dtype: str, **options: Any) -> Encoder:
    """Loads a checkpoint in 8 bits, calibrated on these images.

    Args:
      folder: the checkpoint. The calibration is kept there; if there is one already, it is used.
      images: [N, H, W, C] uint8.
      dtype: of the layers that are in 8 bits by default.
      options: as for `load_encoder`.
    """
    path = Path(folder, f"calibration_{dtype}.safetensors")
    if not path.exists():
        exact = ppe.load_encoder(folder, dtype="float32", **options)
        ppe.calibrate(exact, images, dtype=dtype).save(path)
    return ppe.load_encoder(folder, dtype=dtype, calibration=path, **options)


def ways(
    encoder: Encoder, drawn: dict[str, np.ndarray]
) -> dict[str, tuple[Callable, tuple[Any, ...], str]]:
    """Maps names to (function of (images, *more), `more`, reference of `contenders.error`).

    The functions return embeddings. The convolution and "patchify + jnp.dot" use bfloat16, whatever
    the operator's dtype is.
    """
    table = drawn["bias"] + drawn["position_embedding"]
    unpacked = jnp.asarray(drawn["kernel"]), jnp.asarray(table)
    found: dict[str, tuple[Callable, tuple[Any, ...], str]] = {
        "convolution": (convolution, unpacked, "unpacked"),
        "patchify + jnp.dot": (cut_and_product, unpacked, "unpacked"),
    }
    S = drawn["position_embedding"].shape[0]
    for row in ppe.explain((1, S, encoder.patch_embed.K_padded), encoder.patch_embed):
        if row.serves:
            embed = functools.partial(
                ppe.embed_images, backend=row.backend, out_dtype=encoder.dtype
            )
            found[row.backend] = (embed, (encoder.patch_embed,), "embedding")
    return found


def speeds(
    name: str,
    images: int,
    patch_dtypes: list[str],
    measures: dict[str, Callable[[dict[Any, Contender]], dict[Any, Timing]]],
) -> list[Speed]:
    """Measures an encoder's speed with every implementation of the patch embedding.

    Args:
      name: the encoder.
      images: images per call.
      patch_dtypes: the operator's dtypes.
      measures: regime -> function that measures contenders in this regime.

    Raises:
      RuntimeError: the embeddings of an implementation are wrong.
    """

    def pooled_by(embed, encoder, *arguments):
        return transform(encoder, embed(*arguments)).pooler_output

    shape, compared, checked = named_shape(name), {}, {}
    pixels = draw_images(shape, images, "random")
    for dtype in patch_dtypes:
        encoder, drawn = jax.device_put(draw(name, dtype, "bfloat16"))
        data = data_of(shape, pixels, encoder.patch_embed, drawn)
        for way, (embed, more, reference) in ways(encoder, drawn).items():
            # These bfloat16 implementations do not depend on the operator's dtype.
            key = (way, dtype if reference == "embedding" else "bfloat16")
            if key in compared:
                continue
            whole = jax.jit(functools.partial(pooled_by, embed))
            compared[key] = Contender(whole, (encoder, pixels, *more))
            checked[key] = Contender(jax.jit(embed), (pixels, *more)), data, reference
    timing.compile_all([*compared.values(), *(contender for contender, *_ in checked.values())])
    for key, (contender, data, reference) in checked.items():
        off = error(contender(), data, reference)
        if not off <= LARGEST_ERROR:
            raise RuntimeError(f"{name}, {key}: the relative error of the embeddings is {off:.4f}.")
    pooled = {key: np.asarray(contender(), np.float32) for key, contender in compared.items()}
    expected = next(iter(pooled.values()))
    return [
        Speed(
            name,
            images,
            dtype,
            way,
            regime,
            time.milliseconds,
            time.low,
            time.high,
            1e3 * images / time.milliseconds,
            float(np.linalg.norm(pooled[way, dtype] - expected) / np.linalg.norm(expected)),
        )
        for regime, measure in measures.items()
        for (way, dtype), time in measure(compared).items()
    ]


def table(found: list[Speed]) -> str:
    """Tabulates the speeds of one encoder in one regime, with the gain over the convolution."""
    slowest = next(s.milliseconds for s in found if s.way == "convolution")
    head = f"{'patch embedding':34}{'ms':>9}{'10% .. 90%':>20}{'images/s':>12}{'gain':>8}"
    lines = [f"{head}{'difference':>12}"]
    for s in found:
        lines.append(
            f"{f'{s.way}, {s.dtype}':34}{s.milliseconds:9.2f}{f'{s.low:.2f} .. {s.high:.2f}':>20}"
            f"{s.images_a_second:12,.1f}"
            f"{slowest / s.milliseconds - 1:8.1%}{s.difference:12.2%}"
        )
    return "\n".join(lines)
