"""Decoding of JPEG pictures to arrays with simplejpeg, which is optional.

Pillow decodes with libjpeg-turbo, too, but into pixels of 4 bytes. simplejpeg gives an array in
0.87 ms, with the header read by Pillow, and Pillow in 1.08 ms (docs/experiments/embed.md).
"""

import functools
import importlib
from typing import Any

import numpy as np

# Colour spaces that both decode to the same pixels.
COLOURS = ("YCbCr", "Gray")


@functools.cache
def _package() -> Any:
    """Returns simplejpeg, or None if it is not installed.

    Raises:
      ValueError: it is installed, but broken, such as one that was built for another NumPy.
    """
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None
    except Exception as error:
        raise ValueError(
            f"simplejpeg cannot be imported ({error}). Install it again, or uninstall it: then "
            "Pillow decodes all pictures."
        ) from error


def version() -> str | None:
    """Returns the version of simplejpeg, or None if it is not installed."""
    package = _package()
    return None if package is None else str(package.__version__)


def pixels(content: bytes, size: tuple[int, int]) -> np.ndarray | None:
    """Decodes a JPEG picture as Pillow does.

    Args:
      content: the encoded picture.
      size: (height, width) that Pillow found in its header.

    Returns:
      [H, W, 3] uint8; None if simplejpeg is missing or complains, or if the picture has unusual
      colours.
    """
    package = _package()
    if package is None:
        return None
    try:
        height, width, colours, _ = package.decode_jpeg_header(content)
        if colours not in COLOURS or (height, width) != size:
            return None
        found: np.ndarray = package.decode_jpeg(content, "RGB")
    except Exception:
        # Pillow may decode the picture, or says what is wrong. simplejpeg raises ValueError for a
        # damaged one, and KeyError for one with 4:4:1 chroma.
        return None
    return found
