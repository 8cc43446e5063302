"""The vision encoder, with patch embedding, transformer blocks and attention pooling."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.chips import cuda_is_installed
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.problem import is_known
from pallas_patch_embed.encoders.config import ACTIVATIONS, Config
from pallas_patch_embed.layers.norm import layer_norm
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.api import embed_images, patch_embed
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams
from pallas_patch_embed.patch_embedding.patches import check_range, encode, pad_rows
from pallas_patch_embed.patch_embedding.positions import resize_to_each

# Largest number of channels of a head for which cuDNN's fused attention runs on every GPU that it
# supports.
CUDNN_LARGEST_HEAD = 128


class EncoderOutput(NamedTuple):
    """The result of an encoder, in the encoder's dtype.

    Attributes:
      last_hidden_state: [B, S, D], the result of the last layer norm.
      pooler_output: [B, D], or None if the tower has no pooling head.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """A SigLIP or SigLIP2 vision encoder for inference, a pytree that `load_encoder` makes.

    It can be called inside or outside of jit; pass it to a jitted function as an argument. Its
    layers are scanned, so the compile time does not grow with the depth. Matrix products have
    operands and results in `dtype` and accumulate in float32, with Precision.HIGHEST if `dtype` is
    float32. Layer norms and softmax are computed in float32. Like `patch_embed`, the encoder cannot
    be differentiated with respect to its input.

    Attributes:
      patch_embed: PatchEmbedParams, which include the positions except in NaFlex encoders.
      positions: [h, w, D] float32 in NaFlex encoders, which resize it for each image; otherwise
        None.
      blocks: the transformer blocks' "norm1", "qkv", "out", "norm2", "fc1" and "fc2", with a
        leading axis of `config.depth`. Norms are {"scale", "bias"} in float32. The other layers are
        {"kernel" [in, out], "bias" [out]} in `dtype`.
      norm: the last layer norm.
      head: the attention pooling head: "query" [D], which is the projected probe, "kv", "out",
        "norm", "fc1" and "fc2"; None if the tower has no head.
      config: Config, a static field.
      dtype: "bfloat16" or "float32", a static field.
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
        """Encodes images; a NaFlex encoder encodes patches.

        Args:
          images: [B, H, W, C], uint8 or floating-point in [-1, 1], of `config.image_size` or
            another size with the same grid of patches. For a NaFlex encoder patches [B, L, K] from
            `batch_naflex`, floating-point in [-1, 1], with K in the order height, width, channel.
            The encoder converts them to the dtype of `patch_embed`.
          spatial_shapes: only for a NaFlex encoder: [B, 2] integer, (height, width) of each image
            in patches, with height * width <= L. Values are checked outside of jit.
          mask: only for a NaFlex encoder: [B, L], True or 1 for patches, False or 0 for padding, to
            which no patch attends. By default the first height * width are patches.
          clip: clips floating-point pixels to [-1, 1] instead of checking that they are in that
            range, as in `patchify`.

        Returns:
          EncoderOutput. Where the mask is False, last_hidden_state has no defined value.

        Raises:
          TypeError, ValueError: an argument has another type, shape or value.
        """
        size = self.config.image_size
        if size is None:  # This is a NaFlex encoder.
            if spatial_shapes is None:
                raise TypeError(
                    "encoder: spatial_shapes is None, but this NaFlex encoder needs patches with "
                    "their spatial_shapes and mask. Make them with "
                    "pallas_patch_embed.siglip2.batch_naflex(images, encoder.config, "
                    "max_num_patches)."
                )
            images = as_array(images, "encoder: patches")
            spatial_shapes = as_array(spatial_shapes, "encoder: spatial_shapes")
            mask = None if mask is None else as_array(mask, "encoder: mask")
            _check_naflex(self, images, spatial_shapes, mask)
            if not clip:
                images = check_range("encoder: patches", images, self.patch_embed.encoding)
            return _encode_patches(self, images, spatial_shapes, mask)
        if spatial_shapes is not None or mask is not None:
            raise TypeError(
                "encoder: spatial_shapes and mask are for NaFlex encoders, but this encoder "
                f"accepts only images of {size[0]} x {size[1]} pixels. Leave both out."
            )
        images = as_array(images, "encoder: images")
        if images.ndim != 4:
            raise ValueError(
                f"encoder: images have shape {list(images.shape)}, expected [B, H, W, "
                f"{self.config.channels}]. Add or flatten leading axes."
            )
        self._check_size(images)
        if not clip:
            images = check_range("encoder: images", images, self.patch_embed.encoding)
        return _encode_images(self, images)

    def _check_size(self, images: Any) -> None:
        """Refuses images whose grid of patches is not that of the positions."""
        H, W = images.shape[1:3]
        p, grid = self.config.patch, self.config.grid
        if (H // p, W // p) != grid and H >= p <= W:
            size = self.config.image_size
            assert size is not None  # This is no NaFlex encoder.
            raise ValueError(
                f"encoder: images have {H} x {W} pixels, but this encoder has positions for "
                f"{size[0]} x {size[1]} pixels, a {grid[0]} x {grid[1]} grid of patches of {p} "
                f"pixels. Resize the images, or load the encoder with load_encoder(..., "
                f"image_size=({H}, {W})), which resizes the positions."
            )

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
    if not jnp.issubdtype(patches.dtype, jnp.floating):
        raise TypeError(
            f"encoder: patches have dtype {patches.dtype}, expected floating-point pixels in "
            "[-1, 1]. Make patches with batch_naflex."
        )
    if patches.ndim != 3 or patches.shape[-1] != K:
        raise ValueError(
            f"encoder: patches have shape {list(patches.shape)}, expected [B, L, {K}]. Make "
            "patches with batch_naflex."
        )
    B, L, _ = patches.shape
    if not jnp.issubdtype(spatial_shapes.dtype, jnp.integer) or spatial_shapes.shape != (B, 2):
        raise ValueError(
            f"encoder: spatial_shapes are {spatial_shapes.dtype}{list(spatial_shapes.shape)}, "
            f"expected integers [{B}, 2], the height and width of each image in patches."
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
    # The range of the pixels was checked outside of this jit, where their values may be known.
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
    assert encoder.positions is not None  # NaFlex encoders have positions.
    x = patch_embed(
        pad_rows(encode(patches, params.encoding)),
        params,
        position_embedding=resize_to_each(encoder.positions, spatial_shapes, patches.shape[1]),
        out_dtype=encoder.dtype,
    )
    if TABLE[params.dtype].holds_levels:
        # Because of the rounding to integers the derivative would be zero, without an error.
        x = primitive.without_gradient(patches, x)
    return transform(encoder, x, mask)


def transform(encoder: Encoder, x: jax.Array, mask: jax.Array | None = None) -> EncoderOutput:
    """Applies the transformer to embedded patches [B, S, D]."""
    config = encoder.config
    precision = "highest" if encoder.dtype == "float32" else None

    def block(
        carry: tuple[jax.Array, jax.Array], p: dict[str, Any]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, layer = carry
        norm1, norm2 = (
            functools.partial(_norm, p=norms[name], config=config, layer=layer) for name in norms
        )
        q, k, v = _dense_parts(norm1(x), p["qkv"], 3)
        x = x + _dense(_attention(q, k, v, mask, config), p["out"])
        return (x + _mlp(norm2(x), p, config), layer + 1), None

    norms = {name: encoder.blocks[name] for name in ("norm1", "norm2")}
    dense = {name: p for name, p in encoder.blocks.items() if name not in norms}
    with jax.default_matmul_precision(precision):
        (x, _), _ = lax.scan(block, (x, jnp.int32(0)), dense)
        x = _norm(x, encoder.norm, config)
        if (head := encoder.head) is None:
            return EncoderOutput(x, None)
        k, v = _dense_parts(x, head["kv"], 2)
        # The query is computed from k, so that it has the same sharding along the batch.
        query = 0 * k[:, :1] + _row(head["query"], k)
        pooled = _dense(_attention(query, k, v, mask, config), head["out"])
        pooled = pooled + _mlp(_norm(pooled, head["norm"], config), head, config)
        return EncoderOutput(x, pooled[:, 0])


def _row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Gives the vector as many axes as x, because users may forbid implicit rank promotion."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def _norm(
    x: jax.Array, p: dict[str, jax.Array], config: Config, layer: jax.Array | None = None
) -> jax.Array:
    return layer_norm(x, p["scale"], p["bias"], eps=config.eps, layer=layer)


def _dense(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    y = jnp.matmul(x, p["kernel"])
    return y + _row(p["bias"], y)


def _dense_parts(x: jax.Array, p: dict[str, Any], number: int) -> list[jax.Array]:
    """Computes the equal parts of a dense layer's result with one product each.

    XLA would copy the parts of a single product, because attention needs contiguous arrays.
    """
    kernels, biases = (jnp.split(p[name], number, axis=-1) for name in ("kernel", "bias"))
    return [_dense(x, {"kernel": k, "bias": b}) for k, b in zip(kernels, biases)]


def _mlp(x: jax.Array, p: dict[str, Any], config: Config) -> jax.Array:
    return _dense(ACTIVATIONS[config.activation](_dense(x, p["fc1"])), p["fc2"])


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, config: Config
) -> jax.Array:
    """Computes the attention of q [B, T, D] to k and v [B, S, D] where mask [B, S] is True."""
    B, T, D = q.shape
    H = D // config.heads
    q, k, v = (x.reshape(B, x.shape[1], config.heads, H) for x in (q, k, v))
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None, None, :], (B, 1, T, k.shape[1]))

    def attend(implementation: Literal["xla", "cudnn"]) -> Callable[..., jax.Array]:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
            # dot_product_attention adds float32 to bfloat16, and users may forbid implicit dtype
            # promotion.
            with jax.numpy_dtype_promotion("standard"):
                return jax.nn.dot_product_attention(
                    q, k, v, mask=mask, implementation=implementation
                )

        return attention

    # Tracing cuDNN's attention needs cuDNN, which is installed with JAX's CUDA backend.
    serves = q.dtype == jnp.bfloat16 and H % 8 == 0 and H <= CUDNN_LARGEST_HEAD and T > 1
    fused = {"cuda": attend("cudnn")} if serves and cuda_is_installed() else {}
    y = lax.platform_dependent(q, k, v, mask, **fused, default=attend("xla"))
    return y.reshape(B, T, D)
