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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

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
from pallas_patch_embed.encoders.naflex import PackedImages, aligned, pack_naflex
from pallas_patch_embed.encoders.program import BY_CUBLAS

NOT_FINITE = "its embedding is not finite"

# Default number of images that a GPU or TPU, and a CPU, computes at a time. With 128 instead of 64
# the host has less work for a picture (docs/experiments/embed.md). Two cores of a CPU take
# 94, 65, 58, 58 and 66 ms for an image of B/16 224 in batches of 1, 2, 4, 8 and 16 (AVX2), and 158,
# 116, 110, 111 and 130 ms with AMX.
BATCH, BATCH_ON_CPU = 128, 4

# A row of NaFlex images has room for a batch of the largest ones, and a place more for each 16 of
# them. Image processors enlarge pictures to nearly the largest number of patches
# (docs/experiments/encoder.md), so further places would be empty, which costs time.
PLACE_MORE = 16


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


class Row(NamedTuple):
    """The row of tokens in which a device computes the NaFlex images of a step.

    Attributes:
      tokens: its length.
      places: the largest number of images in it.
    """

    tokens: int
    places: int


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
    without padding: the patches of the pictures of a step are packed, as by `siglip2.pack_naflex`.

    Args:
      checkpoint: as the source of `load_encoder`: a path, or the name of a model on the Hugging
        Face hub.
      size: side of the images in pixels; None for the size in the checkpoint.
      patch_dtype, dtype, calibration, min_cosine: as for `load_encoder`.
      output: what an embedding is.
      normalize: whether each vector of D elements is divided by its Euclidean norm.
      batch: number of images that one device computes at a time; None for the platform's default.
        Fewer images are padded to this number, so that one program computes all embeddings, and
        they do not depend on the number of pictures. NaFlex images get a row with as many tokens
        as this number of the largest ones, which has room for more that are smaller.
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
      rows: number of images in a step, `batch` for each device; of NaFlex images the number that
        fits whatever their sizes are.
      row: the row of tokens of a device for NaFlex images; None for images of one size.
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
        patch_dtype: str | None = None,
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
        self.row: Row | None = None
        if config.naflex:
            largest = aligned(self.preprocessing.max_num_patches)
            self.row = Row(self.batch * largest, self.batch + self.batch // PLACE_MORE)
        self.device_kind = mesh.devices.flat[0].device_kind
        self._split = NamedSharding(mesh, PartitionSpec("batch"))
        # Computes the images that were copied last.
        self._copying: Callable[[], object] = lambda: None
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
        # The program for images of each shape, or what compiles it.
        self._programs: dict[tuple[int, ...], Future[Callable[..., jax.Array]]] = {}

    def fitting(self, images: Sequence[np.ndarray]) -> int:
        """Returns how many of the images, from the first one on, one step embeds."""
        if self.row is None:
            return min(len(images), self.rows)
        return sum(map(len, self._divided(images, self.row)))

    def start(
        self, images: Sequence[np.ndarray], whole: Sequence[bool] = ()
    ) -> Callable[[], np.ndarray]:
        """Starts to embed n images, at most as many as `fitting` says.

        Args:
          images: images or whole pictures, arrays [H, W, 3] uint8.
          whole: for each of them, whether it is yet to be resized by `resizer`; () if none is.

        Returns:
          A function that waits for the embeddings and returns them, [n, *shape] float32, or an
          array of n arrays if their shapes differ.

        Raises:
          ValueError: there are more images, or an image has more patches than the preprocessing
            allows.
        """
        if len(images) > (most := self.fitting(images)):
            raise ValueError(f"Embedder.start: {len(images)} images, expected at most {most}.")
        if self.row is not None:
            return self._start_packed(images, self.row)
        n = len(images)
        padded = [*images, *[images[0]] * (self.rows - n)]
        if any(whole):
            assert self.resizer is not None
            program = self._program((len(padded), *self.resizer.size, 3))
            resized = self.resizer.copy(padded, [*whole, *[whole[0]] * (self.rows - n)])
        else:
            stacked = jax.device_put(np.stack(padded), self._split)
            program = self._program(stacked.shape)

            def resized() -> jax.Array:
                return stacked

        @functools.cache
        def compute() -> jax.Array:
            ready = resized()  # Its programs are compiled while another thread compiles this one.
            return program.result()(self.encoder, ready)

        # What uses arrays that are still being copied is started later, because its start waits.
        before, self._copying = self._copying, compute
        before()

        def finish() -> np.ndarray:
            result = np.asarray(compute()[:n], np.float32)
            return self._normalized(result.reshape(n, *self._shape_for(images[0])))

        return finish

    def _program(self, shape: tuple[int, ...]) -> Future[Callable[..., jax.Array]]:
        """Returns the program for images of a shape, which is compiled in another thread.

        Meanwhile this thread compiles the programs that resize, and decoders decode.
        """
        if shape not in self._programs:
            images = jax.ShapeDtypeStruct(shape, np.uint8, sharding=self._split)
            lowered = self._compute.lower(self.encoder, images)
            thread = ThreadPoolExecutor(1)
            self._programs[shape] = thread.submit(lowered.compile)
            thread.shutdown(wait=False)
        return self._programs[shape]

    def _start_packed(self, images: Sequence[np.ndarray], row: Row) -> Callable[[], np.ndarray]:
        """Starts to embed NaFlex images that are packed into a row for each device."""
        config, most = self.encoder.config, self.preprocessing.max_num_patches
        parts = self._divided(images, row)
        packs = [
            pack_naflex(part, config, most, tokens=row.tokens, rows=1, number=row.places)
            for part in parts
        ]
        computed = self._compute(self.encoder, jax.tree.map(self._on_devices, *packs))

        def finish() -> np.ndarray:
            found: list[np.ndarray] = []
            of_devices = np.split(np.asarray(computed, np.float32), len(packs))
            for part, pack, result in zip(parts, packs, of_devices):
                embeddings = pack.unpack(result) if None in self.shape else result
                found += list(embeddings[: len(part)])
            return self._normalized(column(found))

        return finish

    def _divided(self, images: Sequence[np.ndarray], row: Row) -> list[list[np.ndarray]]:
        """Divides NaFlex images among the devices in their order, as long as there is room."""
        parts: list[list[np.ndarray]] = [[] for _ in range(self._split.mesh.size)]
        device, used = 0, 0
        for image in images:
            height, width = (side // self.encoder.config.patch for side in image.shape[:2])
            # `pack_naflex` refuses an image that has more patches.
            tokens = aligned(min(height * width, self.preprocessing.max_num_patches))
            if used + tokens > row.tokens or len(parts[device]) == row.places:
                device, used = device + 1, 0
                if device == len(parts):
                    break
            parts[device].append(image)
            used += tokens
        return parts

    def _on_devices(self, *parts: np.ndarray) -> jax.Array:
        """Copies each part to its device, and returns them as one array."""
        devices = self._split.mesh.devices.flat
        copied = [jax.device_put(part, device) for part, device in zip(parts, devices)]
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._split, copied)

    def _normalized(self, embeddings: np.ndarray) -> np.ndarray:
        return column(list(map(normalized, embeddings))) if self._normalize else embeddings

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
        rest = chosen
        while rest:
            number = self.fitting([images[i] for i in rest])
            part, rest = rest[:number], rest[number:]
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
) -> Callable[[Encoder, jax.Array | PackedImages], jax.Array]:
    """Returns a function that embeds a part of a batch on each device of the mesh's axis "batch".

    Its arguments are an encoder, and images or for a NaFlex encoder a row of packed images for each
    device. It returns [n, D] for n images or places of a row; or, of patches, [n, S, D] for images
    and [devices, T, D] for rows. XLA would partition the encoder without the kernel for layer
    norms.

    Args:
      mesh: the mesh.
      output: as for `Embedder`; the encoder of a "layer:N" ends with block N, or has a block that
        is not used if N is 0.
    """

    def embedding(encoder: Encoder, images: jax.Array | PackedImages) -> jax.Array:
        kept = (0,) if output == "layer:0" else ()
        segments = None
        if isinstance(images, PackedImages):
            segments = images.segments
            found = encoder.packed(images, layers=kept)
        else:
            found = encoder(images, layers=kept)
        (tokens,) = found.hidden_states or (found.last_hidden_state,)
        match output:
            case "pooled":
                pooled = found.pooler_output if found.image_embeds is None else found.image_embeds
                assert pooled is not None  # Embedder refuses encoders without pooling.
                return pooled
            case "mean":
                if segments is None:
                    return mean_of_patches(tokens, encoder.config)
                of_images = segments.gather(tokens)
                return mean_of_patches(of_images, encoder.config, lengths=segments.lengths)
            case "class":
                return tokens[:, 0]
        return tokens[:, encoder.config.prefix :]

    split = PartitionSpec("batch")
    return jax.shard_map(embedding, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split)


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
