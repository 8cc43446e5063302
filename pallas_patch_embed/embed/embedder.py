"""The two steps from an encoded picture to its embedding, `Decoder` and `Embedder`.

Both are functions of batches, which the pipeline of this package, Ray Data's `map_batches` and your
own pipelines can call.
"""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_patch_embed.base.chips import cuda_is_installed
from pallas_patch_embed.embed.options import check_output, is_of_patches, layer_of
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.resizing import Resizer, refusal
from pallas_patch_embed.encoders.calibration import Calibration
from pallas_patch_embed.encoders.checkpoint import load_encoder_for_side, read_config
from pallas_patch_embed.encoders.config import Config, check_size
from pallas_patch_embed.encoders.encoder import Encoder, mean_of_patches
from pallas_patch_embed.encoders.hub import find_checkpoint
from pallas_patch_embed.encoders.naflex import batch_naflex

NOT_FINITE = "its embedding is not finite"

# Default number of images that a GPU or TPU, and a CPU, computes at a time. Two cores of a CPU take
# 94, 65, 58, 58 and 66 ms for an image of B/16 224 in batches of 1, 2, 4, 8 and 16 (AVX2), and 158,
# 116, 110, 111 and 130 ms with AMX.
BATCH, BATCH_ON_CPU = 64, 4

