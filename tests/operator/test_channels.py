"""Images of any number of channels: grey, RGBA, and those of satellites."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import explain
from pallas_patch_embed.base.chips import H200, Target
from pallas_patch_embed.base.problem import Problem
from tests.operator.bounds import DTYPES, assert_agrees, assert_bit_equal, draw_images

P, GRID, N = 4, (2, 3), 16
CHANNELS = (1, 2, 4, 12)


def draw(channels, seed=0):
    rng = np.random.default_rng(seed)
    kernel = np.float32(rng.normal(size=(P, P, channels, N)))
    bias, positions = np.float32(rng.normal(size=N)), np.float32(rng.normal(size=(*GRID, N)))
    return kernel, bias, positions, draw_images(rng, 3, 8, 12, channels)


def normalisation(channels):
    rng = np.random.default_rng(1)
    mean, std = rng.uniform(0.2, 0.8, channels), rng.uniform(0.1, 0.4, channels)
    return dict(image_mean=tuple(mean), image_std=tuple(std))


@pytest.mark.parametrize("normalised", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_float32_is_the_convolution(channels, normalised):
    kernel, bias, positions, images = draw(channels)
    arguments = normalisation(channels) if normalised else {}
    params = ppe.pack(kernel, bias, positions, patch_size=P, dtype="float32", **arguments)
    assert (params.channels, params.K) == (channels, channels * P * P)
    mean, std = arguments.get("image_mean", 0.5), arguments.get("image_std", 0.5)
    pixels = (images / 255 - np.float64(mean)) / np.float64(std)
    patches = pixels.reshape(3, 2, P, 3, P, channels).swapaxes(2, 3).reshape(3, 6, -1)
    wanted = patches @ kernel.reshape(-1, N).astype(np.float64) + bias + positions.reshape(-1, N)
    for given in (images, np.float32(pixels)):
        y = ppe.embed_images(given, params, out_dtype="float32")
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_every_dtype_agrees_with_the_reference(channels, dtype):
    kernel, bias, positions, images = draw(channels)
    params = ppe.pack(kernel, bias, positions, patch_size=P, dtype=dtype)
    patches = ppe.patchify(images, params)
    assert patches.shape == (3, 6, 128 if channels * P * P <= 128 else 256)
    # A dozen elements may be moved by a fused multiply-add in so small a result.
    assert_agrees(ppe.embed_images(images, params), patches, params, moved=0.05)
    cut = images.reshape(3, 2, P, 3, P, channels).swapaxes(2, 3).reshape(3, 6, -1)
    assert_bit_equal(ppe.encode_patches(cut, params), patches)


@pytest.mark.parametrize("channels", CHANNELS)
def test_every_layout_gives_the_same_params(channels):
    kernel, bias, positions, _ = draw(channels)
    layouts = {
        "HWIO": (kernel, {}),
        "OIHW": (kernel.transpose(3, 2, 0, 1), {}),
        "KN": (kernel.reshape(-1, N), dict(channels=channels)),
        "NK": (kernel.reshape(-1, N).T, dict(channels=channels)),
    }
    packed = [
        ppe.pack(kernel, bias, positions, patch_size=P, layout=layout, **arguments)
        for layout, (kernel, arguments) in layouts.items()
    ]
    for params in packed[1:]:
        assert jax.tree.structure(params) == jax.tree.structure(packed[0])
        jax.tree.map(assert_bit_equal, params, packed[0])


@pytest.mark.parametrize("channels", CHANNELS)
def test_videos_have_any_number_of_channels(channels):
    rng = np.random.default_rng(0)
    kernel = np.float32(rng.normal(size=(N, channels, 2, P, P)))
    params = ppe.pack(
        kernel, None, None, patch_size=P, layout="OITHW", dtype="float32",
        **normalisation(channels),
    )  # fmt: skip
    videos = draw_images(rng, 4, 8, 12, channels)
    mean, std = normalisation(channels).values()
    pixels = np.moveaxis((videos / 255 - np.float64(mean)) / np.float64(std), -1, 0)
    cut = pixels.reshape(channels, 2, 2, 2, P, 3, P).transpose(1, 3, 5, 0, 2, 4, 6)
    wanted = cut.reshape(12, -1) @ kernel.reshape(N, -1).T.astype(np.float64)
    y = ppe.embed_images(videos, params, out_dtype="float32")
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("channels", CHANNELS)
def test_saved_and_exported_params_keep_their_channels(channels, tmp_path):
    kernel, bias, positions, images = draw(channels)
    params = ppe.pack(kernel, bias, positions, patch_size=P, **normalisation(channels))
    params.save(tmp_path / "params")
    loaded = ppe.PatchEmbedParams.load(tmp_path / "params")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(assert_bit_equal, loaded, params)
    exported = jax.export.export(jax.jit(ppe.embed_images))(images, params)
    restored = jax.export.deserialize(exported.serialize())
    assert_bit_equal(restored.call(images, params), ppe.embed_images(images, params))
    assert ("channels" in repr(params)) == (channels != 3)


@pytest.mark.parametrize("channels", CHANNELS)
def test_no_kernel_cuts_such_images_itself(channels):
    kernel, bias, positions, images = draw(channels)
    params = ppe.pack(kernel, bias, positions, patch_size=P)
    with pytest.raises(NotImplementedError, match="a kernel cuts only images of 3 channels"):
        ppe.embed_images(images, params, backend="triton", cut="kernel")
    shape = (8, 224, 224, channels)
    kernel = np.zeros((16, 16, channels, 768), np.float32)
    params = ppe.pack(kernel, None, None, patch_size=16)
    problem = Problem.of(
        *(jax.ShapeDtypeStruct(shape, "uint8"), params.weight, params.scale, params.offset),
        out_dtype="bfloat16",
        geometry=params.geometry,
    )
    found = explain(problem, Target("cuda", H200), None)
    assert not any("cuts images itself" in config for config in found.configs)
    assert ppe.explain(shape, params).problem.images == shape
    assert ppe.explain((8, 196, params.K_padded), params).problem.images is None


def pack(**changed):
    kernel = changed.pop("kernel", np.zeros((P, P, 4, N), np.float32))
    return lambda: ppe.pack(kernel, None, None, patch_size=P, **changed)


RGBA = pack()()
BAD = {
    "the layout has another number": (pack(channels=3), r"\[p, p, C, N\].*C = 3"),
    "K is not divisible": (pack(kernel=np.zeros((64, N)), layout="KN"), "C = 3, K = 48"),
    "channels of zero": (pack(channels=0), "channels is 0, expected a positive integer"),
    "channels of text": (pack(channels="4"), "channels is '4', expected a positive integer"),
    "three means": (
        pack(image_mean=(0.4,) * 3),
        "expected numbers in .0, 1., one for each of the 4 channels",
    ),
    "images of RGB": (
        lambda: ppe.embed_images(np.zeros((8, 12, 3), np.uint8), RGBA),
        r"expected \[..., H, W, 4\]. Pass images of that many channels",
    ),
    "channels first": (
        lambda: ppe.patchify(np.zeros((4, 8, 12), np.uint8), RGBA),
        "Move the channels last",
    ),
    "patches of RGB": (
        lambda: ppe.encode_patches(np.zeros((6, 48), np.uint8), RGBA),
        r"expected \[..., S, 64\].*4 channels each",
    ),
    "params that lie": (
        lambda: ppe.patchify(np.zeros((8, 12, 3), np.uint8), dataclasses.replace(RGBA, channels=3)),
        "patches of 4 x 4 pixels and 3 channels have K = 48",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_contradictions_are_refused(case):
    call, text = BAD[case]
    with pytest.raises(ValueError, match=text):
        call()


def test_channels_are_not_guessed():
    # 4 * 4 * 4 * 3 weights are 12 channels of 4 x 4 or 3 channels of 8 x 8 pixels.
    kernel = jnp.zeros((192, N))
    assert ppe.pack(kernel, None, None, patch_size=8, layout="KN").channels == 3
    assert ppe.pack(kernel, None, None, patch_size=4, layout="KN", channels=12).channels == 12
    with pytest.raises(ValueError, match="C = 3, K = 48"):
        ppe.pack(kernel, None, None, patch_size=4, layout="KN")
