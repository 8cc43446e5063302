"""Arrays of other libraries are viewed through DLPack and numpy's protocols, or refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.base.array_arguments import as_array
from pallas_patch_embed.siglip2 import batch_naflex, load_encoder
from tests.encoder.goldens import checkpoint
from tests.operator.bounds import assert_bit_equal, draw_images

RNG = np.random.default_rng(0)
KERNEL, BIAS = np.float32(RNG.normal(size=(16, 16, 3, 32))), np.float32(RNG.normal(size=32))
POSITIONS, TOKEN = np.float32(RNG.normal(size=(196, 32))), np.float32(RNG.normal(size=(1, 32)))
LEVELS = draw_images(RNG, 2, 224, 224, 3)
PIXELS = np.float32(LEVELS / 127.5 - 1)
PARAMS = ppe.pack(KERNEL, BIAS, POSITIONS, patch_size=16, dtype="float32")
PATCHES = np.asarray(ppe.patchify(LEVELS, PARAMS))
PICTURE = LEVELS[0, :96, :64]


class Tensor:
    """A tensor of a library that is neither numpy nor JAX, which exports its memory by DLPack.

    Its dtype is not one of numpy's, as in PyTorch.
    """

    def __init__(self, array):
        self._array, self.shape, self.ndim = array, array.shape, array.ndim
        self.dtype = f"library.{array.dtype.name}"

    def __dlpack__(self, *, copy=None, **arguments):
        array = self._array.copy() if copy else self._array
        if array.dtype == ml_dtypes.bfloat16:
            array = jnp.asarray(array)
            arguments = {}
        return array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return (1, 0)


class WithGradient(Tensor):
    def __dlpack__(self, **_):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class OnAnotherDevice(Tensor):
    def __dlpack__(self, **_):
        raise RuntimeError("Unknown device type meta for Dlpack")


class Legacy:
    """An array with numpy's protocol alone."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype=dtype, copy=copy)


@pytest.fixture(scope="module")
def encoders():
    names = "hf_siglip_p16_224", "hf_siglip2_naflex_p16"
    return [load_encoder(checkpoint(name), dtype="float32") for name in names]


def pack(**given):
    arguments = dict(kernel=KERNEL, bias=BIAS, position_embedding=POSITIONS) | given
    return ppe.pack(**arguments, patch_size=16, dtype="float32")


PLACES = {
    "patchify": (lambda x: ppe.patchify(x, PARAMS), PIXELS),
    "patchify of levels": (lambda x: ppe.patchify(x, PARAMS), LEVELS),
    "encode_patches": (lambda x: ppe.encode_patches(x, PARAMS), PIXELS.reshape(2, 196, 768)),
    "patch_embed": (lambda x: ppe.patch_embed(x, PARAMS), PATCHES),
    "positions of patches": (
        lambda x: ppe.patch_embed(PATCHES, PARAMS, position_embedding=x),
        POSITIONS,
    ),
    "embed_images": (lambda x: ppe.embed_images(x, PARAMS), PIXELS),
    "positions of images": (
        lambda x: ppe.embed_images(LEVELS, PARAMS, position_embedding=x),
        POSITIONS,
    ),
    "explain": (lambda x: np.int32([len(ppe.explain(x, PARAMS))]), LEVELS),
    "kernel": (lambda x: pack(kernel=x), KERNEL),
    "bias": (lambda x: pack(bias=x), BIAS),
    "positions": (lambda x: pack(position_embedding=x), POSITIONS),
    "prefix": (lambda x: pack(prefix=x), TOKEN),
    "resize_positions": (lambda x: ppe.resize_positions(x, (7, 9)), POSITIONS),
}
OF_ENCODERS = {
    "encoder": (lambda fixed, naflex, batch, x: fixed(x), PIXELS[:1]),
    "NaFlex patches": (
        lambda fixed, naflex, batch, x: naflex(x, spatial_shapes=batch[1], mask=batch[2]),
        0,
    ),
    "NaFlex shapes": (
        lambda fixed, naflex, batch, x: naflex(batch[0], spatial_shapes=x, mask=batch[2]),
        1,
    ),
    "NaFlex mask": (
        lambda fixed, naflex, batch, x: naflex(batch[0], spatial_shapes=batch[1], mask=x),
        2,
    ),
    "batch_naflex": (
        lambda fixed, naflex, batch, x: batch_naflex([x], naflex.config, 24),
        PICTURE,
    ),
}


def place(name, encoders):
    """Returns the function that takes the array, and the array."""
    if name in PLACES:
        return PLACES[name]
    call, array = OF_ENCODERS[name]
    batch = batch_naflex([PICTURE], encoders[1].config, 24)
    if isinstance(array, int):
        array = batch[array]
    return lambda x: call(*encoders, batch=batch, x=x), array


ALL = [*PLACES, *OF_ENCODERS]


