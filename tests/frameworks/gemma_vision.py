"""gemma's vision tower, as `vision.ViTModel`.

gemma imports kauldron, which imports TensorFlow to name its types. Two gigabytes for that are not
installed: where TensorFlow is missing, a stand-in is imported.
"""

import importlib.util
import sys
from unittest import mock

import pytest

pytest.importorskip("gemma", reason="gemma is missing: `make test-frameworks` installs it")

if importlib.util.find_spec("tensorflow") is None:
    sys.modules["tensorflow"] = mock.MagicMock()
    try:
        from gemma.gm.nn.vision import _vision_utils as vision
    finally:
        # Keras looks here to find out whether TensorFlow is in use.
        del sys.modules["tensorflow"]
else:
    from gemma.gm.nn.vision import _vision_utils as vision

__all__ = ["vision"]
