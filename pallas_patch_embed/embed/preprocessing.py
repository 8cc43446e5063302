"""Conversion of picture files to images for an encoder, as its checkpoint's image processor does.

Processes that decode pictures import this module, so it imports JAX only to read a checkpoint.
"""

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pallas_patch_embed.base.center_crop import CenterCrop
from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.embed.pictures import (
    MOST_PIXELS,
    PIXEL,
    LimitError,
    Open,
    check_room,
    decode,
    lift_limit,
)

if TYPE_CHECKING:
    from PIL import Image

    from pallas_patch_embed.embed.units import Origin
    from pallas_patch_embed.encoders.config import Config


class Decoded(NamedTuple):
    """A picture that was decoded.

    Attributes:
      image: the picture, upright and resized unless it is `whole`, [H, W, 3] uint8.
      notes: what a summary says about it, `pictures.DAMAGED_METADATA` and `pictures.TRUNCATED`.
      origin: its origin as it was found when the picture was opened, None if nothing was found.
      whole: whether the picture is yet to be resized.
    """

    image: np.ndarray
    notes: tuple[str, ...] = ()
    origin: "Origin | None" = None
    whole: bool = False


class Whole(NamedTuple):
    """The largest picture that is handed over whole.

    Attributes:
      size: number of bytes of its pixels.
      side: number of pixels of a side.
    """

    size: int
    side: int

    def holds(self, width: int, height: int) -> bool:
        return 3 * width * height <= self.size and max(width, height) <= self.side


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
      crop: how pictures are resized and cropped to `size`; None if they are only resized to it.
      whole: the largest pictures that are not resized, because the device does it; None if all
        pictures are resized.
    """

    resample: int
    size: tuple[int, int] | None
    patch: int
    max_num_patches: int
    defaults_of: str | None = None
    max_pixels: int = MOST_PIXELS
    allow_truncated: bool = False
    crop: CenterCrop | None = None
    whole: Whole | None = None

    @classmethod
    def of(cls, checkpoint: Path, config: "Config", size: int | None) -> "Preprocessing":
        """Reads the preprocessing from the checkpoint's image processor, or uses the default.

        Args:
          checkpoint, config: as for `read_image_processor`, which says what is read.
          size: side of the images in pixels that the user chose, which config.image_size then has;
            None for the size in the checkpoint.

        Raises:
          ValueError: the images of the encoder are not RGB, or as for `read_image_processor`.
        """
        from pallas_patch_embed.encoders.image_processor import read_image_processor

        if config.channels != 3:
            raise ValueError(
                f"the encoder is for images of {config.channels} channels, but pictures are "
                "decoded to RGB. Call the encoder itself with arrays of that many channels."
            )
        found = read_image_processor(checkpoint, config, size)
        return cls(
            found.resample,
            found.size,
            config.patch,
            found.max_num_patches,
            found.defaults_of,
            crop=found.crop,
        )

    def __str__(self) -> str:
        from PIL import Image

        size = f"at most {self.max_num_patches} patches of {self.patch} x {self.patch}"
        if self.size is not None:
            size = f"{self.size[0]} x {self.size[1]}"
            size += f" at {self.crop}" if self.crop is not None else ""
        return f"{size} pixels, {Image.Resampling(self.resample).name.lower()}"

    def image(self, open_: Open, reserved: float = math.inf) -> np.ndarray:
        """Returns a picture, upright and resized, as [H, W, 3] uint8; otherwise as `decode`."""
        return self.decode(open_, reserved).image

    def decode(self, open_: Open, reserved: float = math.inf) -> Decoded:
        """Decodes a picture, rotates it upright, and resizes and crops it unless it stays whole.

        Args:
          open_: function that opens the picture.
          reserved: number of bytes that the encoded picture and its pixels may take.

        Raises:
          LargerError: the picture needs more memory.
          LimitError: the picture has more than `max_pixels` pixels, or needs so many while it is
            resized.
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
            stays = self.whole.holds if self.whole is not None else lambda *_: False
            picture, notes = decode(file, check, self.allow_truncated, stays)
            if isinstance(picture, np.ndarray):
                height, width, _ = picture.shape
            else:
                width, height = picture.size
            self._check_resizing(height, width, encoded, reserved)
            whole = stays(width, height)
            if whole or isinstance(picture, np.ndarray):
                image = np.asarray(picture)
            else:
                image = np.asarray(self._resized(picture))
            return Decoded(image, notes, getattr(file, "origin", None), whole)

    @property
    def most_bytes(self) -> int:
        """Largest size of an image in bytes."""
        most = 3 * self.patch**2 * self.max_num_patches
        if self.size is not None:
            most = 3 * math.prod(self.size)
        return most if self.whole is None else max(most, self.whole.size)

    def black(self) -> np.ndarray:
        """Returns a black image."""
        h, w = self.size or (self.patch, self.patch)
        return np.zeros((h, w, 3), np.uint8)

    def resized_from(self, height: int, width: int) -> tuple[int, int]:
        """Returns the (height, width) to which a picture of this size is resized."""
        if self.crop is not None:
            return self.crop.resized_from(height, width)
        if self.size is not None:
            return self.size
        h, w = largest_grid(height, width, self.patch, self.max_num_patches)
        return h * self.patch, w * self.patch

    def _check_resizing(self, height: int, width: int, encoded: int, reserved: float) -> None:
        """Raises an error if the picture vanishes, or if resizing it needs too much memory.

        Pillow before version 13 resizes the rows first, and then the columns, so a picture with a
        very short side becomes much larger in between.
        """
        to_height, to_width = self.resized_from(height, width)
        if 0 in (to_height, to_width):
            raise ValueError(
                f"it has {width} x {height} pixels (width x height), and would be resized to "
                f"{to_width} x {to_height}"
            )
        both = to_width != width and to_height != height
        between = to_width * height if both else 0
        if max(between, to_width * to_height) > self.max_pixels:
            raise LimitError(
                f"it has {width} x {height} pixels (width x height), which would be {to_width} x "
                f"{height} and {to_width} x {to_height} while it is resized, more than "
                f"--max-pixels {self.max_pixels}"
            )
        pixels = width * height + between + to_width * to_height
        check_room(encoded + PIXEL // 2 * pixels, reserved)

    def _resized(self, picture: "Image.Image") -> "Image.Image":
        from PIL import Image

        size = self.resized_from(picture.height, picture.width)
        resized = picture.resize(size[::-1], self.resample)
        if self.crop is None:
            return resized
        assert self.size is not None  # NaFlex images are not cropped.
        top, left = self.crop.corner(resized.size[::-1], self.size)
        image = Image.new("RGB", self.size[::-1], self.crop.fill)
        image.paste(resized, (-left, -top))
        return image
