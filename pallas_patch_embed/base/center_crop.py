"""Sizes for resizing and cropping. Processes that decode pictures use this, so without JAX."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class CenterCrop:
    """Resizes a picture and crops the result at its centre, or pads what is smaller than the crop.

    Attributes:
      fit: how pictures are resized. "squash": to `resized`, whatever their aspect ratio.
        "shortest": the short side gets the side of the square `resized`, and the long side
        int(side * long / short). "longest": to the largest size in `resized` with the picture's
        aspect ratio; sides are rounded, a half to the even number.
      resized: (height, width) in pixels.
      fill: colour (red, green, blue) of the pixels outside of the picture.
      torchvision: whether the crop begins where torchvision's CenterCrop begins, otherwise where
        transformers' center_crop does. They differ if the margin on both sides is not even.
    """

    fit: Literal["squash", "shortest", "longest"]
    resized: tuple[int, int]
    fill: tuple[int, int, int] = (0, 0, 0)
    torchvision: bool = False

    def resized_from(self, height: int, width: int) -> tuple[int, int]:
        """Returns the (height, width) to which a picture of this size is resized.

        Source: `get_resize_output_image_size` of transformers 5.24 and `Resize` of torchvision 0.28
        have the same rule for the short side. "longest" is `ResizeKeepRatio` of timm 1.0.31.
        """
        to_height, to_width = self.resized
        if self.fit == "squash":
            return self.resized
        if self.fit == "shortest":
            long = int(to_height * max(height, width) / min(height, width))
            return (long, to_width) if width <= height else (to_height, long)
        ratio = max(height / to_height, width / to_width)
        return round(height / ratio), round(width / ratio)

    def corner(self, resized: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
        """Returns (top, left) of a crop of this size; a negative number is a margin to be filled.

        Source: `center_crop` of transformers 5.24 rounds the margin of the picture down, and so the
        margin that is filled up. torchvision 0.28 rounds the former to the nearest number, a half
        to the even one, and the latter down.
        """
        margins = [found - wanted for found, wanted in zip(resized, size)]
        if self.torchvision:
            top, left = (round(m / 2) if m >= 0 else -(-m // 2) for m in margins)
        else:
            top, left = (m // 2 for m in margins)
        return top, left

    def __str__(self) -> str:
        height, width = self.resized
        match self.fit:
            case "squash":
                return f"the centre of pictures of {height} x {width}"
            case "shortest":
                return f"the centre of pictures with a short side of {height}"
        return f"the centre of pictures within {height} x {width}"
