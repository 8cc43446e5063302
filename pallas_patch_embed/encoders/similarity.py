"""How well texts describe images: a checkpoint's scale and bias of cosines."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders.arrays import Arrays, Tower, is_npz, open_npz, open_safetensors
from pallas_patch_embed.encoders.big_vision import OPTIMISER
from pallas_patch_embed.encoders.hub import find_checkpoint

# The ends of the names of scale and bias: those of Hugging Face and open_clip, and big_vision's.
SCALE = re.compile(r"(.*\.)?logit_scale|(.*/)?t")
BIAS = re.compile(r"(.*\.)?logit_bias|(.*/)?b")


@dataclasses.dataclass(frozen=True, eq=False)
class Similarity:
    """The similarity of images and texts, a pytree that `load_similarity` makes.

        logits[i, j] = scale * cosine(image i, text j) + bias

    Attributes:
      scale: float32, the exponential of the checkpoint's logit_scale.
      bias: float32, the checkpoint's logit_bias; None for CLIP, which has none.
    """

    scale: jax.Array
    bias: jax.Array | None = None

    def logits(self, images: AnyArray, texts: AnyArray) -> jax.Array:
        """Computes the logits of all pairs, as transformers' logits_per_image.

        Args:
          images: [B, P], the vectors of images: the pooler_output of a SigLIP, image_embeds of a
            CLIP. Their lengths do not matter.
          texts: [T, P], the text_embeds of texts.

        Returns:
          [B, T] float32.

        Raises:
          TypeError, ValueError: an argument has another type or shape.
        """
        images, texts = (_normalised(x, name) for x, name in ((images, "images"), (texts, "texts")))
        if images.shape[1] != texts.shape[1]:
            raise ValueError(
                f"similarity: vectors of images have {images.shape[1]} elements, those of texts "
                f"{texts.shape[1]}. Pass the results of one checkpoint: of a SigLIP pooler_output "
                "and text_embeds, of a CLIP image_embeds and text_embeds."
            )
        cosines = jnp.matmul(images, texts.T, precision="highest")
        logits = jnp.asarray(self.scale, jnp.float32) * cosines
        return logits if self.bias is None else logits + jnp.asarray(self.bias, jnp.float32)

    def probabilities(self, images: AnyArray, texts: AnyArray) -> jax.Array:
        """Computes the probabilities of all pairs: sigmoid(logits), or softmax without a bias.

        A SigLIP gives each text a probability of its own, and several or none may fit an image. A
        CLIP compares the texts, so the probabilities of an image sum to 1.

        Args:
          images, texts: as for `logits`.

        Returns:
          [B, T] float32.

        Raises:
          TypeError, ValueError: an argument has another type or shape.
        """
        logits = self.logits(images, texts)
        return jax.nn.softmax(logits, 1) if self.bias is None else jax.nn.sigmoid(logits)


jax.tree_util.register_dataclass(Similarity, data_fields=["scale", "bias"], meta_fields=[])
jax.export.register_pytree_node_serialization(
    Similarity,
    serialized_name="pallas_patch_embed.Similarity",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def _normalised(vectors: Any, name: str) -> jax.Array:
    """Returns vectors [B, P] of length 1."""
    vectors = as_array(vectors, f"similarity: {name}")
    if vectors.ndim != 2 or not jnp.issubdtype(vectors.dtype, jnp.floating):
        raise ValueError(
            f"similarity: {name} are {vectors.dtype}{list(vectors.shape)}, expected floating-point "
            "vectors [number, P]."
        )
    vectors = jnp.asarray(vectors, jnp.float32)
    return vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)


def load_similarity(source: str | os.PathLike[str]) -> Similarity:
    """Loads the scale and the bias of a checkpoint's similarities.

    Args:
      source: the folder, file or name on the Hugging Face hub, as for `load_encoder`, of a SigLIP,
        SigLIP2 or CLIP with both towers.

    Returns:
      Similarity. It has a bias, and its probabilities are sigmoids, if the checkpoint has one.

    Raises:
      FileNotFoundError, OSError: as for `load_encoder`.
      ValueError: a file is damaged, or is not a checkpoint of a model that compares images and
        texts.
    """
    path = find_checkpoint(os.fspath(source))
    try:
        opened = open_npz if is_npz(path) else open_safetensors
        with opened(path) as arrays:
            scale = _scalar(arrays, SCALE)
            if scale is None:
                raise ValueError(
                    "it has no logit_scale (in big_vision's files t), so it does not compare "
                    "images and texts. Pass a checkpoint that has both towers."
                )
            bias = _scalar(arrays, BIAS)
    except ValueError as error:
        raise ValueError(f"load_similarity: {str(path)!r}: {error}") from error
    return Similarity(jnp.exp(scale), None if bias is None else jnp.asarray(bias))


def _scalar(arrays: Arrays, name: re.Pattern[str]) -> np.ndarray | None:
    """Reads the number with such a name; None if there is none."""
    found = _matching(arrays.names, name)
    if not found:
        return None
    tower = Tower(arrays, "")
    shape = tower.shape(found[0], 0, 1)
    if len(found) > 1 or shape not in ((), (1,)):
        raise ValueError(
            f"{', '.join(map(quoted, found[:3]))} of shape {list(shape)} should be one number. "
            "Pass the checkpoint of one model."
        )
    return tower.read(found[0], *shape).reshape(())


def _matching(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    return sorted(x for x in names if pattern.fullmatch(x) and not OPTIMISER.match(x))