# Compiler options with which XLA lets cuBLAS apply bias, GELU and residual in its matrix products.
# On an H200 64 or more images take 11 to 17% less time with them (docs/experiments/encoder.md).
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


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
            not supported (docs/embed.md has a table).
        """
        path = find_checkpoint(os.fspath(checkpoint))
        config = read_config(path)
        if size is not None:
            check_size("size", size, smallest=config.patch)
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

    It maps a batch {"id": ..., "image": ...} to {"id", "embedding"} with float32. Other columns are
    not changed. If there is a column `reason`, rows with a reason are not embedded, and a picture
    whose embedding is not finite gets a reason.

    `output` says what an embedding is, from the encoder's `EncoderOutput`:

      "pooled": image_embeds if the checkpoint has a projection, as a CLIP has; otherwise
        pooler_output; [D].
      "mean": the mean of the patches' tokens in last_hidden_state; [D].
      "class": the class token, the first one of last_hidden_state; [D].
      "patches": the patches' tokens in last_hidden_state; [h, w, D] for h x w patches.
      "layer:N": the patches' tokens in the hidden state N, as the argument `layers` of an encoder
        numbers them: 0 is what the first block gets, and -2 what the last one gets; [h, w, D].
        Only the blocks in front of it are loaded, but at least one.

    Class and register tokens are not patches' tokens. last_hidden_state includes the last norm,
    unless the encoder applies it to the pooled vector alone, as a CLIP does
    (`config.norm_after_pooling`). A NaFlex picture has as many patches as its own size gives,
    without padding.

    Args:
      checkpoint: as the source of `load_encoder`: a path, or the name of a model on the Hugging
        Face hub.
      size: side of the images in pixels; None for the size in the checkpoint.
      patch_dtype, dtype, calibration, min_cosine: as for `load_encoder`.
      output: what an embedding is.
      normalize: whether each vector of D elements is divided by its Euclidean norm.
      batch: number of images that one device computes at a time; None for the platform's default.
        Fewer images are padded to this number, so that one program computes all embeddings, and
        they do not depend on the number of pictures.
      resize: whether `start` takes whole pictures and resizes them on the "device", with the same
        pixels, or only images that were resized on the "host". "auto" for the device on GPUs, where
        it can.

    Attributes:
      encoder: the encoder, replicated on all devices of this process.
      preprocessing: the conversion of pictures to images.
      shape: shape of an embedding, [D] or [h, w, D]. For the patches of NaFlex pictures h and w
        are None.
      width: D.
      most_bytes: largest size of an embedding in bytes.
      batch: number of images that one device computes at a time.
      rows: number of images in a step, `batch` for each device.
      device_kind: kind of the devices.
      resizer: what resizes whole pictures on the devices; None if the host does.
      not_resized: why the GPUs do not resize pictures, if `resize` is "auto"; "" if they do.

    Raises:
      OSError: a file cannot be read.
      ValueError: the checkpoint cannot be loaded, its pictures need another preprocessing, its
        encoder does not have this output, or the device cannot resize its pictures.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        size: int | None = None,
        patch_dtype: str = "bfloat16",
        dtype: str = "bfloat16",
        calibration: Calibration | str | os.PathLike[str] | None = None,
        min_cosine: float | None = None,
        output: str = "pooled",
        normalize: bool = False,
        batch: int | None = None,
        resize: Literal["auto", "device", "host"] = "host",
    ):
        layer = layer_of(check_output(output))
        if batch is not None:
            check_size("batch", batch)
        checkpoint = find_checkpoint(os.fspath(checkpoint))
        blocks = None
        if layer is not None:
            layer = _hidden_state(layer, checkpoint)
            blocks = max(layer, 1)  # There is no encoder without blocks.
        encoder = load_encoder_for_side(
            checkpoint,
            size,
            patch_dtype,
            blocks,
            dtype=dtype,
            calibration=calibration,
            min_cosine=min_cosine,
        )
        config = encoder.config
        _check_tokens(output, config, checkpoint)
        self.preprocessing = Preprocessing.of(checkpoint, config, size)
        self._normalize = normalize
        self.width = config.width
        if output == "pooled" and encoder.projection is not None:
            self.width = encoder.projection["kernel"].shape[1]
        self.shape: tuple[int | None, ...] = (self.width,)
        patches = 1
        if is_of_patches(output):
            self.shape = (*((None, None) if config.naflex else config.grid), self.width)
            patches = (
                self.preprocessing.max_num_patches if config.naflex else math.prod(config.grid)
            )
        self.most_bytes = patches * self.width * np.dtype(np.float32).itemsize
        mesh, self.batch = batch_on_devices(batch)
        self.rows = self.batch * mesh.size
        self.device_kind = mesh.devices.flat[0].device_kind
        self._split = NamedSharding(mesh, PartitionSpec("batch"))
        self.resizer, self.not_resized = None, ""
        if resize == "device" or (resize == "auto" and mesh.devices.flat[0].platform == "gpu"):
            self.not_resized = refusal(self.preprocessing, self.batch)
            if not self.not_resized:
                self.resizer = Resizer(self.preprocessing, self._split)
            elif resize == "device":
                raise ValueError(f"--resize is device, but {self.not_resized}. Use --resize host.")
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.encoder: Encoder = jax.device_put(encoder, everywhere)
        options = BY_CUBLAS if cuda_is_installed() else None
        chosen = output if layer is None else f"layer:{layer}"
        self._compute = jax.jit(embedding_on(mesh, chosen), compiler_options=options)

    def start(
        self, images: Sequence[np.ndarray], whole: Sequence[bool] = ()
    ) -> Callable[[], np.ndarray]:
        """Starts to embed n <= `rows` images.

        Args:
          images: images or whole pictures, arrays [H, W, 3] uint8.
          whole: for each of them, whether it is yet to be resized by `resizer`; () if none is.

        Returns:
          A function that waits for the embeddings and returns them, [n, *shape] float32, or an
          array of n arrays if their shapes differ.
        """
        n, shapes = len(images), list(map(self._shape_for, images))
        padded = [*images, *[images[0]] * (self.rows - n)]
        if self.encoder.config.naflex:
            # The mask is the encoder's default.
            patches, grids, _ = batch_naflex(
                padded, self.encoder.config, self.preprocessing.max_num_patches
            )
            patches, grids = jax.device_put((patches, grids), self._split)
            computed = self._compute(self.encoder, patches, dict(spatial_shapes=grids))
        else:
            if any(whole):
                assert self.resizer is not None
                stacked = self.resizer(padded, [*whole, *[whole[0]] * (self.rows - n)])
            else:
                stacked = jax.device_put(np.stack(padded), self._split)
            computed = self._compute(self.encoder, stacked, {})

        def finish() -> np.ndarray:
            result = np.asarray(computed[:n], np.float32)
            if None in self.shape:
                parts = (row[: math.prod(shape[:2])] for row, shape in zip(result, shapes))
                result = column([part.reshape(shape) for part, shape in zip(parts, shapes)])
            else:
                result = result.reshape(n, *shapes[0])
            return column(list(map(normalized, result))) if self._normalize else result

        return finish

    def _shape_for(self, image: np.ndarray) -> tuple[int, ...]:
        """Returns the shape of the embedding of an image."""
        sides = (side // self.encoder.config.patch for side in image.shape)
        return tuple(next(sides) if size is None else size for size in self.shape)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        n = len(batch["image"])
        reasons = [str(reason) for reason in batch.get("reason", [""] * n)]
        chosen = [i for i, reason in enumerate(reasons) if not reason]
        images = [np.asarray(image) for image in batch["image"]]
        embeddings: list[np.ndarray] = [np.empty(0)] * n
        for begin in range(0, len(chosen), self.rows):
            part = chosen[begin : begin + self.rows]
            for i, embedding in zip(part, self.start([images[i] for i in part])()):
                embeddings[i], reasons[i] = embedding, why_not_written(embedding)
        for i in set(range(n)) - set(chosen):
            embeddings[i] = np.zeros(self._shape_for(images[i]), np.float32)
        result = {name: column for name, column in batch.items() if name != "image"}
        if "reason" in batch:
            result["reason"] = reasons
        none = np.zeros((0, *(side or 0 for side in self.shape)), np.float32)
        return result | {"embedding": column(embeddings) if n else none}


def batch_on_devices(batch: int | None) -> tuple[Mesh, int]:
    """Returns a mesh of the devices among which batches are split, and the batch of each device.

    Args:
      batch: the batch of each device; None for the platform's default.
    """
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    if on_cpu:
        devices = devices[:1]  # XLA uses all cores for a single CPU device.
    if batch is None:
        batch = BATCH_ON_CPU if on_cpu else BATCH
    return Mesh(np.array(devices), ("batch",)), batch


def _hidden_state(layer: int, checkpoint: Path) -> int:
    """Returns the number in [0, depth] of a hidden state; refuses one that the tower lacks."""
    depth = read_config(checkpoint).depth
    if not -depth - 1 <= layer <= depth:
        raise ValueError(
            f"--output is layer:{layer}, but the tower of {str(checkpoint)!r} has {depth} blocks. "
            f"Expected layer:0 to layer:{depth}, or layer:-1 to layer:-{depth + 1}."
        )
    return layer % (depth + 1)


def _check_tokens(output: str, config: Config, checkpoint: Path) -> None:
    """Refuses an output that the encoder does not have."""
    if output == "pooled" and config.pooling == "none":
        class_too = " or class" if config.class_tokens else ""
        raise ValueError(
            f"--output is pooled, but {str(checkpoint)!r} has no pooling. Choose --output "
            f"mean{class_too}, or a checkpoint with pooling."
        )
    if output == "class" and not config.class_tokens:
        raise ValueError(
            f"--output is class, but {str(checkpoint)!r} has no class token. Choose --output mean."
        )


def embedding_on(
    mesh: Mesh, output: str = "pooled"
) -> Callable[[Encoder, jax.Array, dict[str, Any]], jax.Array]:
    """Returns a function that embeds a part of a batch on each device of the mesh's axis "batch".

    Its arguments are an encoder, its images or patches, and its other array arguments. It returns
    [n, D] or, of patches, [n, S, D]. XLA would partition the encoder without the kernel for layer
    norms.

    Args:
      mesh: the mesh.
      output: as for `Embedder`; the encoder of a "layer:N" ends with block N, or has a block that
        is not used if N is 0.
    """

    def embedding(encoder: Encoder, images: jax.Array, naflex: dict[str, Any]) -> jax.Array:
        found = encoder(images, **naflex, layers=(0,) if output == "layer:0" else ())
        (tokens,) = found.hidden_states or (found.last_hidden_state,)
        match output:
            case "pooled":
                pooled = found.pooler_output if found.image_embeds is None else found.image_embeds
                assert pooled is not None  # Embedder refuses encoders without pooling.
                return pooled
            case "mean":
                lengths = naflex["spatial_shapes"].prod(1) if naflex else None
                return mean_of_patches(tokens, encoder.config, lengths=lengths)
            case "class":
                return tokens[:, 0]
        return tokens[:, encoder.config.prefix :]

    split = PartitionSpec("batch")
    specs = (PartitionSpec(), split, split)
    return jax.shard_map(embedding, mesh=mesh, in_specs=specs, out_specs=split)


def column(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays as one array, or as an array of arrays if their shapes differ."""
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    several = np.empty(len(arrays), object)
    several[:] = arrays
    return several


def why_not_written(embedding: np.ndarray, dtype: str = "float32") -> str:
    """Returns the reason why an embedding cannot be written in this dtype; "" if it can."""
    if not np.isfinite(embedding).all():
        return NOT_FINITE
    with np.errstate(over="ignore"):
        fits = np.isfinite(embedding.astype(dtype, copy=False)).all()
    return "" if fits else f"its embedding exceeds the range of {dtype}"


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Divides each vector [..., D] by its Euclidean norm, in float64 to avoid overflow."""
    length = np.linalg.norm(embeddings.astype(np.float64), axis=-1, keepdims=True)
    return (embeddings / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)
