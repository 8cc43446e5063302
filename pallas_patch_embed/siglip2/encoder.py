"""The vision encoder: patch embedding, transformer blocks, attention pooling."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed import primitive
from pallas_patch_embed.api import embed_images, patch_embed
from pallas_patch_embed.chips import cuda_is_installed
from pallas_patch_embed.params import PatchEmbedParams
from pallas_patch_embed.patches import check_range, encode, pad_rows
from pallas_patch_embed.problem import AnyArray, dtype_name, is_known
from pallas_patch_embed.siglip2.config import ACTIVATIONS, Config
from pallas_patch_embed.siglip2.naflex import resize_positions

# cuDNN's fused attention takes heads of up to this many channels on every GPU that it supports.
CUDNN_LARGEST_HEAD = 128


class EncoderOutput(NamedTuple):
    """The result of an encoder, in its dtype.

    Attributes:
      last_hidden_state: [B, S, D], after the last layer norm.
      pooler_output: [B, D], or None if the tower has no pooling head.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """A SigLIP or SigLIP2 vision encoder for inference, made by `load_encoder`. A pytree.

    Call it inside or outside of jit; pass it through jit as an argument. Its layers are scanned, so
    the compile time does not grow with the depth. Matrix products have operands and results in
    `dtype` and accumulate in float32, with Precision.HIGHEST if `dtype` is float32. Layer norms and
    softmax are computed in float32. Like `patch_embed`, it has no derivative by its input.

    Attributes:
      patch_embed: PatchEmbedParams; they include the positions, except in NaFlex encoders.
      positions: NaFlex: [h, w, D] float32, resized for each image; otherwise None.
      blocks: the transformer blocks' "norm1", "qkv", "out", "norm2", "fc1" and "fc2", with a
        leading axis of `config.depth`. A norm is {"scale", "bias"} in float32, the others are
        {"kernel" [in, out], "bias" [out]} in `dtype`.
      norm: the last layer norm.
      head: the attention pooling head: "query" [D], the projected probe, "kv", "out", "norm",
        "fc1", "fc2"; None if there is none.
      config: Config. Static, like the following.
      dtype: "bfloat16" or "float32".
    """

    patch_embed: PatchEmbedParams
    positions: jax.Array | None
    blocks: dict[str, Any]
    norm: dict[str, jax.Array]
    head: dict[str, Any] | None
    config: Config = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        images: AnyArray,
        *,
        spatial_shapes: AnyArray | None = None,
        mask: AnyArray | None = None,
        clip: bool = False,
    ) -> EncoderOutput:
        """Encodes images, or for a NaFlex encoder patches.

        Args:
          images: [B, H, W, 3], uint8 or floating-point in [-1, 1], of `config.image_size` or
            another size with the same grid of patches. NaFlex: patches [B, L, K] floating-point in
            [-1, 1], K in the order height, width, channel, as `batch_naflex` makes them; they are
            encoded into the dtype of `patch_embed`.
          spatial_shapes: NaFlex: [B, 2] integer, (height, width) of each image in patches, with
            height * width <= L, which is checked where values are known: not under jit.
          mask: NaFlex: [B, L], True or 1 for patches, False or 0 for padding, which no patch
            attends to; by default the first height * width are patches.
          clip: clips floating-point pixels to [-1, 1] instead of checking that they are in it,
            where values are known; see `patchify`.

        Returns:
          EncoderOutput. Where the mask is False, last_hidden_state has no defined value.

        Raises:
          TypeError, ValueError: an argument of another type, shape or value.
        """
        size = self.config.image_size
        if size is None:  # This is a NaFlex encoder.
            _check_naflex(self, images, spatial_shapes, mask)
            if not clip:
                images = check_range("encoder: patches", images, self.patch_embed.encoding)
            return _encode_patches(self, images, spatial_shapes, mask)
        if spatial_shapes is not None or mask is not None:
            raise TypeError(
                "encoder: spatial_shapes and mask are for NaFlex encoders; this one takes images "
                f"of {size[0]} x {size[1]} pixels only."
            )
        dtype_name(images, "encoder: images")
        if images.ndim != 4:
            raise ValueError(
                f"encoder: images have shape {list(images.shape)}, expected [B, H, W, 3]. Add or "
                "flatten leading axes."
            )
        if not clip:
            images = check_range("encoder: images", images, self.patch_embed.encoding)
        return _encode_images(self, images)

    def __repr__(self) -> str:
        size = sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self))
        return f"Encoder({self.dtype}, {size:,} parameters, {self.config}, {self.patch_embed!r})"


