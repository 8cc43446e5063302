"""Conversion of picture files to images for an encoder, as its checkpoint's image processor does.

Processes that decode pictures import this module, so it imports JAX only to read a checkpoint.
"""

import dataclasses
import math
import os
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.embed.pictures import (
    MOST_PIXELS,
    PIXEL,
    LimitError,
    Open,
    check_room,
    decode_upright,
    lift_limit,
)

if TYPE_CHECKING:
    from PIL import Image

    from pallas_patch_embed.embed.units import Origin
    from pallas_patch_embed.encoders.config import Config

# Default of Siglip2ImageProcessor.
MAX_NUM_PATCHES = 256

# Fields of an image processor that resizes pictures and maps pixels to [-1, 1]. These values are
# also the defaults of both classes of image processors.
PIXELS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
}

# Fields of an image processor that change no pixel of a picture: names of classes, types of inputs
# and outputs, and sizes that are used only if a do_... field is true. do_convert_rgb is here
# because this package always converts pictures to RGB.
HARMLESS = {
    "_processor_class",
    "_valid_processor_keys",
    "crop_size",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "feature_extractor_type",
    "image_seq_length",
    "pad_size",
    "processor_class",
    "return_tensors",
    "transformers_version",
    "use_fast",
}


class Decoded(NamedTuple):
    """A picture that was decoded.

    Attributes:
      image: the picture, upright and resized, [H, W, 3] uint8.
      notes: what a summary says about it, `pictures.DAMAGED_METADATA` and `pictures.TRUNCATED`.
      origin: its origin as it was found when the picture was opened, None if nothing was found.
    """

    image: np.ndarray
    notes: tuple[str, ...] = ()
    origin: "Origin | None" = None


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The conversion of pictures to images for an encoder.

    Attributes:
      resample: one of PIL.Image.Resampling.
      size: (height, width) of images in pixels; None for NaFlex, which keeps the aspect ratio.
      patch: side of a patch in pixels.
      max_num_patches: largest number of patches of a NaFlex image.
      defaults_of: name of the software whose defaults these are; None if the checkpoint has an
        image processor.
      max_pixels: largest number of pixels of a picture.
      allow_truncated: whether pictures are decoded whose end is missing.
    """

    resample: int
    size: tuple[int, int] | None
    patch: int
    max_num_patches: int
    defaults_of: str | None = None
    max_pixels: int = MOST_PIXELS
    allow_truncated: bool = False

    @classmethod
    def of(cls, checkpoint: Path, config: "Config", size: int | None) -> "Preprocessing":
        """Reads the preprocessing from the checkpoint's image processor, or uses the default.

        The image processor is the `image_processor` of a processor_config.json, or a
        preprocessor_config.json. Its class is transformers' SiglipImageProcessor or, for a NaFlex
        encoder, Siglip2ImageProcessor. Every field is either applied or known to change no pixel.
        By default pictures are resized to the model's size, bicubically as by SiglipImageProcessor,
        or bilinearly as by Siglip2ImageProcessor and big_vision.

        Args:
          checkpoint: the folder of the image processor's file, or a file in that folder.
          config: config of the encoder.
          size: side of the images in pixels that the user chose, which config.image_size then has;
            None for the size in the checkpoint.

        Raises:
          ValueError: the file is damaged, or specifies more than resizing to the model's size and
            pixels in [-1, 1].
        """
        from PIL import Image

        from pallas_patch_embed.encoders.arrays import is_npz
        from pallas_patch_embed.encoders.config import check_size

        if config.channels != 3:
            raise ValueError(
                f"the encoder is for images of {config.channels} channels, but pictures are "
                "decoded to RGB. Call the encoder itself with arrays of that many channels."
            )
        name = "Siglip2ImageProcessor" if config.naflex else "SiglipImageProcessor"
        file, given = _image_processor(checkpoint)
        _check_fields(file, given, name, config)
        big_vision = file is None and is_npz(checkpoint)
        bilinear = config.naflex or big_vision
        default = Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC
        resample = given.get("resample", default)
        if isinstance(resample, bool) or resample not in list(Image.Resampling):
            raise ValueError(
                f"{file}: resample is {reprlib.repr(resample)}, expected one of "
                "PIL.Image.Resampling."
            )
        L = given.get("max_num_patches", MAX_NUM_PATCHES)
        check_size(f"{file}: max_num_patches", L)
        if config.naflex and size is not None:
            check_size(f"--size {size} in patches of {config.patch} pixels", size // config.patch)
            L = (size // config.patch) ** 2
        image_size = config.image_size
        if image_size is not None and "size" in given:
            said = _size(given["size"], file)
            if size is None:
                if tuple(side // config.patch for side in said) != config.grid:
                    raise ValueError(
                        f"{file} resizes pictures to {said[0]} x {said[1]}, but the model expects "
                        f"{image_size[0]} x {image_size[1]}. Choose a size with --size."
                    )
                image_size = said
        defaults_of = None
        if file is None:
            defaults_of = "big_vision" if big_vision else f"transformers' {name}"
        return cls(int(resample), image_size, config.patch, L, defaults_of)

    def __str__(self) -> str:
        from PIL import Image

        size = f"at most {self.max_num_patches} patches of {self.patch} x {self.patch}"
        if self.size is not None:
            size = f"{self.size[0]} x {self.size[1]}"
        return f"{size} pixels, {Image.Resampling(self.resample).name.lower()}"

    def image(self, open_: Open, reserved: float = math.inf) -> np.ndarray:
        """Returns a picture, upright and resized, as [H, W, 3] uint8; otherwise as `decode`."""
        return self.decode(open_, reserved).image

    def decode(self, open_: Open, reserved: float = math.inf) -> Decoded:
        """Decodes a picture, rotates it upright, and resizes it.

        Args:
          open_: function that opens the picture.
          reserved: number of bytes that the encoded picture and its pixels may take.

        Raises:
          LargerError: the picture needs more memory.
          LimitError: the picture has more than `max_pixels` pixels.
          TruncatedError: the end of the picture is missing.
          Exception: any exception that Pillow raises for a file that is not a readable picture.
        """
        lift_limit(self.max_pixels)
        with open_(reserved) as file:
            encoded = file.seek(0, os.SEEK_END)

            def check(pixels: int, copies: int = 1) -> None:
                if pixels > self.max_pixels:
                    raise LimitError(
                        f"it has {pixels} pixels, more than --max-pixels {self.max_pixels}"
                    )
                check_room(copies * encoded + PIXEL * pixels, reserved)

            # Some formats are read as a whole before the number of pixels is known.
            check(0)
            picture, notes = decode_upright(file, check, self.allow_truncated)
            image = np.asarray(picture.resize(self._size_for(picture), self.resample))
            return Decoded(image, notes, getattr(file, "origin", None))

    @property
    def most_bytes(self) -> int:
        """Largest size of an image in bytes."""
        if self.size is not None:
            return 3 * math.prod(self.size)
        return 3 * self.patch**2 * self.max_num_patches

    def black(self) -> np.ndarray:
        """Returns a black image."""
        h, w = self.size or (self.patch, self.patch)
        return np.zeros((h, w, 3), np.uint8)

    def _size_for(self, picture: "Image.Image") -> tuple[int, int]:
        """Returns the (width, height) to which the picture is resized."""
        if self.size is not None:
            return self.size[::-1]
        h, w = largest_grid(picture.height, picture.width, self.patch, self.max_num_patches)
        return w * self.patch, h * self.patch


def _image_processor(checkpoint: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns the file of the image processor and its fields that are not null.

    As in transformers, the image_processor of a processor_config.json takes precedence over a
    preprocessor_config.json. Returns (None, {}) if there is neither.
    """
    from pallas_patch_embed.encoders.arrays import read_json

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        given = read_json(file)
        if not isinstance(given, dict):
            raise ValueError(f"{file} is not a JSON object of fields.")
        if name == "processor_config.json":
            given = given.get("image_processor")
            if given is None:
                continue
            if not isinstance(given, dict):
                raise ValueError(f"{file}: image_processor is not a JSON object of fields.")
        return file, {field: value for field, value in given.items() if value is not None}
    return None, {}


