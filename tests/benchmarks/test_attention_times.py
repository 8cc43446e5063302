"""The benchmark of the attention compares each result with float32."""

import jax
import numpy as np
import pytest

from benchmarks import attention
from pallas_patch_embed.base.chips import H200
from pallas_patch_embed.layers.attention_sm90 import Config, Shape

SHAPE = Shape(5, 37, 2, 8)


@pytest.mark.parametrize(
    "mix, packed, levels",
    [
        (None, False, ""),
        ("uniform", False, ""),
        ("bimodal", True, ""),
        ("uniform", False, "int8"),
        (None, False, "float8_e4m3fn"),
    ],
)
def test_the_formula_is_timed_and_compared(mix, packed, levels):
    lengths = None if mix is None else attention.draw_lengths(mix, SHAPE)
    (row,) = attention.compare(SHAPE, lengths, [], H200, 0, packed=packed, levels=levels)
    assert row["program"] == "cudnn" and row["burst"] > 0 and row["packed"] == packed
    most = attention.MOST_ERROR_OF_LEVELS if levels else attention.MOST_ERROR
    assert row["levels"] == levels and 0 < row["error"] <= most


def test_the_kernel_is_timed_with_a_pass_and_without():
    operands = [jax.ShapeDtypeStruct((1, 196, 2, 64), "bfloat16")] * 3
    config = Config(2, 128, 2)
    found = attention.contenders(Shape(1, 196, 2, 64), operands, [config], H200, "int8")
    assert list(found) == ["cudnn", "2,128,2 + pass", "2,128,2"]


def test_a_wrong_result_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(attention.attention, "formula", lambda q, k, v, **_: q + 1)
    with pytest.raises(SystemExit, match="cudnn has a relative error"):
        attention.compare(SHAPE, None, [], H200, 0)


def test_tiles_without_tokens_are_not_counted():
    shape, config = Shape(3, 400, 1, 64), Config(2, 64, 4)
    assert attention.tiles_of(np.array([400, 400, 400]), shape, config) == 3 * 4 * 7
    assert attention.tiles_of(np.array([0, 1, 129]), shape, config) == 1 + 2 * 3