@pytest.mark.parametrize("wrap", [Tensor, Legacy])
@pytest.mark.parametrize("name", ALL)
def test_what_numpy_or_DLPack_can_view_is_accepted(name, wrap, encoders):
    call, array = place(name, encoders)
    jax.tree.map(assert_bit_equal, call(wrap(array)), call(array))


@pytest.mark.parametrize("wrap", [WithGradient, OnAnotherDevice])
@pytest.mark.parametrize("name", ALL)
def test_what_cannot_be_viewed_is_refused_by_its_name(name, wrap, encoders):
    call, array = place(name, encoders)
    with pytest.raises(TypeError, match=rf"\.{wrap.__name__}, which neither JAX nor numpy can"):
        call(wrap(array))


@pytest.mark.parametrize("name", [name for name in ALL if name != "explain"])
def test_what_is_no_array_is_refused(name, encoders):
    call, array = place(name, encoders)
    for value in (array.tolist(), "array", object(), np.ndarray):
        with pytest.raises(TypeError, match="expected a JAX or numpy array"):
            call(value)


@pytest.mark.parametrize("name", ["kernel", "positions", "embed_images", "encode_patches"])
def test_bfloat16_of_another_library_is_accepted(name, encoders):
    call, array = place(name, encoders)
    array = array.astype(ml_dtypes.bfloat16)
    for given in (array, array[..., ::-1][..., ::-1]):
        jax.tree.map(assert_bit_equal, call(Tensor(given)), call(array))


def test_the_message_names_the_argument_the_kind_and_what_to_do():
    with pytest.raises(TypeError) as raised:
        pack(kernel=WithGradient(KERNEL))
    text = str(raised.value)
    for part in ("pack: kernel is", "WithGradient", "require gradient", "tensor.detach().cpu()"):
        assert part in text


def test_masked_elements_are_not_read():
    with pytest.raises(TypeError, match=r"pack: bias is a masked array.*method filled"):
        pack(bias=np.ma.masked_array(BIAS, BIAS > 0))


def test_an_array_that_JAX_does_not_have_is_refused():
    for name in ("bias", "positions", "resize_positions", "positions of images"):
        call, array = PLACES[name]
        with pytest.raises(TypeError, match=rf"dtype is {np.dtype(np.longdouble).name}"):
            call(array.astype(np.longdouble))


def test_an_array_may_be_changed_after_the_call():
    positions = np.zeros((300, 300, 64), np.float32)
    resized = ppe.resize_positions(Tensor(positions), (32, 32))
    positions[:] = 9
    assert not np.asarray(resized).any()


def test_explain_accepts_descriptions_of_arrays():
    levels = jax.ShapeDtypeStruct(LEVELS.shape, "uint8")
    for given in (levels, jax.typeof(jnp.asarray(LEVELS))):
        assert ppe.explain(given, PARAMS).problem == ppe.explain(LEVELS, PARAMS).problem
    positions = jax.typeof(jnp.asarray(POSITIONS))
    assert ppe.explain(levels, PARAMS, position_embedding=positions).problem.has_table
    with pytest.raises(TypeError) as raised:
        ppe.explain(LEVELS.tolist(), PARAMS)
    assert len(str(raised.value)) < 500


def test_batch_naflex_says_what_it_takes(encoders):
    for images in (PICTURE, np.float32(3), None, 7):
        with pytest.raises(TypeError, match=r"expected several arrays \[H, W, 3\]"):
            batch_naflex(images, encoders[1].config, 24)


def test_traced_and_framework_values_pass_through():
    traced = []
    jax.jit(lambda x: traced.append(as_array(x, "x") is x))(BIAS)

    class Parameter:
        def __jax_array__(self):
            return jnp.asarray(BIAS)

    assert traced == [True]
    assert_bit_equal(pack(bias=Parameter()).offset, pack().offset)


def test_real_tensors_of_torch():
    torch = pytest.importorskip("torch")
    for name, (call, array) in PLACES.items():
        tensor = torch.from_numpy(array.copy())
        jax.tree.map(assert_bit_equal, call(tensor), call(array))
        strided = torch.stack([tensor, tensor], -1)[..., 0]
        jax.tree.map(assert_bit_equal, call(strided), call(array))
        if name in ("kernel", "positions"):
            negative = torch.complex(tensor, tensor).conj().imag
            jax.tree.map(assert_bit_equal, call(negative), call(-array))
        if name in ("kernel", "positions", "embed_images"):
            for half in (tensor.bfloat16(), strided.bfloat16()):
                wanted = call(array.astype(ml_dtypes.bfloat16))
                jax.tree.map(assert_bit_equal, call(half), wanted)
        refused = [tensor.to("meta")]
        if tensor.is_floating_point():
            refused.append(tensor.clone().requires_grad_())
        for given in refused:
            with pytest.raises(TypeError, match=r"torch\.Tensor, which neither"):
                call(given)
