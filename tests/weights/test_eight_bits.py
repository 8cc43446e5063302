"""DINOv2 ViT-S/14 with trained weights in 8 bits is as near to float32 as docs/eight_bits.md says.

They print the table of that page:

  python -m pytest -n 0 -s -m weights tests/weights/test_eight_bits.py
"""

import functools

import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.commands.accuracy import Accuracy
from pallas_patch_embed.encoders.calibration import encode
from pallas_patch_embed.encoders.encoder import described_layers
from tests.pages import rows_of
from tests.weights import photographs
from tests.weights.test_dinov2 import between_photographs, folder

__all__ = ["folder"]

pytestmark = [pytest.mark.weights, pytest.mark.exhaustive("it takes ten minutes on two cores")]

# Crops of a photograph that are compared, and that calibrate. Every third photograph calibrates.
CROPS, CALIBRATING = 12, 4

# (dtype, min_cosine) of the rows of the table.
ROWS = [
    ("bfloat16", None),
    *(("int8", x) for x in (None, 0.9996, 0.9997, 0.9998, 0.9999, 0.99993)),
    ("float8_e4m3fn", None),
]


@pytest.fixture(scope="module")
def crops(folder):
    return photographs.crops(CROPS)


@pytest.fixture(scope="module")
def exact(folder):
    return ppe.load_encoder(folder, dtype="float32", patch_dtype="float32", image_size=224)


@pytest.fixture(scope="module")
def calibration_for(exact, crops):
    chosen = crops[::3, :CALIBRATING]
    images = chosen.reshape(-1, *chosen.shape[2:])
    return functools.cache(lambda dtype: ppe.calibrate(exact, images, dtype=dtype))


@pytest.fixture(scope="module")
def compared(crops):
    """Returns crops of the photographs that do not calibrate."""
    return np.delete(crops, np.s_[::3], 0).reshape(-1, *crops.shape[2:])


@pytest.fixture(scope="module")
def wanted(exact, compared):
    return encode(exact, compared)


@pytest.mark.parametrize("dtype, min_cosine", ROWS)
def test_the_cosines_are_those_of_the_page(
    folder, calibration_for, compared, wanted, dtype, min_cosine
):
    options = {}
    if dtype in EIGHT_BITS:
        options = dict(calibration=calibration_for(dtype), min_cosine=min_cosine)
    encoder = ppe.load_encoder(folder, dtype=dtype, patch_dtype="int8", image_size=224, **options)
    found = encode(encoder, compared)
    result = Accuracy.of(dtype, found, wanted)
    nearest = [between_photographs(x, CROPS).argmax(1) for x in (found, wanted)]
    same = np.mean(nearest[0] == nearest[1])
    label = dtype if min_cosine is None else f"{dtype}, `min_cosine={min_cosine}`"
    cells = *result.cells()[1:4], f"{same:.1%}"
    print(f"\n| {label} | {' | '.join(cells)} | {described_layers(encoder.blocks)}")
    ((mean, _, least, neighbours),) = (
        row[1:5] for row in rows_of("docs/eight_bits.md", "Measured") if row[0] == label
    )
    assert 1 - result.cosines.min() <= 4 * (1 - float(least))
    if min_cosine is None:
        assert 1 - result.cosines.mean() == pytest.approx(1 - float(mean), rel=0.25)
    else:  # The choice of layers varies with the rounding of the few pictures that are measured.
        assert result.cosines.mean() >= min_cosine - 1e-4
    changed, expected = (len(wanted) * (1 - x) for x in (same, float(neighbours.strip("%")) / 100))
    # Both counts vary by chance, because another machine rounds the calibration differently.
    assert changed <= expected + 3 * np.sqrt(2 * expected)