def _check_fields(file: Path | None, given: dict[str, Any], name: str, config: "Config") -> None:
    """Refuses fields that are neither applied nor harmless."""
    types = [name + suffix for suffix in ("", "Fast", "Pil")]
    if given.get("image_processor_type", name) not in types:
        raise ValueError(
            f"{file}: image_processor_type is {reprlib.repr(given['image_processor_type'])}, "
            f"expected {name}, with which this encoder was trained."
        )
    for field, wanted in PIXELS.items():
        if not _equal(given.get(field, wanted), wanted):
            raise ValueError(
                f"{file}: {field} is {reprlib.repr(given[field])}, expected {wanted!r}, because "
                "SigLIP encoders need resized pictures with pixels in [-1, 1]."
            )
    obeyed = {"image_processor_type", "resample", *PIXELS}
    # Siglip2ImageProcessor ignores the field size.
    obeyed |= {"size", "patch_size", "max_num_patches"} if config.naflex else {"size"}
    for field, value in given.items():
        if field not in obeyed | HARMLESS and value is not False:
            raise ValueError(
                f"{file}: {field} is {reprlib.repr(value)}, which `embed` does not support. Remove "
                "this field if it does not change pictures."
            )
    if given.get("patch_size", config.patch) != config.patch:
        raise ValueError(
            f"{file}: patch_size is {reprlib.repr(given['patch_size'])}, but the model has patches "
            f"of {config.patch} pixels."
        )


def _equal(value: Any, wanted: float) -> bool:
    """Returns whether the value, or each of its three values, is the wanted one."""
    values = value if isinstance(value, list) and len(value) == 3 else [value]
    # A comparison does not convert an integer to float, for which it may be too large.
    return all(isinstance(v, int | float) and wanted - 1e-6 <= v <= wanted + 1e-6 for v in values)


def _size(size: Any, file: Path | None) -> tuple[int, int]:
    """Reads (height, width); refuses an integer, which may mean a square or the shorter side."""
    from pallas_patch_embed.encoders.config import check_size

    sides = {}
    if isinstance(size, dict):
        sides = {name: side for name, side in size.items() if side is not None}
    if sides.keys() != {"height", "width"}:
        raise ValueError(
            f'{file}: size is {reprlib.repr(size)}, expected {{"height": ..., "width": ...}}.'
        )
    for side in sides.values():
        check_size(f"{file}: size is {reprlib.repr(size)}; its height or width in pixels", side)
    return sides["height"], sides["width"]
