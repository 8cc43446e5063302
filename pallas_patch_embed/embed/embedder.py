"""The two steps from an encoded picture to its embedding: `Decoder` and `Embedder`.

Both are callables on batches, for the pipeline of this package, for Ray Data's `map_batches`, and
for pipelines of your own.
"""

import dataclasses
import functools
import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_patch_embed.chips import cuda_is_installed
from pallas_patch_embed.embed.pictures import Budget, reason
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.siglip2.checkpoint import load_encoder_for_side, read_config
from pallas_patch_embed.siglip2.encoder import Encoder
from pallas_patch_embed.siglip2.naflex import batch_naflex

NOT_FINITE = "its embedding is not finite"

# With this option of XLA's compiler, cuBLAS adds bias, GELU and residual within its products. On an
# H200, 64 images and more take 11 to 17% less time (docs/experiments/encoder.md).
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint that may be read, sorted."""
    if not checkpoint.is_dir():
        return [checkpoint] if checkpoint.exists() else []
    kinds = ("*.json", "*.safetensors")
    return sorted(path for kind in kinds for path in checkpoint.glob(kind) if path.is_file())


def checkpoint_hash(checkpoint: Path) -> str:
    """SHA-256 of the names and contents of a checkpoint's files."""
    whole = hashlib.sha256()
    for path in checkpoint_files(checkpoint):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.name} {digest}\n".encode())
    return whole.hexdigest()


def find_checkpoint(name: str) -> Path:
    """The checkpoint on this machine: a path, or a model on the Hugging Face hub, downloaded once.

    Raises:
      FileNotFoundError: there is no such path, and huggingface_hub is not installed or has no model
        of this name.
    """
    path = Path(name)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/")):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"There is no {name!r}. To take a model from the Hugging Face hub: "
            "pip install huggingface_hub."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # Its errors have many bases.
        raise FileNotFoundError(
            f"There is no {name!r} on this machine, and the Hugging Face hub says: {error}"
        ) from error


class Decoder:
    """Decodes pictures, turns them upright and resizes them, as a checkpoint asks for it.

    A batch {"id": ..., "content": encoded pictures} becomes {"id", "image", "reason"}: `image` is
    uint8 [H, W, 3], `reason` why a picture could not be decoded, or "". Its image is black then.
    Other columns stay.

    Args:
      preprocessing: how pictures become images; `Decoder.of` finds it in a checkpoint.
    """

    def __init__(self, preprocessing: Preprocessing):
        self.preprocessing = preprocessing

    @classmethod
    def of(cls, checkpoint: str | os.PathLike[str], size: int | None = None) -> "Decoder":
        """The decoder for a checkpoint; no device is used.

        Args:
          checkpoint: as `Embedder` takes it.
          size: side of the images in pixels; None for what the checkpoint says.

        Raises:
          OSError, ValueError: there is no such checkpoint, it is damaged, or it asks for another
            preprocessing than SigLIP's.
        """
        path = find_checkpoint(os.fspath(checkpoint))
        config = read_config(path)
        if size is not None and not config.naflex:
            side = size // config.patch
            config = dataclasses.replace(config, image_size=(size, size), grid=(side, side))
        return cls(Preprocessing.of(path, config, size))

    @functools.cached_property
    def _budget(self) -> Budget:
        return Budget()

    def __getstate__(self) -> dict[str, Any]:
        return {"preprocessing": self.preprocessing}

    def decode(self, open_: Callable[[], BinaryIO]) -> np.ndarray:
        """One picture [H, W, 3]. Raises whatever Pillow raises about no readable picture."""
        return self.preprocessing.image(open_(), self._budget)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        images, reasons = [], []
        for content in batch["content"]:
            try:
                images.append(self.decode(functools.partial(io.BytesIO, content)))
                reasons.append("")
            except Exception as error:  # Pillow raises many kinds.
                images.append(self.preprocessing.black())
                reasons.append(reason(error))
        others = {name: column for name, column in batch.items() if name != "content"}
        return others | {"image": images, "reason": reasons}


class Embedder:
    """Maps a batch of decoded pictures to embeddings. It loads the encoder once.

    A batch {"id": ..., "image": ...} becomes {"id", "embedding": [n, D] float32}; other columns
    stay. If there is a column `reason`, rows with a reason are not embedded, and a picture whose
    embedding is not finite gets one.

    Args:
      checkpoint: path of a checkpoint, as `siglip2.load_encoder` takes it, or the name of a model
        on the Hugging Face hub.
      size: side of the images in pixels; None for what the checkpoint says.
      patch_dtype: as `siglip2.load_encoder` takes it.
      normalize: whether each embedding is divided by its Euclidean norm.
      batch: images that one device computes at a time. A smaller batch is padded to it, so that one
        program is compiled.

    Attributes:
      encoder: replicated on all devices of this process.
      preprocessing: how pictures become images.
      rows: images of a step: `batch` for each device.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        size: int | None = None,
        patch_dtype: str = "bfloat16",
        normalize: bool = False,
        batch: int = 64,
    ):
        checkpoint = find_checkpoint(os.fspath(checkpoint))
        encoder = load_encoder_for_side(checkpoint, size, patch_dtype)
        if encoder.head is None:
            raise ValueError(
                f"{str(checkpoint)!r} has no pooling head, so it gives no embedding of a picture."
            )
        self.preprocessing = Preprocessing.of(checkpoint, encoder.config, size)
        self._normalize = normalize
        devices = jax.local_devices()
        if devices[0].platform == "cpu":
            devices = devices[:1]  # XLA uses all cores for one.
        self.rows = batch * len(devices)
        mesh = Mesh(np.array(devices), ("batch",))
        self._split = NamedSharding(mesh, PartitionSpec("batch"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.encoder: Encoder = jax.device_put(encoder, everywhere)
        options = BY_CUBLAS if cuda_is_installed() else None
        self._pooled = jax.jit(_pooled, compiler_options=options)

    def expect(self, pictures: int) -> None:
        """Makes a step smaller if there are fewer pictures than it has images."""
        devices = len(self._split.mesh.devices)
        self.rows = min(self.rows, -(-pictures // devices) * devices)

    @property
    def width(self) -> int:
        """D."""
        return self.encoder.config.width

    def start(self, images: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Starts to embed n <= `rows` images; returns a function that waits for [n, D] float32."""
        n = len(images)
        padded = [*images, *[images[0]] * (self.rows - n)]
        if self.encoder.config.naflex:
            patches, shapes, mask = jax.device_put(
                batch_naflex(padded, self.encoder.config, self.preprocessing.max_num_patches),
                self._split,
            )
            pooled = self._pooled(self.encoder, patches, spatial_shapes=shapes, mask=mask)
        else:
            pooled = self._pooled(self.encoder, jax.device_put(np.stack(padded), self._split))

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


def _pooled(encoder: Encoder, images: jax.Array, **naflex: Any) -> jax.Array:
    pooled = encoder(images, **naflex).pooler_output
    assert pooled is not None  # Embedder refuses encoders without a head.
    return pooled


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Each row divided by its Euclidean norm, for which float32 may be too small."""
    length = np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    return (embeddings / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)
