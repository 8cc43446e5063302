"""Embeds picture files with the encoder of a checkpoint, into one .npz file."""

import collections
import concurrent.futures
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_patch_embed.files import written_whole
from pallas_patch_embed.siglip2.arrays import read_json
from pallas_patch_embed.siglip2.checkpoint import load_encoder
from pallas_patch_embed.siglip2.config import Config, check_size
from pallas_patch_embed.siglip2.encoder import Encoder
from pallas_patch_embed.siglip2.naflex import batch_naflex, largest_grid

# Siglip2ImageProcessor's default.
MAX_NUM_PATCHES = 256

# What a preprocessor_config.json says if it resizes pictures and maps pixels to [-1, 1].
PIXELS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
}

# The pictures of one batch, which may still be being read.
type Batch = list[tuple[Path, concurrent.futures.Future[np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How pictures become images for an encoder.

    Attributes:
      resample: one of PIL.Image.Resampling.
      size: (height, width) in pixels; None for NaFlex: then the aspect ratio is kept.
      patch: side of a patch in pixels.
      max_num_patches: of a NaFlex image.
    """

    resample: int
    size: tuple[int, int] | None
    patch: int
    max_num_patches: int

    @classmethod
    def of(cls, checkpoint: Path, config: Config, size: int | None) -> "Preprocessing":
        """As the checkpoint's preprocessor_config.json says, else bilinear to the model's size.

        Args:
          checkpoint: the folder, or a file beside the preprocessor_config.json.
          config: of the encoder.
          size: pixels, if another one was asked for; config.image_size is it then.

        Raises:
          ValueError: preprocessor_config.json is damaged, or asks for something else than
            resizing to the model's size and pixels in [-1, 1].
        """
        from PIL import Image

        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        file = folder / "preprocessor_config.json"
        given = read_json(file) if file.is_file() else {}
        if not isinstance(given, dict):
            raise ValueError(f"{file} is no object of fields.")
        given = {name: value for name, value in given.items() if value is not None}
        for name, wanted in PIXELS.items():
            if not _equal(given.get(name, wanted), wanted):
                raise ValueError(
                    f"{file}: {name} is {given[name]!r}, expected {wanted!r}: SigLIP encoders take "
                    "pixels of resized pictures in [-1, 1]."
                )
        # The class defaults of transformers' image processors.
        bicubic = str(given.get("image_processor_type")).startswith("SiglipImageProcessor")
        default = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        try:
            resample = Image.Resampling(given.get("resample", default))
        except ValueError:
            raise ValueError(
                f"{file}: resample is {given['resample']!r}, expected one of PIL.Image.Resampling."
            ) from None
        L = given.get("max_num_patches", MAX_NUM_PATCHES)
        check_size(f"{file}: max_num_patches", L)
        if config.naflex and size is not None:
            check_size(f"--size {size} in patches of {config.patch} pixels", size // config.patch)
            L = (size // config.patch) ** 2
        image_size = model_size = config.image_size
        if model_size is not None and size is None and "size" in given:
            image_size = _size(given["size"], file)
            if tuple(side // config.patch for side in image_size) != config.grid:
                raise ValueError(
                    f"{file} resizes pictures to {image_size[0]} x {image_size[1]}, but the model "
                    f"takes {model_size[0]} x {model_size[1]}. Choose with --size."
                )
        return cls(int(resample), image_size, config.patch, L)

    def image(self, path: Path) -> np.ndarray:
        """The picture in this file, upright and resized, as [H, W, 3] uint8.

        Raises:
          Exception: whatever Pillow raises about a file that is no readable picture.
        """
        from PIL import Image, ImageOps

        with Image.open(path) as file:
            picture: Image.Image = ImageOps.exif_transpose(file)
            if picture.mode.startswith(("I", "F")):
                # Grey levels of 16 bits, which Pillow's conversion to RGB would clip.
                grey = np.asarray(picture)
                if picture.mode == "F" or not 0 <= grey.min() <= grey.max() < 2**16:
                    raise ValueError("its pixels have another range than 8 or 16 bits")
                picture = Image.fromarray((grey / 257).round().astype(np.uint8))
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
            picture = picture.convert("RGB")
            size = self.size
            if size is None:
                grid = largest_grid(picture.height, picture.width, self.patch, self.max_num_patches)
                size = (grid[0] * self.patch, grid[1] * self.patch)
            return np.asarray(picture.resize(size[::-1], self.resample))


def _equal(value: Any, wanted: float) -> bool:
    try:
        return np.size(value) > 0 and bool(np.allclose(value, wanted, rtol=0, atol=1e-6))
    except (TypeError, ValueError):
        return False


def _size(size: Any, file: Path) -> tuple[int, int]:
    """(height, width) from the size of a preprocessor_config.json."""
    sides: tuple[Any, Any] = (size, size)
    if isinstance(size, dict):
        sides = (size.get("height"), size.get("width"))
    for side in sides:
        check_size(f"{file}: size is {size!r}; its height or width in pixels", side)
    return sides


def find_pictures(arguments: Sequence[Path]) -> list[Path]:
    """The files, and of folders all files below with the extension of a picture, sorted.

    Hidden files and folders are left out, and what Pillow knows by name alone or would hand to
    another program.
    """
    from PIL import Image

    Image.init()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    extensions = {e for e, name in Image.registered_extensions().items() if name in readable}
    found = []
    for argument in arguments:
        if not argument.is_dir():
            found.append(argument)
            continue
        for file in sorted(argument.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(argument).parts)
            if not hidden and file.suffix.lower() in extensions and file.is_file():
                found.append(file)
    return found


def _read_ahead(
    read: Callable[[Path], np.ndarray], paths: list[Path], batch: int
) -> Iterator[Batch]:
    """Batches of paths with their images, of which the next one is read in the meantime."""
    pool = concurrent.futures.ThreadPoolExecutor()
    try:
        ahead: collections.deque[Batch] = collections.deque()
        for part in itertools.batched(paths, batch):
            ahead.append([(path, pool.submit(read, path)) for path in part])
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead
    finally:
        pool.shutdown(cancel_futures=True)


def _embed(encoder: Encoder, images: list[np.ndarray], batch: int, L: int) -> np.ndarray:
    """The pooled output [n, D] float32 of n <= batch images, always computed as a whole batch."""
    n = len(images)
    images = images + [images[0]] * (batch - n)
    if encoder.config.naflex:
        patches, spatial_shapes, mask = batch_naflex(images, encoder.config, L)
        output = encoder(patches, spatial_shapes=spatial_shapes, mask=mask)
    else:
        output = encoder(np.stack(images))
    assert output.pooler_output is not None  # `run` refuses encoders without a pooling head.
    return np.asarray(output.pooler_output[:n], np.float32)


def run(
    checkpoint: Path,
    arguments: Sequence[Path],
    out: Path,
    *,
    size: int | None,
    batch: int,
    patch_dtype: str,
    normalize: bool,
    interrupted: Callable[[], bool] = lambda: False,
) -> int:
    """Embeds the pictures and writes `embeddings` [n, D] float32 and `paths` [n] to `out`.

    Args:
      checkpoint: as `load_encoder` takes it.
      arguments: picture files, and folders of them.
      out: the .npz file, which appears whole or not at all.
      size: pixels, the side of the square images; NaFlex images have as many patches as such an
        image. None for what the checkpoint says.
      batch: images a step.
      patch_dtype: as `load_encoder` takes it.
      normalize: whether every embedding is divided by its Euclidean norm.
      interrupted: whether to stop with a KeyboardInterrupt; asked after every batch.

    Returns:
      The number of pictures that could not be read; they are reported and left out.

    Raises:
      OSError, ValueError: the checkpoint cannot be loaded or has no pooling head, there are no
        pictures, or `out` cannot be written.
    """
    from tqdm import tqdm

    paths = find_pictures(arguments)
    if not paths:
        raise ValueError(f"There are no pictures in {', '.join(map(str, arguments))}.")
    encoder = load_encoder(checkpoint, patch_dtype=patch_dtype)
    if size is not None and not encoder.config.naflex:
        encoder = load_encoder(checkpoint, image_size=size, patch_dtype=patch_dtype)
    if encoder.head is None:
        raise ValueError(
            f"{checkpoint} has no pooling head, so it gives no embedding of a picture."
        )
    preprocessing = Preprocessing.of(checkpoint, encoder.config, size)
    batch = min(batch, len(paths))
    embeddings, embedded = [np.zeros((0, encoder.config.width), np.float32)], []
    with tqdm(total=len(paths), unit=" pictures", disable=sys.stderr is None) as bar:
        for part in _read_ahead(preprocessing.image, paths, batch):
            images = []
            for path, image in part:
                if (error := image.exception()) is None:
                    images.append(image.result())
                    embedded.append(str(path))
                else:
                    bar.write(f"Cannot read {path}: {error}", file=sys.stderr)
            if images:
                L = preprocessing.max_num_patches
                embeddings.append(_embed(encoder, images, batch, L))
            bar.update(len(part))
            if interrupted():
                raise KeyboardInterrupt
    result: np.ndarray = np.concatenate(embeddings)
    if normalize:
        length = np.linalg.norm(result, axis=1, keepdims=True)
        result = result / np.maximum(length, np.finfo(np.float32).tiny)
    with written_whole(out) as file:
        np.savez(file, embeddings=result, paths=np.array(embedded, str))
    unreadable = len(paths) - len(embedded)
    print(f"Embedded {len(embedded)} of {len(paths)} pictures into {out}.")
    if unreadable:
        print(f"{unreadable} could not be read.", file=sys.stderr)
    return unreadable
