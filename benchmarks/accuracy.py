"""Measures how accurate each dtype's patch embeddings and encoder outputs are, on photographs.

Everything after the patch embedding is float32, so only the patch embedding differs.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import pallas_patch_embed as ppe
from benchmarks import encoder as encoders
from pallas_patch_embed.base.dtypes import DTYPES
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.demo import compare, photographs

RANDOM = "random weights"


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The errors of one dtype, compared with float32.

    Attributes:
      weights: a checkpoint's name, or RANDOM.
      dtype: dtype of patches and weight.
      patch_error: relative Frobenius error of the embeddings of patches in bfloat16, as in the
        demo.
      patch_cosine: cosine between embedding and exact embedding, averaged over all patches.
      pooled_error, pooled_cosine: error and cosine of the pooled output.
      images: number of photographs.
    """

    weights: str
    dtype: str
    patch_error: float
    patch_cosine: float
    pooled_error: float
    pooled_cosine: float
    images: int


def accuracies(checkpoint: Path | None = None, name: str = "B/16 224") -> list[Accuracy]:
    """Measures the accuracy of each dtype, compared with float32.

    Args:
      checkpoint: path of a fixed-resolution checkpoint for `load_encoder`; random weights if None.
      name: name of the encoder with random weights.

    Raises:
      ValueError: the checkpoint is NaFlex.
    """

    def encoder_of(dtype):
        if checkpoint:
            return ppe.siglip2.load_encoder(checkpoint, patch_dtype=dtype, dtype="float32")
        return encoders.draw(name, dtype, "float32")[0]

    exact = encoder_of("float32")
    if exact.config.image_size is None:
        raise ValueError(f"accuracy: {checkpoint} is NaFlex, expected a fixed resolution.")
    side = exact.config.image_size[0]
    shape = dataclasses.replace(named_shape(name), image=side, patch=exact.config.patch)
    _, images = photographs(shape)

    def both(encoder, out_dtype=jnp.bfloat16):
        patches = ppe.embed_images(images, encoder.patch_embed, out_dtype=out_dtype)
        return np.asarray(patches, np.float32), np.asarray(encoder(images).pooler_output)

    wanted = both(exact, jnp.float32)
    found = []
    for dtype in (dtype for dtype in DTYPES if dtype != "float32"):
        errors = [compare(*pair) for pair in zip(both(encoder_of(dtype)), wanted)]
        (patch_error, patch_cosine), (pooled_error, pooled_cosine) = errors
        weights = checkpoint.name if checkpoint else f"{name}, {RANDOM}"
        found.append(
            Accuracy(
                weights, dtype, patch_error, patch_cosine, pooled_error, pooled_cosine, len(images)
            )
        )
    return found


def table(found: list[Accuracy]) -> str:
    """Formats an aligned table."""
    heads = ("patches: error", "cosine", "pooled: error", "cosine")
    lines = [f"{'dtype':16}" + "".join(f"{head:>16}" for head in heads)]
    for a in found:
        lines.append(
            f"{a.dtype:16}{a.patch_error:16.3%}{a.patch_cosine:16.6f}"
            f"{a.pooled_error:16.3%}{a.pooled_cosine:16.6f}"
        )
    return "\n".join(lines)