# jax.export serialises a program together with the pytrees of its arguments and results.
jax.export.register_namedtuple_serialization(
    EncoderOutput, serialized_name="pallas_patch_embed.siglip2.EncoderOutput"
)
jax.export.register_pytree_node_serialization(
    Encoder,
    serialized_name="pallas_patch_embed.siglip2.Encoder",
    serialize_auxdata=lambda static: json.dumps(
        [dataclasses.asdict(static[0]), static[1]]
    ).encode(),
    deserialize_auxdata=lambda data: _static_fields(*json.loads(data)),
)


def _static_fields(config: dict[str, Any], dtype: str) -> tuple[Config, str]:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    return Config(**fields), dtype


def _check_naflex(encoder: Encoder, patches: Any, spatial_shapes: Any, mask: Any) -> None:
    K = encoder.patch_embed.K
    if spatial_shapes is None:
        raise TypeError(
            "encoder: a NaFlex encoder takes patches with their spatial_shapes and mask. Make them "
            "with pallas_patch_embed.siglip2.batch_naflex(images, encoder.config, max_num_patches)."
        )
    for name, array in (("patches", patches), ("spatial_shapes", spatial_shapes), ("mask", mask)):
        if array is not None:
            dtype_name(array, f"encoder: {name}")
    if not jnp.issubdtype(patches.dtype, jnp.floating):
        raise TypeError(
            f"encoder: patches have dtype {patches.dtype}, expected floating-point pixels in "
            "[-1, 1], as batch_naflex makes them."
        )
    if patches.ndim != 3 or patches.shape[-1] != K:
        raise ValueError(
            f"encoder: patches have shape {list(patches.shape)}, expected [B, L, {K}], as "
            "batch_naflex makes them."
        )
    B, L, _ = patches.shape
    if not jnp.issubdtype(spatial_shapes.dtype, jnp.integer) or spatial_shapes.shape != (B, 2):
        raise ValueError(
            f"encoder: spatial_shapes are {spatial_shapes.dtype}{list(spatial_shapes.shape)}, "
            f"expected integers [{B}, 2]: height and width of each image in patches."
        )
    if mask is not None:
        integers = jnp.issubdtype(mask.dtype, jnp.integer) or mask.dtype == bool
        if not integers or mask.shape != (B, L):
            raise ValueError(
                f"encoder: mask is {mask.dtype}{list(mask.shape)}, expected booleans [{B}, {L}], "
                "True for patches and False for padding."
            )
    if is_known(spatial_shapes):
        sides = jax.device_get(spatial_shapes)
        wrong = ((sides < 1) | (sides > L)).any(1) | (sides.astype(np.float64).prod(1) > L)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"encoder: spatial_shapes of image {i} are {sides[i].tolist()}, expected a height "
                f"and width of at least 1 with at most {L} patches."
            )


@jax.jit
def _encode_images(encoder: Encoder, images: jax.Array) -> EncoderOutput:
    # The range of the pixels was checked before, where their values may be known.
    x = embed_images(images, encoder.patch_embed, out_dtype=encoder.dtype, clip=True)
    return transform(encoder, x)


