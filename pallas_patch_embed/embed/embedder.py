"""The two steps from an encoded picture to its embedding, `Decoder` and `Embedder`.

Both are functions of batches, which the pipeline of this package, Ray Data's `map_batches` and your
own pipelines can call.
"""

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_patch_embed.base.chips import cuda_is_installed
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.encoders.checkpoint import load_encoder_for_side, read_config
from pallas_patch_embed.encoders.encoder import Encoder
from pallas_patch_embed.encoders.naflex import batch_naflex

NOT_FINITE = "its embedding is not finite"

# Default number of images that a GPU or TPU, and a CPU, computes at a time. Two cores of a CPU take
# 94, 65, 58, 58 and 66 ms for an image of B/16 224 in batches of 1, 2, 4, 8 and 16 (AVX2), and 158,
# 116, 110, 111 and 130 ms with AMX.
BATCH, BATCH_ON_CPU = 64, 4

# Compiler options with which XLA lets cuBLAS apply bias, GELU and residual in its matrix products.
# On an H200 64 or more images take 11 to 17% less time with them (docs/experiments/encoder.md).
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def find_checkpoint(name: str) -> Path:
    """Returns the path of a checkpoint, which is downloaded if it is a model on the hub.

    Args:
      name: a path, or the name of a model on the Hugging Face hub.

    Raises:
      FileNotFoundError: there is no such path, and the model cannot be downloaded or
        huggingface_hub is not installed.
    """
    path = Path(name)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/")):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"There is no file or folder {name!r}. To download a model from the Hugging Face hub, "
            "run: pip install huggingface_hub."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # huggingface_hub raises many kinds of errors.
        raise FileNotFoundError(
            f"There is no file or folder {name!r} on this machine, and the Hugging Face hub says: "
            f"{error}"
        ) from error


class Decoder:
    """Decodes pictures, rotates them upright, and resizes them as a checkpoint specifies.

    It maps a batch {"id": ..., "content": encoded pictures} to {"id", "image", "reason"}. `image`
    is uint8 [H, W, 3]. `reason` says why a picture could not be decoded, and its image is black; ""
    for the other pictures. Other columns are not changed.

    Args:
      preprocessing: the conversion of pictures to images; `Decoder.of` reads it from a checkpoint.
    """

    def __init__(self, preprocessing: Preprocessing):
        self.preprocessing = preprocessing

    @classmethod
    def of(cls, checkpoint: str | os.PathLike[str], size: int | None = None) -> "Decoder":
        """Makes the decoder for a checkpoint, without using a device.

        Args:
          checkpoint: as for `Embedder`.
          size: side of the images in pixels; None for the size in the checkpoint.

        Raises:
          OSError, ValueError: there is no such checkpoint, it is damaged, or its preprocessing is
            not that of SigLIP.
        """
        path = find_checkpoint(os.fspath(checkpoint))
        config = read_config(path)
        if size is not None and not config.naflex:
            side = size // config.patch
            config = dataclasses.replace(config, image_size=(size, size), grid=(side, side))
        return cls(Preprocessing.of(path, config, size))

    def decode(self, open_: Callable[[], BinaryIO]) -> np.ndarray:
        """Decodes one picture to [H, W, 3]; raises any exception that Pillow raises for it."""
        return self.preprocessing.image(lambda _: open_())

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        images, reasons = [], []
        for content in batch["content"]:
            try:
                images.append(self.decode(functools.partial(io.BytesIO, content)))
                reasons.append("")
            except Exception as error:  # Pillow raises many kinds of errors.
                images.append(self.preprocessing.black())
                reasons.append(reason(error))
        others = {name: column for name, column in batch.items() if name != "content"}
        return others | {"image": images, "reason": reasons}


