"""Checks that compare a tower with the operator in it with the unchanged tower."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_patch_embed as ppe
from tests.frameworks.towers import WIDTH

# The mean and the standard deviation with which OpenAI's CLIP normalises a pixel in [0, 1].
NORMALISATION = dict(
    image_mean=(0.48145466, 0.4578275, 0.40821073), image_std=(0.26862954, 0.26130258, 0.27577711)
)

# Bounds on the relative Frobenius norm of the difference from the unchanged tower's output.
BOUNDS = {"float32": 1e-5, "int8": 1e-2}


def relative(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def primitives(jaxpr):
    """Yields the names of all primitives of a program and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


class TowerTests:
    """Tests of the fixture `tower`, a `towers.Tower`, which each framework's file defines."""

    @pytest.mark.parametrize("patch_dtype", BOUNDS)
    def test_a_tower_gives_what_it_gave(self, tower, patch_dtype):
        """The output is close to that of the unchanged tower, and it comes from the operator."""
        _, images = tower.images()
        wanted = jax.jit(tower.unchanged)(tower.parameters, images)
        changed = tower.changed(patch_dtype)
        found = jax.jit(changed)(tower.parameters, images)
        assert relative(found, wanted) <= BOUNDS[patch_dtype]
        used = set(primitives(jax.make_jaxpr(changed)(tower.parameters, images).jaxpr))
        assert "patch_embed" in used and "conv_general_dilated" not in used
        before = set(primitives(jax.make_jaxpr(tower.unchanged)(tower.parameters, images).jaxpr))
        assert "patch_embed" not in before and "conv_general_dilated" in before

    def test_a_tower_follows_its_parameters_without_compiling_again(self, tower):
        """A changed parameter has the same effect as in the unchanged tower."""
        _, images = tower.images()
        traces = []

        @jax.jit
        def changed(parameters, images):
            traces.append(images.shape)
            return tower.changed("int8")(parameters, images)

        first = changed(tower.parameters, images)
        for path in (tower.kernel, tower.bias, tower.positions):
            parameters = tower.with_one_drawn_anew(path)
            found = changed(parameters, images)
            assert relative(found, jax.jit(tower.unchanged)(parameters, images)) <= BOUNDS["int8"]
            assert relative(found, first) > 3 * BOUNDS["int8"], path
        assert len(traces) == 1

    @pytest.mark.parametrize("patch_dtype", BOUNDS)
    def test_a_tower_has_no_silent_gradients(self, tower, patch_dtype):
        """A gradient by parameters or images is refused; with stop_gradient it is zero."""
        _, images = tower.images()
        changed = tower.changed(patch_dtype)

        def loss(parameters, images):
            return jax.numpy.sum(changed(parameters, images) ** 2)

        for argument in (0, 1):
            with pytest.raises(TypeError, match="derivative"):
                jax.jit(jax.grad(loss, argument))(tower.parameters, images)

        def frozen(parameters, images):
            return jax.numpy.sum(jax.lax.stop_gradient(changed(parameters, images)) * images.mean())

        gradient = jax.jit(jax.grad(frozen))(tower.parameters, images)
        assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))

    def test_a_tower_takes_uint8_images_or_refuses_them(self, tower):
        """uint8 images give the result of the same pixels in [-1, 1], or are refused."""
        pixels, images = tower.images()
        changed = tower.changed("int8")
        if tower.takes_uint8:
            found, wanted = (jax.jit(changed)(tower.parameters, x) for x in (pixels, images))
            assert relative(found, wanted) <= 1e-6
        else:
            with pytest.raises(ValueError, match=r"in \[-1, 1\]"):
                changed(tower.parameters, pixels)


def check_normalisation(unchanged, changed, channels_first=False):
    """Checks that uint8 images give the unchanged convolution's result for normalised images.

    Args:
      unchanged: function of images that returns the convolution's result.
      changed: function of uint8 or normalised images that returns the result of the module with
        NORMALISATION and float32 patches.
      channels_first: whether the argument is one image [3, H, W] instead of images [B, H, W, 3].
    """
    pixels = np.random.default_rng(2).integers(0, 256, (2, 48, 32, 3), np.uint8)
    mean, std = (np.float32(x) for x in NORMALISATION.values())
    normalised = (pixels / np.float32(255) - mean) / std
    if channels_first:
        pixels, normalised = (np.moveaxis(x[0], -1, 0) for x in (pixels, normalised))
    wanted = unchanged(normalised)
    assert relative(changed(pixels), wanted) <= BOUNDS["float32"]
    assert relative(changed(normalised), wanted) <= BOUNDS["float32"]


def sharded_along_N(kernel, axis, axis_type):
    """Shards the kernel over eight devices, each with an eighth of the output channels."""
    mesh = jax.make_mesh((8,), ("N",), axis_types=(axis_type,))
    spec: list[str | None] = [None] * kernel.ndim
    spec[axis] = "N"
    return jax.device_put(kernel, jax.NamedSharding(mesh, jax.P(*spec)))


def check_sharding(call, kernel, axis, out_axis):
    """Checks that a kernel sharded along N gives a result sharded along N, without a gather.

    Args:
      call: function of the kernel that returns the module's result with WIDTH output channels.
      kernel: floating-point array with WIDTH elements along `axis`.
      axis: axis of the kernel that is N.
      out_axis: axis of the result that is N.
    """
    wanted = call(kernel)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        split = sharded_along_N(kernel, axis, axis_type)
        compiled = jax.jit(call).lower(split).compile()
        found = compiled(split)
        shard = found.addressable_shards[0].data.shape
        assert shard[out_axis] * 8 == found.shape[out_axis] == WIDTH
        assert "all-gather" not in compiled.as_text()
        assert relative(found, wanted) <= 1e-6


def check_rounding(embed, kernel, bias, images):
    """Checks that the argument `rounding` reaches `pack`, and that the default is "nearest".

    Args:
      embed: function of the keyword arguments of a module or a replacement; returns the embeddings
        of the images [B, h, w, N].
      kernel: [p, p, 3, N].
      bias: [N].
      images: [B, H, W, 3], floating-point in [-1, 1].
    """
    for arguments in ({}, dict(rounding="nearest"), dict(rounding="feedback")):
        rounding = arguments.get("rounding", "nearest")
        params = ppe.pack(kernel, bias, None, patch_size=len(kernel), rounding=rounding)
        wanted = np.asarray(ppe.embed_images(images, params, out_dtype="float32"))
        found = np.asarray(embed(**arguments))
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="rounding is 'up', expected 'feedback'"):
        embed(rounding="up")
