"""Positions are resized as the reference implementations resize them."""

from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.patch_embedding.positions import INTERPOLATIONS
from tests.operator.bounds import assert_bit_equal

RESIZED = dict(np.load(Path(__file__).parents[1] / "data" / "positions" / "resized.npz"))
POSITIONS = RESIZED.pop("positions")


def distance(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("case", RESIZED)
def test_positions_are_those_of_the_reference(case):
    interpolation, h, w = case.split()
    arguments = dict(grid=(int(h), int(w)), interpolation=interpolation)
    found = ppe.resize_positions(POSITIONS, **arguments)
    assert distance(found, RESIZED[case]) <= 1e-5
    # The three interpolations differ by much more than that.
    others = (RESIZED[f"{other} {h} {w}"] for other in INTERPOLATIONS if other != interpolation)
    assert min(distance(other, RESIZED[case]) for other in others) >= 1e-2
    batched = ppe.resize_positions(POSITIONS[None], **arguments)
    assert_bit_equal(batched, found[None])
    grid = ppe.resize_positions(POSITIONS.reshape(16, 16, -1), **arguments)
    assert_bit_equal(grid, np.asarray(found).reshape(int(h), int(w), -1))
    traced = jax.jit(lambda x: ppe.resize_positions(x, **arguments))(POSITIONS)
    np.testing.assert_allclose(traced, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_the_same_grid_changes_nothing(interpolation):
    found = ppe.resize_positions(POSITIONS, (16, 16), interpolation=interpolation)
    np.testing.assert_allclose(found, POSITIONS, atol=2e-6)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_class_tokens_keep_their_positions(interpolation):
    tokens = np.float32(np.random.default_rng(0).normal(size=(5, 8)))
    both = np.concatenate([tokens, POSITIONS])[None]
    found = ppe.resize_positions(both, (7, 9), interpolation=interpolation, prefix=5)
    assert found.shape == (1, 5 + 63, 8)
    assert_bit_equal(found[0, :5], tokens)
    wanted = ppe.resize_positions(POSITIONS, (7, 9), interpolation=interpolation)
    np.testing.assert_allclose(found[0, 5:], wanted, atol=1e-6)


def test_resized_positions_can_be_packed():
    kernel = np.float32(np.random.default_rng(0).normal(size=(4, 4, 3, 8)))
    positions = np.concatenate([POSITIONS[:1], POSITIONS])
    resized = ppe.resize_positions(positions, (3, 5), interpolation="bicubic", prefix=1)
    params = ppe.pack(
        kernel, None, resized, patch_size=4, grid=(3, 5), prefix=POSITIONS[:1], dtype="float32"
    )
    np.testing.assert_allclose(params.table[1:], np.asarray(resized)[1:], atol=1e-6)


BAD = {
    "integers": (TypeError, np.ones((16, 8), int), {}, "expected a floating-point array"),
    "no square": (ValueError, np.ones((17, 8)), {}, "positions have shape .17, 8."),
    "a prefix of a square": (ValueError, np.ones((16, 8)), dict(prefix=1), "1 [+] a square"),
    "one axis": (ValueError, np.ones(16), {}, "positions have shape .16."),
    "nothing": (ValueError, np.ones((0, 8)), {}, "positions have shape .0, 8."),
    "interpolation": (ValueError, POSITIONS, dict(interpolation="cubic"), "bicubic-antialiased"),
    "prefix": (ValueError, POSITIONS, dict(prefix=-1), "prefix is -1"),
    "grid": (ValueError, POSITIONS, dict(grid=(0, 4)), "all positive integers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    error, positions, arguments, text = BAD[case]
    with pytest.raises(error, match=text):
        ppe.resize_positions(positions, **(dict(grid=(4, 4)) | arguments))