@jax.jit
def _encode_patches(
    encoder: Encoder, patches: jax.Array, spatial_shapes: jax.Array, mask: jax.Array | None
) -> EncoderOutput:
    spatial_shapes = jnp.maximum(spatial_shapes.astype(jnp.int32), 1)
    if mask is None:
        token = lax.broadcasted_iota(jnp.int32, patches.shape[:2], 1)
        mask = token < spatial_shapes[:, :1] * spatial_shapes[:, 1:]
    mask = mask.astype(bool)
    params = encoder.patch_embed
    assert encoder.positions is not None  # NaFlex encoders have them.
    x = patch_embed(
        pad_rows(encode(patches, params.encoding)),
        params,
        position_embedding=resize_positions(encoder.positions, spatial_shapes, patches.shape[1]),
        out_dtype=encoder.dtype,
    )
    if params.dtype == "int8":
        # Rounding to integers would make the derivative a silent zero.
        x = primitive.without_gradient(patches, x)
    return transform(encoder, x, mask)


def transform(encoder: Encoder, x: jax.Array, mask: jax.Array | None = None) -> EncoderOutput:
    """The transformer on embedded patches [B, S, D]."""
    config = encoder.config
    precision = "highest" if encoder.dtype == "float32" else None

    def block(x: jax.Array, p: dict[str, Any]) -> tuple[jax.Array, None]:
        q, k, v = _dense_parts(_norm(x, p["norm1"], config), p["qkv"], 3)
        x = x + _dense(_attention(q, k, v, mask, config), p["out"])
        return x + _mlp(_norm(x, p["norm2"], config), p, config), None

    with jax.default_matmul_precision(precision):
        x, _ = lax.scan(block, x, encoder.blocks)
        x = _norm(x, encoder.norm, config)
        if (head := encoder.head) is None:
            return EncoderOutput(x, None)
        k, v = _dense_parts(x, head["kv"], 2)
        # The query is computed from k so that it has k's sharding along the batch.
        query = 0 * k[:, :1] + _row(head["query"], k)
        pooled = _dense(_attention(query, k, v, mask, config), head["out"])
        pooled = pooled + _mlp(_norm(pooled, head["norm"], config), head, config)
        return EncoderOutput(x, pooled[:, 0])


def _row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """The vector with as many axes as x: users may forbid implicit rank promotion."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def _norm(x: jax.Array, p: dict[str, jax.Array], config: Config) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + config.eps)
    return (y * _row(p["scale"], y) + _row(p["bias"], y)).astype(x.dtype)


def _dense(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    y = jnp.matmul(x, p["kernel"])
    return y + _row(p["bias"], y)


def _dense_parts(x: jax.Array, p: dict[str, Any], number: int) -> list[jax.Array]:
    """The equal parts of what a dense layer makes of x, from a product each.

    XLA would copy the parts of a single product, because attention takes contiguous arrays.
    """
    kernels, biases = (jnp.split(p[name], number, axis=-1) for name in ("kernel", "bias"))
    return [_dense(x, {"kernel": k, "bias": b}) for k, b in zip(kernels, biases)]


def _mlp(x: jax.Array, p: dict[str, Any], config: Config) -> jax.Array:
    return _dense(ACTIVATIONS[config.activation](_dense(x, p["fc1"])), p["fc2"])


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, config: Config
) -> jax.Array:
    """Attention of q [B, T, D] to k and v [B, S, D] where mask [B, S] is True."""
    B, T, D = q.shape
    H = D // config.heads
    q, k, v = (x.reshape(B, x.shape[1], config.heads, H) for x in (q, k, v))
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None, None, :], (B, 1, T, k.shape[1]))

    def attend(implementation: Literal["xla", "cudnn"]) -> Callable[..., jax.Array]:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
            # It adds float32 to bfloat16; users may forbid implicit dtype promotion.
            with jax.numpy_dtype_promotion("standard"):
                return jax.nn.dot_product_attention(
                    q, k, v, mask=mask, implementation=implementation
                )

        return attention

    # Tracing cuDNN's attention needs its library, which comes with JAX's CUDA backend.
    serves = q.dtype == jnp.bfloat16 and H % 8 == 0 and H <= CUDNN_LARGEST_HEAD and T > 1
    fused = {"cuda": attend("cudnn")} if serves and cuda_is_installed() else {}
    y = lax.platform_dependent(q, k, v, mask, **fused, default=attend("xla"))
    return y.reshape(B, T, D)