class Embedder:
    """Maps a batch of decoded pictures to embeddings. It loads the encoder once.

    It maps a batch {"id": ..., "image": ...} to {"id", "embedding": [n, D] float32}. Other columns
    are not changed. If there is a column `reason`, rows with a reason are not embedded, and a
    picture whose embedding is not finite gets a reason.

    Args:
      checkpoint: path of a checkpoint, as for `siglip2.load_encoder`, or the name of a model on the
        Hugging Face hub.
      size: side of the images in pixels; None for the size in the checkpoint.
      patch_dtype: as for `siglip2.load_encoder`.
      normalize: whether each embedding is divided by its Euclidean norm.
      batch: number of images that one device computes at a time; None for the platform's default.
        Fewer images are padded to this number, so that one program computes all embeddings, and
        they do not depend on the number of pictures.

    Attributes:
      encoder: the encoder, replicated on all devices of this process.
      preprocessing: the conversion of pictures to images.
      batch: number of images that one device computes at a time.
      rows: number of images in a step, `batch` for each device.
      device_kind: kind of the devices.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        size: int | None = None,
        patch_dtype: str = "bfloat16",
        normalize: bool = False,
        batch: int | None = None,
    ):
        checkpoint = find_checkpoint(os.fspath(checkpoint))
        encoder = load_encoder_for_side(checkpoint, size, patch_dtype)
        if encoder.head is None:
            raise ValueError(
                f"{str(checkpoint)!r} has no pooling head, so it cannot embed pictures. Choose a "
                "checkpoint with a pooling head."
            )
        self.preprocessing = Preprocessing.of(checkpoint, encoder.config, size)
        self._normalize = normalize
        devices = jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        if on_cpu:
            devices = devices[:1]  # XLA uses all cores for a single CPU device.
        if batch is None:
            batch = BATCH_ON_CPU if on_cpu else BATCH
        self.batch, self.rows = batch, batch * len(devices)
        self.device_kind = devices[0].device_kind
        mesh = Mesh(np.array(devices), ("batch",))
        self._split = NamedSharding(mesh, PartitionSpec("batch"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.encoder: Encoder = jax.device_put(encoder, everywhere)
        options = BY_CUBLAS if cuda_is_installed() else None
        self._pooled = jax.jit(pooled_on(mesh), compiler_options=options)

    @property
    def width(self) -> int:
        """D, the width of an embedding."""
        return self.encoder.config.width

    def start(self, images: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Starts to embed n <= `rows` images.

        Returns:
          A function that waits for the embeddings and returns them, [n, D] float32.
        """
        n = len(images)
        padded = [*images, *[images[0]] * (self.rows - n)]
        if self.encoder.config.naflex:
            patches, shapes, mask = jax.device_put(
                batch_naflex(padded, self.encoder.config, self.preprocessing.max_num_patches),
                self._split,
            )
            pooled = self._pooled(self.encoder, patches, dict(spatial_shapes=shapes, mask=mask))
        else:
            pooled = self._pooled(self.encoder, jax.device_put(np.stack(padded), self._split), {})

        def finish() -> np.ndarray:
            result = np.asarray(pooled[:n], np.float32)
            return normalized(result) if self._normalize else result

        return finish

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        n = len(batch["image"])
        reasons = [str(reason) for reason in batch.get("reason", [""] * n)]
        chosen = [i for i, reason in enumerate(reasons) if not reason]
        embedding = np.zeros((n, self.width), np.float32)
        for begin in range(0, len(chosen), self.rows):
            part = chosen[begin : begin + self.rows]
            embedding[part] = self.start([np.asarray(batch["image"][i]) for i in part])()
        result = {name: column for name, column in batch.items() if name != "image"}
        if "reason" in batch:
            for i in np.flatnonzero(~np.isfinite(embedding).all(1)):
                reasons[i] = NOT_FINITE
            result["reason"] = reasons
        return result | {"embedding": embedding}


def pooled_on(mesh: Mesh) -> Callable[[Encoder, jax.Array, dict[str, Any]], jax.Array]:
    """Returns a function that embeds a part of a batch on each device of the mesh's axis "batch".

    Its arguments are an encoder, its images or patches, and its other array arguments. XLA would
    partition the encoder without the kernel for layer norms.
    """

    def pooled(encoder: Encoder, images: jax.Array, naflex: dict[str, Any]) -> jax.Array:
        found = encoder(images, **naflex).pooler_output
        assert found is not None  # Embedder refuses encoders without a head.
        return found

    split = PartitionSpec("batch")
    specs = (PartitionSpec(), split, split)
    return jax.shard_map(pooled, mesh=mesh, in_specs=specs, out_specs=split)


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Divides each row by its Euclidean norm, which is computed in float64 to avoid overflow."""
    length = np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    return (embeddings / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)
