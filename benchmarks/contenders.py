"""The contenders: the operator's backends, and the alternatives that a user has (peers).

A contender computes embeddings [B, S, N] of patches or images. Peers that are not installed, or
cannot serve a case, are left out with the reason. Whole outputs are compared with float32.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_patch_embed as ppe
from benchmarks import cutlass
from pallas_patch_embed.backends import ranked
from pallas_patch_embed.base.chips import H200, Target, default_device
from pallas_patch_embed.base.problem import NamedShape, Shaped, padded
from pallas_patch_embed.commands.demo import draw_weights, photographs
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams

SOURCES = ("patches", "images")

# Patches, weight, product and sum are rounded to bfloat16, each with a relative error of at most
# 2^-9.
LARGEST_ERROR = 4 * 2.0**-9

# Number of images for which CUTLASS's table is repeated. With 196 patches per image all of its
# tiles are full, and the table, 19 MB, stays in the L2 cache.
CUTLASS_IMAGES = 64

# Number of images that are compared with float32 in one step.
COMPARED = 64

# XLA's options for references: they compile fast, and need not run fast.
UNTUNED = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class BenchmarkProblem:
    """A benchmark problem: images of a named shape, and the dtype of patches and weight.

    Attributes:
      shape: shape of the model.
      images: number of images.
      dtype: dtype of patches and weight.
      pixels: "random", or "photographs" for crops of the package's photographs.
    """

    shape: NamedShape
    images: int
    dtype: str
    pixels: str = "random"

    @property
    def operations(self) -> int:
        """Returns the operations of the product, excluding the padding of K."""
        return 2 * self.images * self.shape.S * self.shape.K * self.shape.N

    @property
    def written(self) -> int:
        """Returns the bytes of the bfloat16 result."""
        return 2 * self.images * self.shape.S * self.shape.N

    def bytes(self, source: str) -> int:
        """Returns the bytes that must be moved if every operand is read once and y written once."""
        shape, K = self.shape, padded(self.shape.K)
        itemsize = jnp.dtype(self.dtype).itemsize
        first = 3 * shape.image**2 if source == "images" else shape.S * K * itemsize
        table = 4 if self.dtype == "float32" else 2
        once = shape.N * K * itemsize + 4 * shape.N + table * shape.S * shape.N
        return self.images * first + once + self.written


@dataclasses.dataclass(frozen=True)
class Data:
    """The operands of a case, in every form that a contender accepts.

    Attributes:
      images: [B, H, W, 3] uint8.
      patches: [B, S, K_padded] of the case's dtype.
      params: the packed weights.
      kernel, table: [p, p, 3, N] and [S, N] float32, before packing.
      exact: the same weights packed in float32.
    """

    images: jax.Array
    patches: jax.Array
    params: PatchEmbedParams
    kernel: jax.Array
    table: jax.Array
    exact: PatchEmbedParams


def draw_images(shape: NamedShape, images: int, pixels: str) -> jax.Array:
    """Draws images [B, H, W, 3] uint8: random pixels, or random crops of the photographs."""
    side = shape.image
    if pixels == "random":
        return jax.random.bits(jax.random.key(0), (images, side, side, 3), jnp.uint8)
    _, whole = photographs(dataclasses.replace(shape, image=2 * side))
    rng = np.random.default_rng(0)
    corners = jnp.asarray(rng.integers(0, side, (images, 2)), jnp.int32)
    which = jnp.asarray(rng.integers(0, len(whole), images), jnp.int32)

    @jax.jit
    def cut(whole):
        def one(arguments):
            i, (top, left) = arguments
            return lax.dynamic_slice(whole, (i, top, left, 0), (1, side, side, 3))[0]

        return lax.map(one, (which, corners), batch_size=min(images, 64))

    return cut(jnp.asarray(whole))


def data_of(
    shape: NamedShape, images: jax.Array, params: PatchEmbedParams, drawn: dict[str, np.ndarray]
) -> Data:
    """Returns images and weights in every form; `params` was packed from `drawn`."""
    exact = ppe.pack(**drawn, patch_size=shape.patch, grid=shape.grid, dtype="float32")
    patches = jax.jit(ppe.patchify)(images, params)
    table = drawn["bias"] + drawn["position_embedding"]
    kernel, table = map(jnp.asarray, (drawn["kernel"], table))
    return Data(images, patches, params, kernel, table, jax.device_put(exact))


def draw(case: BenchmarkProblem) -> Data:
    """Draws random weights and the images of a case."""
    shape = case.shape
    drawn = draw_weights(np.random.default_rng(0), shape)
    packed = ppe.pack(**drawn, patch_size=shape.patch, grid=shape.grid, dtype=case.dtype)
    images = draw_images(shape, case.images, case.pixels)
    return data_of(shape, images, jax.device_put(packed), drawn)


# Functions that users would write without this package. `product` accumulates in float32 or int32
# and rounds to bfloat16.


def product(patches: jax.Array, weight: jax.Array, *, axis: int) -> jax.Array:
    """Computes only the product, in bfloat16 (int32 for int8, float32 for float32)."""
    out = {"int8": jnp.int32, "float32": jnp.float32}.get(patches.dtype.name, jnp.bfloat16)
    dimensions = (((2,), (axis,)), ((), ()))
    precision = "highest" if patches.dtype == jnp.float32 else None
    return lax.dot_general(
        patches, weight, dimensions, precision=precision, preferred_element_type=out
    )


def product_and_positions(patches, weight, scale, table):
    """Computes the product, then applies scale (if there is one) and positions, in one jit."""
    sums = product(patches, weight, axis=1)
    if jnp.dtype(patches.dtype).itemsize == 1:
        sums = sums.astype(jnp.float32) * scale
    return (sums + table).astype(jnp.bfloat16)


def dequantised(patches, weight, scale, table):
    """Converts patches and weight to bfloat16, multiplies and adds positions, in one jit."""
    weight = weight.astype(jnp.bfloat16) * scale[:, None].astype(jnp.bfloat16)
    return product_and_positions(patches.astype(jnp.bfloat16), weight, None, table)


def normalised(images: jax.Array, dtype: str) -> tuple[jax.Array, str | None]:
    """Returns pixels in [-1, 1] as models compute them, and the precision of `dtype`'s products."""
    pixels = images.astype(jnp.float32) * (2 / 255) - 1
    return pixels.astype(dtype), "highest" if dtype == "float32" else None


