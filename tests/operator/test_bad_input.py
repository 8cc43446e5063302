"""Every bad input is refused before anything runs, with what was given and what to do instead."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from tests.operator.bounds import draw_images, draw_params

RNG = np.random.default_rng(0)
PARAMS = {
    dtype: draw_params(RNG, patch_size=14, grid=(14, 14), N=8, dtype=dtype)
    for dtype in ("bfloat16", "float32", "int8")
}
KERNEL = RNG.normal(size=(14, 14, 3, 8)).astype(np.float32)
POSITIONS = RNG.normal(size=(196, 8)).astype(np.float32)


def patches(*shape, dtype="bfloat16"):
    return np.zeros(shape, jnp.dtype(dtype))


def embed(x, dtype="bfloat16", **options):
    return lambda: ppe.patch_embed(x, PARAMS[dtype], **options)


def images(x, **options):
    return lambda: ppe.embed_images(x, PARAMS["int8"], **options)


def pack(kernel=KERNEL, bias=None, positions=POSITIONS, **options):
    return lambda: ppe.pack(kernel, bias, positions, **(dict(patch_size=14) | options))


def with_value(array, value):
    array = array.copy()
    array.flat[5] = value
    return array


GOOD = patches(2, 196, 640)
BAD = {
    "rank": (ValueError, embed(patches(640)), "expected [..., S, 640]"),
    "rank 0": (ValueError, embed(patches()), "expected [..., S, 640]"),
    "K": (ValueError, embed(patches(196, 588)), "K = 588 but the packed weight has K = 640"),
    "S": (ValueError, embed(patches(195, 640)), "S = 195 positions"),
    "uint8 patches": (TypeError, embed(patches(196, 640, dtype="uint8"), "int8"), "uint8"),
    "float16": (TypeError, embed(patches(196, 640, dtype="float16")), "float16"),
    "float64": (TypeError, embed(patches(196, 640, dtype="float64"), "float32"), "float64"),
    "complex": (TypeError, embed(patches(196, 640, dtype="complex64")), "complex64"),
    "bool": (TypeError, embed(patches(196, 640, dtype="bool")), "bool"),
    "list": (TypeError, embed([[1.0]]), "list"),
    "None": (TypeError, embed(None), "NoneType"),
    "out_dtype": (ValueError, embed(GOOD, out_dtype="float16"), "bfloat16 or float32"),
    "out_dtype None": (ValueError, embed(GOOD, out_dtype=None), "bfloat16 or float32"),
    "out_dtype nonsense": (ValueError, embed(GOOD, out_dtype="nonsense"), "bfloat16 or float32"),
    "backend": (
        ValueError,
        embed(GOOD, backend="cudnn"),
        f"one of {', '.join(ppe.backend_names())}, or None",
    ),
    "positions' S": (
        ValueError,
        embed(GOOD, position_embedding=patches(195, 8)),
        "expected [196, 8] for all images or [2, 196, 8]",
    ),
    "one position": (TypeError, embed(GOOD, position_embedding=1.5), "float"),
    "positions' B": (
        ValueError,
        embed(GOOD, position_embedding=patches(3, 196, 8)),
        "[3, 196, 8]",
    ),
    "more positions": (
        ValueError,
        embed(GOOD[0], position_embedding=patches(3, 196, 8)),
        "[3, 196, 8]",
    ),
    "integer positions": (
        TypeError,
        embed(GOOD, position_embedding=patches(196, 8, dtype="int32")),
        "int32",
    ),
    "params": (TypeError, lambda: ppe.patch_embed(GOOD, {"weight": 1}), "dict"),
    "None params": (TypeError, lambda: ppe.embed_images(GOOD, None), "NoneType"),
    "cast params": (
        TypeError,
        lambda: ppe.patch_embed(
            GOOD, jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS["bfloat16"])
        ),
        "float16",
    ),
    "cut params": (
        ValueError,
        lambda: ppe.patch_embed(
            GOOD,
            dataclasses.replace(PARAMS["bfloat16"], weight=PARAMS["bfloat16"].weight[:, :588]),
        ),
        "[8, 640]",
    ),
    "grid of the image": (
        ValueError,
        images(draw_images(RNG, 98, 392, 3)),
        "7 x 28 grid of patches",
    ),
    "four channels": (ValueError, images(draw_images(RNG, 196, 196, 4)), "[..., H, W, 3]"),
    "grey": (ValueError, images(draw_images(RNG, 196, 196)), "[..., H, W, 3]"),
    "channels first": (ValueError, images(draw_images(RNG, 3, 196, 196)), "moveaxis"),
    "small": (ValueError, images(draw_images(RNG, 13, 196, 3)), "smaller than a patch"),
    "int32 image": (TypeError, images(draw_images(RNG, 196, 196, 3).astype(np.int32)), "int32"),
    "int8 image": (TypeError, images(draw_images(RNG, 196, 196, 3).astype(np.int8)), "int8"),
    "bool image": (TypeError, images(draw_images(RNG, 196, 196, 3) > 9), "bool"),
    "complex image": (TypeError, images(draw_images(RNG, 196, 196, 3) * 1j), "complex128"),
    "NaN kernel": (ValueError, pack(with_value(KERNEL, np.nan)), "kernel has 1 values"),
    "infinite bias": (ValueError, pack(bias=np.full(8, np.inf)), "bias has 8 values"),
    "NaN positions": (ValueError, pack(positions=with_value(POSITIONS, np.nan)), "1 values"),
    "layout": (ValueError, pack(layout="IOHW"), "HWIO, OIHW, OITHW, KN, NK"),
    "kernel of another layout": (ValueError, pack(layout="OIHW"), "[N, C, p, p]"),
    "kernel of another rank": (ValueError, pack(KERNEL.reshape(588, 8)), "[p, p, C, N]"),
    "kernel of another patch": (ValueError, pack(patch_size=16), "p = 16, C = 3, K = 768"),
    "integer kernel": (TypeError, pack(KERNEL.astype(np.int8)), "int8"),
    "complex kernel": (TypeError, pack(KERNEL * 1j), "complex"),
    "bias' shape": (ValueError, pack(bias=np.zeros(7)), "expected [8]"),
    "patch 0": (ValueError, pack(patch_size=0), "positive integer"),
    "patch -1": (ValueError, pack(patch_size=-1), "positive integer"),
    "patch 1.5": (ValueError, pack(patch_size=14.0), "positive integer"),
    "patch True": (ValueError, pack(patch_size=True), "positive integer"),
    "dtype": (ValueError, pack(dtype="float16"), "float32, bfloat16, float8_e4m3fn, int8"),
    "dtype nonsense": (ValueError, pack(dtype=3), "float32, bfloat16, float8_e4m3fn, int8"),
    "positions' N": (ValueError, pack(positions=POSITIONS[:, :7]), "[S, 8]"),
    "positions' rank": (ValueError, pack(positions=POSITIONS[:, 0]), "[S, 8]"),
    "no square": (ValueError, pack(positions=POSITIONS[:190]), "do not form a square"),
    "grid": (ValueError, pack(grid=(14, 13)), "182 patches"),
    "other grid": (
        ValueError,
        pack(positions=POSITIONS.reshape(14, 14, 8), grid=(7, 28)),
        "but grid is",
    ),
    "grid nonsense": (ValueError, pack(grid=(14,)), "(height, width)"),
    "negative grid": (ValueError, pack(grid=(-14, -14)), "all positive"),
    "layout list": (ValueError, pack(layout=["HWIO"]), "HWIO, OIHW, OITHW, KN, NK"),
    "kernel of lists": (TypeError, pack([[1.0], [2.0, 3.0]]), "kernel is list, expected a JAX"),
    "grid True": (ValueError, pack(grid=(True, 196)), "all positive"),
    "int8 overflow": (
        ValueError,
        pack(np.full_like(KERNEL, 3e38), np.full(8, 3.4e38), None, dtype="int8"),
        "constant of the pixels' encoding has 8 values beyond the range of float32",
    ),
    "bfloat16 kernel": (
        ValueError,
        pack(with_value(KERNEL, 3.4e38), dtype="bfloat16"),
        "kernel has 1 values that are NaN, infinite or beyond the range of bfloat16",
    ),
    "large positions": (
        ValueError,
        pack(bias=np.full(8, 3e38), positions=with_value(POSITIONS, 3e38)),
        "position_embedding has 1 values beyond the range of bfloat16",
    ),
    "explain's S": (ValueError, lambda: ppe.explain((195, 640), PARAMS["int8"]), "S = 195"),
    "explain's shape": (TypeError, lambda: ppe.explain("ab", PARAMS["int8"]), "neither"),
    "explain's images": (ValueError, lambda: ppe.explain((224, 210, 3), PARAMS["int8"]), "16 x 15"),
    "explain's channels": (
        ValueError,
        lambda: ppe.explain(np.zeros((3, 224, 224), np.uint8), PARAMS["int8"]),
        "Move the channels last",
    ),
    "explain's negative": (
        ValueError,
        lambda: ppe.explain((-1, 8, 8, 3), PARAMS["int8"]),
        "without negative numbers",
    ),
    "explain's nothing": (
        ValueError,
        lambda: ppe.explain((), PARAMS["int8"]),
        "without negative numbers",
    ),
    "explain's uint8 patches": (
        TypeError,
        lambda: ppe.explain(np.zeros((2, 196, 640), np.uint8), PARAMS["int8"]),
        "Make patches with patchify",
    ),
    "explain's no array": (
        TypeError,
        lambda: ppe.explain(types.SimpleNamespace(shape=(196, 640)), PARAMS["int8"]),
        "expected a JAX or numpy array, or a shape",
    ),
    "explain's out_dtype": (
        ValueError,
        lambda: ppe.explain((196, 640), PARAMS["int8"], out_dtype="float16"),
        "expected bfloat16 or float32",
    ),
    "explain's positions": (
        ValueError,
        lambda: ppe.explain((196, 640), PARAMS["int8"], position_embedding=np.zeros((195, 8))),
        "position_embedding has shape",
    ),
    "explain's K": (ValueError, lambda: ppe.explain((196, 588), PARAMS["int8"]), "K = 588"),
    "big-endian images": (
        TypeError,
        lambda: ppe.embed_images(np.zeros((1, 224, 224, 3), ">f4"), PARAMS["int8"]),
        "images has the big-endian dtype >f4, which JAX cannot read",
    ),
    "big-endian patches": (
        TypeError,
        lambda: ppe.patch_embed(np.zeros((196, 640), ">f4"), PARAMS["float32"]),
        "astype(numpy.float32)",
    ),
    "big-endian positions": (
        TypeError,
        lambda: ppe.embed_images(
            np.zeros((224, 224, 3), np.uint8),
            PARAMS["int8"],
            position_embedding=np.zeros((196, 8), ">f2"),
        ),
        "position_embedding has the big-endian dtype >f2, which JAX cannot read",
    ),
    "explain's device": (
        TypeError,
        lambda: ppe.explain((196, 640), PARAMS["int8"], device="gpu"),
        "jax.devices()",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_message(case):
    error, call, message = BAD[case]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "option", [dict(backend="cudnn"), dict(out_dtype="float16"), dict(position_embedding=1.5)]
)
def test_nothing_runs_before_a_bad_argument_is_refused(option, caplog):
    with jax.log_compiles(), pytest.raises((TypeError, ValueError)):
        ppe.embed_images(draw_images(RNG, 7, 196, 196, 3), PARAMS["int8"], **option)
    assert not caplog.records


def test_bad_input_is_refused_while_tracing():
    with pytest.raises(ValueError, match=f"one of {', '.join(ppe.backend_names())}, or None"):
        jax.make_jaxpr(lambda x: ppe.patch_embed(x, PARAMS["bfloat16"], backend="cudnn"))(GOOD)
