"""gemma's vision tower, as `vision.ViTModel`.

gemma imports kauldron, which imports TensorFlow only for type annotations. Where TensorFlow, two
gigabytes, is not installed, a stand-in replaces it.
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
        # Keras decides by this entry whether TensorFlow is in use.
        del sys.modules["tensorflow"]
else:
    from gemma.gm.nn.vision import _vision_utils as vision

__all__ = ["vision"]