def convolution(
    images: jax.Array, kernel: jax.Array, table: jax.Array, dtype: str = "bfloat16"
) -> jax.Array:
    """Normalises pixels, convolves without overlap and adds positions, as models do."""
    pixels, precision = normalised(images, dtype)
    y = lax.conv_general_dilated(
        pixels,
        kernel.astype(dtype),
        window_strides=kernel.shape[:2],
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )
    return y.reshape(len(images), -1, kernel.shape[-1]) + table.astype(dtype)


def cut_and_product(
    images: jax.Array, kernel: jax.Array, table: jax.Array, dtype: str = "bfloat16"
) -> jax.Array:
    """Computes the convolution as a reshape, a transposition and jnp.dot."""
    p, _, channels, N = kernel.shape
    B, H, W, _ = images.shape
    h, w = H // p, W // p
    pixels, precision = normalised(images, dtype)
    rows = pixels[:, : h * p, : w * p].reshape(B, h, p, w, p, channels).swapaxes(2, 3)
    rows = rows.reshape(B, h * w, p * p * channels)
    product = jnp.dot(rows, kernel.reshape(-1, N).astype(dtype), precision=precision)
    return product + table.astype(dtype)


def patchified(images: jax.Array, params: PatchEmbedParams, *, backend: str) -> jax.Array:
    """Lets XLA make the patches for a backend that could cut images itself."""
    return ppe.patch_embed(ppe.patchify(images, params), params, backend=backend)


def cuts_images(
    backend: str, images: Shaped, params: PatchEmbedParams, cut: str | None = None
) -> bool:
    """Returns whether a backend that is chosen by name cuts these images itself."""
    asked = ppe.explain(images, params, cut=cut)
    options = ranked(asked.problem, asked.target, backend=backend, cut=cut).options
    return bool(options) and options[0].cuts_images


# Peers from other libraries, which may be missing.


@dataclasses.dataclass(frozen=True)
class TorchResult:
    """A tensor of torch that JAX can wait for."""

    tensor: Any

    def block_until_ready(self):
        importlib.import_module("torch").cuda.synchronize()

    def __jax_array__(self):
        self.block_until_ready()
        return jnp.from_dlpack(self.tensor)


def torch_operands(data: Data) -> tuple[Any, ...]:
    """Returns the operands as torch tensors in the same memory, and a scale of 1 for every row.

    Raises:
      ImportError: torch is not installed.
      NotImplementedError: torch has no GPU.
    """
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise NotImplementedError("torch has no CUDA device.")

    def tensor(x: jax.Array):
        if x.dtype == jnp.float8_e4m3fn:
            bits = torch.from_dlpack(lax.bitcast_convert_type(x, jnp.uint8))
            return bits.view(torch.float8_e4m3fn)
        return torch.from_dlpack(x)

    patches, weight, scale, table = map(tensor, operands(data))
    ones = torch.ones(patches.shape[0] * patches.shape[1], 1, device=patches.device)
    return patches, weight.t(), scale.view(1, -1), table, ones


def torch_operator(patches, weight, scale, table, ones) -> TorchResult:
    """Runs torch's scaled product and adds the positions in place."""
    torch = importlib.import_module("torch")
    B, S, K = patches.shape
    rows = patches.view(B * S, K)
    if patches.dtype == torch.float8_e4m3fn:
        y = torch._scaled_mm(
            rows, weight, ones, scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    elif patches.dtype == torch.int8:
        y = (torch._int_mm(rows, weight) * scale).to(torch.bfloat16)
    else:
        y = torch.mm(rows, weight)
    return TorchResult(y.view(B, S, -1).add_(table))


def pallas_matmul(patches, weight, table):
    """Runs the matmul that jax ships for this GPU in Pallas, and adds the positions, in one jit."""
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, hopper_matmul_mgpu

    chip = Target.of(default_device()).chip
    rows = patches.reshape(-1, patches.shape[-1])
    if patches.dtype != jnp.bfloat16 or chip is None or chip.capability[0] not in (9, 10):
        raise NotImplementedError("jax's matmuls serve only bfloat16 on Hopper and Blackwell.")
    if rows.shape[0] % 256 or weight.shape[1] % 128:
        raise NotImplementedError("jax's matmuls need whole tiles of 256 x 128.")
    if chip.capability[0] == 9:
        config = hopper_matmul_mgpu.TuningConfig(128, 128, 64, 4, grid_tile_width=8)
        y = hopper_matmul_mgpu.matmul(rows, weight, None, config)
    else:
        config = blackwell_matmul_mgpu.TuningConfig(128, 128, 64, 4, collective=True)
        y = blackwell_matmul_mgpu.matmul_kernel(rows, weight, config)
    return y.reshape(*patches.shape[:-1], -1) + table


def cutlass_operands(data: Data, *, built: bool) -> tuple[jax.Array, ...]:
    """Returns the operands for CUTLASS, with the table repeated so that tiles are full.

    Raises:
      NotImplementedError: CUTLASS is not installed, or `built` is false; the message says which.
      RuntimeError: the kernels cannot be built.
    """
    if data.params.dtype not in cutlass.DTYPES:
        raise NotImplementedError(f"it has no kernels for {data.params.dtype}.")
    if not built:
        raise NotImplementedError("its kernels take a minute to build.")
    target = Target.of(default_device())
    if target.chip is None or target.chip.capability != H200.capability:
        raise NotImplementedError(f"its kernels are for Hopper GPUs; this is {target}.")
    if reason := cutlass.missing():
        raise NotImplementedError(reason)
    cutlass.register()
    patches, weight, scale, table = operands(data)
    images = math.gcd(len(patches), CUTLASS_IMAGES)
    return patches, weight, scale, jnp.broadcast_to(table, (images, *table.shape)).copy()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender, and whether it is one of the operator's backends."""

    contender: Contender
    ours: bool


def operands(data: Data) -> tuple[jax.Array, ...]:
    """Returns patches, weight, scale and table."""
    params = data.params
    return data.patches, params.weight, params.scale, params.table


def _peers(
    case: BenchmarkProblem, *, built: bool
) -> dict[str, tuple[str, Callable, Callable, str]]:
    """Maps each peer's name to (source, function, its operands from Data, reference).

    The reference names what the output is compared with: the "embedding" with the packed weights,
    the embedding with the "unpacked" weights, or only the "product".
    """
    jit = jax.jit

    def with_columns(data):
        return data.patches, jnp.asarray(data.params.weight.T)

    def unpacked(data):
        return data.images, data.kernel, data.table

    # The dtype in which models compute. A quantised operator replaces a model's bfloat16.
    computed = dict(dtype="float32" if case.dtype == "float32" else "bfloat16")

    peers: dict[str, tuple[str, Any, Callable, str]] = {
        "jnp.dot bare, [N, K]": (
            "patches",
            jit(functools.partial(product, axis=1)),
            lambda data: operands(data)[:2],
            "product",
        ),
        "jnp.dot bare, [K, N]": (
            "patches",
            jit(functools.partial(product, axis=0)),
            with_columns,
            "product",
        ),
        "jnp.dot + positions": ("patches", jit(product_and_positions), operands, "embedding"),
        "jax's matmul, not tuned, + positions": (
            "patches",
            jit(pallas_matmul),
            lambda data: (*with_columns(data), data.params.table),
            "embedding",
        ),
        "torch, eager, + positions": ("patches", torch_operator, torch_operands, "embedding"),
        "convolution + positions": (
            "images",
            jit(functools.partial(convolution, **computed)),
            unpacked,
            "unpacked",
        ),
        "patchify + jnp.dot + positions": (
            "images",
            jit(functools.partial(cut_and_product, **computed)),
            unpacked,
            "unpacked",
        ),
    }
    for schedule in cutlass.SCHEDULES:
        fused = jit(functools.partial(cutlass.fused, schedule=schedule))
        take = functools.partial(cutlass_operands, built=built)
        peers[f"CUTLASS, fused, {schedule}"] = ("patches", fused, take, "embedding")
    if jnp.dtype(case.dtype).itemsize == 1:
        name = "dequantise + jnp.dot + positions"
        peers[name] = ("patches", jit(dequantised), operands, "embedding")
    return peers


def entries(
    case: BenchmarkProblem,
    data: Data,
    sources: tuple[str, ...] = SOURCES,
    *,
    built: bool = True,
    chosen: Collection[str] = (),
) -> tuple[dict[tuple[str, str], Entry], dict[str, str]]:
    """Checks the outputs of all contenders, and returns the contenders by source and name.

    Args:
      case: the problem.
      data: its operands.
      sources: "patches", "images" or both.
      built: whether to build the contenders that nvcc compiles.
      chosen: names of the contenders; none for all.

    Returns:
      Entries by (source, name); and for each contender that is left out, name -> reason.

    Raises:
      RuntimeError: an output of the operator is wrong.
    """
    found, left_out, candidates = {}, {}, {}
    functions = {"patches": ppe.patch_embed, "images": ppe.embed_images}
    for row in ppe.explain(data.patches, data.params):
        if not row.serves:
            left_out[row.backend] = row.reason
            continue
        for source in sources:
            ways: dict[str, Callable] = {row.backend: functions[source]}
            if source == "images" and cuts_images(row.backend, data.images, data.params):
                ways[f"patchify + {row.backend}"] = patchified
            elif source == "images" and cuts_images(
                row.backend, data.images, data.params, "kernel"
            ):
                cut = functools.partial(ppe.embed_images, cut="kernel")
                ways[f"{row.backend}, cut by the kernel"] = cut
            for name, way in ways.items():
                if chosen and name not in chosen:
                    continue
                embed = jax.jit(functools.partial(way, backend=row.backend))
                contender = Contender(embed, (getattr(data, source), data.params))
                candidates[source, name] = Entry(contender, True), "embedding"
    for name, (source, function, take, reference) in _peers(case, built=built).items():
        if source in sources and (not chosen or name in chosen):
            try:
                candidates[source, name] = Entry(Contender(function, take(data)), False), reference
            except (NotImplementedError, ImportError, RuntimeError) as reason:
                left_out[name] = str(reason).splitlines()[0]
    named = {name for _, name in candidates} | left_out.keys()
    left_out |= {
        name: "no contender of these sources has this name." for name in chosen if name not in named
    }
    timing.compile_all([entry.contender for entry, _ in candidates.values()])
    for (source, name), (entry, reference) in candidates.items():
        try:
            off = error(entry.contender(), data, reference)
            timing.check(entry.contender)
        except (NotImplementedError, ImportError, ValueError, RuntimeError) as reason:
            if entry.ours:
                raise
            left_out[name] = str(reason).splitlines()[0]
            continue
        if off <= LARGEST_ERROR:
            found[source, name] = entry
        elif entry.ours:
            raise RuntimeError(
                f"{name} on {case}: relative error {off:.4f}, expected at most {LARGEST_ERROR:.4f}."
            )
        else:
            left_out[name] = f"its result is wrong: relative error {off:.4f}."
    return found, left_out


def squares(y, patches, images, params, exact, *, reference: str):
    """Returns, for every image, the sums of squares of the errors and of the reference."""
    if reference == "unpacked":
        right = ppe.embed_images(images, exact, backend="xla", out_dtype=jnp.float32)
    else:
        numbers = [x.astype(jnp.float32) for x in (patches, params.weight)]
        right = jnp.matmul(numbers[0], numbers[1].T, precision="highest")
        if reference == "embedding":
            right = right * params.scale + params.table.astype(jnp.float32)
    return [jnp.square(x).sum((-2, -1)) for x in (y.astype(jnp.float32) - right, right)]


_squares = jax.jit(squares, static_argnames="reference", compiler_options=UNTUNED)


def error(y: Any, data: Data, reference: str) -> float:
    """Returns the relative Frobenius error of the worst image, compared with float32.

    A single embedding of zeros in an image of 4096 patches gives an error of about 1/64, twice the
    largest accepted one. `reference` is as in `_peers`.
    """
    y, parts = jnp.asarray(y), []
    for i in range(0, len(y), COMPARED):
        pieces = (x[i : i + COMPARED] for x in (y, data.patches, data.images))
        parts.append(_squares(*pieces, data.params, data.exact, reference=reference))
    wrong, all_of_it = np.concatenate([np.asarray(part, np.float64) for part in parts], axis=-1)
    return float(np.sqrt((wrong / all_of_it).max()))
