"""The vision encoder, with patch embedding, transformer blocks and attention pooling."""

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed.backends import LayerProgram
from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import EIGHT_BITS, TABLE
from pallas_patch_embed.base.gradients import not_differentiated
from pallas_patch_embed.base.levels import refuse_gradient, to_levels
from pallas_patch_embed.base.problem import is_known
from pallas_patch_embed.encoders.config import Config, TextConfig
from pallas_patch_embed.encoders.layouts import number_of_parameters
from pallas_patch_embed.encoders.naflex import PackedImages
from pallas_patch_embed.encoders.program import Program
from pallas_patch_embed.layers.attention import (
    Segments,
    attention,
    prefix_mask,
    program_for,
)
from pallas_patch_embed.layers.dense import dense, in_steps
from pallas_patch_embed.layers.norm import layer_norm, layer_norm_levels, quantised
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams, check_params
from pallas_patch_embed.patch_embedding.patches import check_range, encode, pad_rows
from pallas_patch_embed.patch_embedding.positions import positions_of, resize_to_each
from pallas_patch_embed.patch_embedding.request import Request

if TYPE_CHECKING:
    from pallas_patch_embed.encoders.text_encoder import TextEncoder

# The dense layers of a block.
LAYERS = ("qkv", "out", "fc1", "fc2")

# Function (layer, x, the block's "observed") that sees the input x of each dense layer of a block.
# It returns the input that the layer gets, and a pytree that is stacked over the blocks.
type Observe = Callable[[str, jax.Array, Any], tuple[jax.Array, Any]]


class EncoderOutput(NamedTuple):
    """The result of an encoder, in the encoder's dtype.

    Attributes:
      last_hidden_state: [B, S, D], the result of the last layer norm. The first rows are class and
        register tokens, `config.prefix` of them. For a CLIP, and a tower without its last blocks,
        the last norm is not applied.
      pooler_output: [B, D], as transformers pools the tokens; None if the tower has no pooling.
      image_embeds: [B, P], the projection of pooler_output into the space that a CLIP's texts and
        images share; None if the checkpoint has no projection.
      hidden_states: the [B, S, D] that `layers` asked for, in that order.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None
    image_embeds: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """A vision encoder for inference, a pytree that `load_encoder` makes.

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
        {"weight" [out, in] in bfloat16 or 8 bits, "scale" [out] and "bias" [out] in float32}, with
        another leading axis for the parts of qkv and of a gated fc1, of which the gate's is the
        first; the width of the hidden layer is a multiple of 128. In bfloat16 scales are 1. An
        encoder in 8 bits has a tuple of such dicts, for runs of blocks with the same layers in 8
        bits. There fc2 also has "factor" [in] and "shift" [1], of the levels that it gets. In
        float32 these layers are {"kernel" [in, out], "bias" [out]}.
      norm: the last layer norm, or None.
      head: the attention pooling head: "query" [D], which is the projected probe, "kv", "out",
        "norm", "fc1" and "fc2"; the dense layer of `config.pooling` "dense"; or None.
      first_norm: the layer norm in front of the blocks, or None.
      projection: {"kernel" [D, P]}, or None.
      config: Config, which is static.
      dtype: "bfloat16" or "float32", which is static: the dtype of results and of all layers that
        are not in 8 bits.
    """

    patch_embed: PatchEmbedParams
    positions: jax.Array | None
    blocks: dict[str, Any] | tuple[dict[str, Any], ...]
    norm: dict[str, jax.Array] | None
    head: dict[str, Any] | None
    config: Config
    dtype: str
    first_norm: dict[str, jax.Array] | None = None
    projection: dict[str, jax.Array] | None = None

    def __call__(
        self,
        images: AnyArray,
        *,
        spatial_shapes: AnyArray | None = None,
        mask: AnyArray | None = None,
        clip: bool = False,
        layers: int | Sequence[int] = (),
    ) -> EncoderOutput:
        """Encodes images; a NaFlex encoder encodes patches.

        Args:
          images: [B, H, W, C], uint8, or floating-point pixels u in [0, 1] as
            (u - config.image_mean) / config.image_std (for SigLIP in [-1, 1]); of
            `config.image_size` or another size with the same grid of patches. For a NaFlex encoder
            patches [B, L, K] from `batch_naflex`, floating-point in [-1, 1], with K in the order
            height, width, channel. The encoder converts them to the dtype of `patch_embed`.
          spatial_shapes: only for a NaFlex encoder: [B, 2] integer, (height, width) of each image
            in patches, with height * width <= L. Values are checked outside of jit.
          mask: only for a NaFlex encoder: [B, L], True or 1 for patches, False or 0 for padding, to
            which no patch attends. By default the first height * width are patches. The
            kernel for attention needs this default: it leaves out padding at the end, and takes no
            mask.
          clip: clips floating-point pixels to [-1, 1] instead of checking that they are in that
            range, as in `patchify`.
          layers: hidden states to return, one number or several, as transformers numbers them: 0 is
            what the first block gets, i what block i gives, and negative numbers count from the
            end: -1 is what the last block gives, -2 the block before it. No last norm is applied.

        Returns:
          EncoderOutput. Where the mask is False, last_hidden_state has no defined value.

        Raises:
          TypeError, ValueError: an argument has another type, shape or value.
        """
        only_images = (
            spatial_shapes is None and mask is None and isinstance(layers, tuple) and not layers
        )
        if only_images and isinstance(images, jax.Array) and self._accepts(images):
            return self._encoded(images, ())
        check_params(self.patch_embed)
        kept = check_layers(layers, self.config.depth)
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
            if _is_prefix(mask, spatial_shapes):
                mask = None
            if not clip:
                images = check_range("encoder: patches", images, self.patch_embed.encoding)
            rows = math.prod(images.shape[:2])
            return _encode_patches(self, images, spatial_shapes, mask, kept=kept, rows=rows)
        if spatial_shapes is not None or mask is not None:
            raise TypeError(
                "encoder: spatial_shapes and mask are for NaFlex encoders, but this encoder "
                f"accepts only images of {size[0]} x {size[1]} pixels. Leave both out."
            )
        images = self.checked(images)
        if not clip:
            images = check_range("encoder: images", images, self.patch_embed.encoding)
        if isinstance(images, jax.Array) and is_known(images) and images.dtype == jnp.uint8:
            self._accepted.add((images.shape, images.dtype))
        return self._encoded(images, kept)

    @functools.cached_property
    def _accepted(self) -> set[tuple[Any, Any]]:
        """Shapes and dtypes of JAX arrays that were checked, whose values need no check.

        In a thread that has waited for a result all checks took 0.18 ms.
        """
        return set()

    def _accepts(self, images: jax.Array) -> bool:
        return (images.shape, images.dtype) in self._accepted

    def _encoded(self, images: AnyArray, kept: tuple[int, ...]) -> EncoderOutput:
        rows = images.shape[0] * (self.config.prefix + math.prod(self.config.grid))
        return _encode_images(self, images, kept=kept, rows=rows)

    def checked(self, images: AnyArray) -> jax.Array:
        """Returns images for an encoder that is not NaFlex, after a check of dtype and shape."""
        images = as_array(images, "encoder: images")
        if images.ndim != 4:
            raise ValueError(
                f"encoder: images have shape {list(images.shape)}, expected [B, H, W, "
                f"{self.config.channels}]. Add or flatten leading axes."
            )
        self._check_size(images)
        request = Request(images, self.patch_embed, from_images=True, out_dtype=self.dtype)
        return request.checked().source

    def packed(
        self, images: PackedImages, *, clip: bool = False, layers: int | Sequence[int] = ()
    ) -> EncoderOutput:
        """Encodes the patches of several pictures that lie behind one another in rows.

        A NaFlex encoder computes as it does for padded pictures, but with little padding. The
        result of a picture does not depend on its neighbours.

        Args:
          images: from `siglip2.pack_naflex`.
          clip, layers: as in a call of the encoder.

        Returns:
          EncoderOutput: last_hidden_state and hidden_states [R, T, D] in rows, which
          `images.unpack` splits; pooler_output [N, D] in the order of the pictures.

        Raises:
          TypeError, ValueError: an argument has another type, shape or value.
        """
        check_params(self.patch_embed)
        kept = check_layers(layers, self.config.depth)
        if not self.config.naflex:
            raise TypeError(
                "encoder.packed: this encoder accepts only images of one size, expected a NaFlex "
                "encoder. Call it with a batch of images."
            )
        images.check(self.patch_embed.K)
        patches = images.patches
        if not clip:
            patches = check_range("encoder: patches", patches, self.patch_embed.encoding)
        images, rows = dataclasses.replace(images, patches=patches), math.prod(patches.shape[:2])
        return _encode_packed(self, images, kept=kept, rows=rows)

    def layer_programs(self, B: int, S: int, target: Target) -> tuple[LayerProgram, ...]:
        """Says how the layers are computed, for B images of S tokens without a mask."""
        D = self.config.width // self.config.heads
        q = jax.ShapeDtypeStruct((B, S, self.config.heads, D), self.dtype)
        chosen = program_for(q, target, "lengths" if self.config.naflex else "whole")
        layer = f"attention {list(q.shape)} {self.dtype}"
        return (LayerProgram(layer, chosen.name, str(chosen.config or chosen.reason)),)

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
        return f"Encoder({described_weights(self)}, {self.config}, {self.patch_embed!r})"


def described_weights(encoder: "Encoder | TextEncoder") -> str:
    """Says an encoder's dtype, which layers are in 8 bits, and its number of parameters."""
    others = jax.tree.leaves(dataclasses.replace(encoder, blocks={}))
    size = sum(getattr(leaf, "size", 0) for leaf in others)
    size += number_of_parameters(encoder.blocks, encoder.config)
    layers = described_layers(encoder.blocks)
    return ", ".join(filter(None, (encoder.dtype, layers, f"{size:,} parameters")))


def described_layers(blocks: Any) -> str:
    """Says which layers of the blocks are in 8 bits; an empty string for other blocks.

    It is empty, too, if the leaves are no arrays, such as shardings.
    """
    leaves = jax.tree.leaves(blocks, is_leaf=lambda x: x is None)
    if not isinstance(blocks, tuple) or not all(hasattr(x, "dtype") for x in leaves):
        return ""
    dtypes, kept, depth = set(), [], 0
    for run in blocks:
        of_run = {layer: dtype_in_8_bits(run[layer]) for layer in LAYERS}
        dtypes |= set(of_run.values()) - {""}
        for block in range(depth, depth := depth + len(run["norm1"]["scale"])):
            kept += [(layer, block) for layer in LAYERS if not of_run[layer]]
    if not dtypes:
        return "no layer in 8 bits"
    everywhere = [x for x in LAYERS if all((x, block) in kept for block in range(depth))]
    others = [f"{layer} of every block" for layer in everywhere]
    others += [f"{layer} of block {block}" for layer, block in kept if layer not in everywhere]
    return f"blocks in {dtypes.pop()}{' except ' if others else ''}{', '.join(others)}"


# The children of the pytree. The last two are left out if both are None, so that an encoder without
# them fits programs that were exported when no encoder had them.
CHILDREN = ("patch_embed", "positions", "blocks", "norm", "head", "first_norm", "projection")


def _children(encoder: Encoder) -> tuple[str, ...]:
    has_all = encoder.first_norm is not None or encoder.projection is not None
    return CHILDREN if has_all else CHILDREN[:-2]


def _flatten_with_keys(encoder: Encoder) -> tuple[list[tuple[Any, Any]], tuple[Config, str]]:
    children, static = _flatten(encoder)
    return list(zip(map(jax.tree_util.GetAttrKey, _children(encoder)), children)), static


def _flatten(encoder: Encoder) -> tuple[list[Any], tuple[Config, str]]:
    """Flattens an encoder without keys, which every call does."""
    children = [getattr(encoder, name) for name in _children(encoder)]
    return children, (encoder.config, encoder.dtype)


def _unflatten(static: tuple[Config, str], children: Iterable[Any]) -> Encoder:
    config, dtype = static
    return Encoder(config=config, dtype=dtype, **dict(zip(CHILDREN, children)))


jax.tree_util.register_pytree_with_keys(Encoder, _flatten_with_keys, _unflatten, _flatten)

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
    if "pooling_head" in fields:  # An earlier version exported the program.
        fields["pooling"] = "attention" if fields.pop("pooling_head") else "none"
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


def _is_prefix(mask: Any, spatial_shapes: Any) -> bool:
    """Returns whether the mask is known to be the default one."""
    if mask is None or not is_known(mask) or not is_known(spatial_shapes):
        return False
    mask, sides = jax.device_get((mask, spatial_shapes))
    patches = sides.astype(np.int64).prod(1, keepdims=True)
    return np.array_equal(mask.astype(bool), np.arange(mask.shape[1]) < patches)


def embedded_images(encoder: Encoder, images: jax.Array) -> jax.Array:
    """Returns what the first block of an encoder for images of one size gets, [B, S, D]."""
    # The images were checked outside of this jit, where their values may be known.
    return Request(images, encoder.patch_embed, from_images=True, out_dtype=encoder.dtype).run()


@Program
def _encode_images(encoder: Encoder, images: jax.Array, kept: tuple[int, ...]) -> EncoderOutput:
    return transform(encoder, embedded_images(encoder, images), kept=kept)


def embedded_patches(encoder: Encoder, patches: jax.Array, spatial_shapes: jax.Array) -> jax.Array:
    """Returns what the first block of a NaFlex encoder gets, [B, L, D]."""
    assert encoder.positions is not None  # NaFlex encoders have positions.
    positions = resize_to_each(encoder.positions, spatial_shapes, patches.shape[1])
    return _embedded_patches(encoder, patches, positions)


@Program
def _encode_patches(
    encoder: Encoder,
    patches: jax.Array,
    spatial_shapes: jax.Array,
    mask: jax.Array | None,
    kept: tuple[int, ...],
) -> EncoderOutput:
    spatial_shapes = jnp.maximum(spatial_shapes.astype(jnp.int32), 1)
    lengths = None if mask is not None else spatial_shapes.prod(1)
    x = embedded_patches(encoder, patches, spatial_shapes)
    return transform(encoder, x, kept, lengths=lengths, mask=mask)


@Program
def _encode_packed(encoder: Encoder, images: PackedImages, kept: tuple[int, ...]) -> EncoderOutput:
    R, T, _ = images.patches.shape
    sides, segments = images.spatial_shapes.astype(jnp.int32), images.segments
    # The number of each token in its image and the image's grid; padding is like the first token.
    token = lax.broadcasted_iota(jnp.int32, (len(sides), images.max_num_patches), 1)
    height, width = (jnp.broadcast_to(x, token.shape) for x in jnp.split(sides, 2, axis=1))
    token, height, width = (segments.scatter(x, R, T) for x in (token, height, width))
    assert encoder.positions is not None  # NaFlex encoders have positions.
    positions = positions_of(
        token, jnp.maximum(height, 1), jnp.maximum(width, 1), encoder.positions
    )
    x = _embedded_patches(encoder, images.patches, positions)
    return transform(encoder, x, kept, segments=segments)


def _embedded_patches(encoder: Encoder, patches: jax.Array, positions: jax.Array) -> jax.Array:
    """Embeds patches [..., L, K] in [-1, 1], and adds their positions [..., L, D]."""
    params = encoder.patch_embed
    request = Request(
        pad_rows(encode(patches, params.encoding)),
        params,
        positions=positions,
        out_dtype=encoder.dtype,
    )
    x = request.run()
    if TABLE[params.dtype].holds_levels:
        # Because of the rounding to integers the derivative would be zero, without an error.
        x = primitive.without_gradient(patches, x)
    return x


def transform(
    encoder: "Encoder | TextEncoder", x: jax.Array, kept: tuple[int, ...] = (), **options: Any
) -> EncoderOutput:
    """Applies the transformer; the arguments are those of `observed_transform`."""
    return observed_transform(encoder, x, kept, **options)[0]


def observed_transform(
    encoder: "Encoder | TextEncoder",
    x: jax.Array,
    kept: tuple[int, ...] = (),
    *,
    lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    segments: Segments | None = None,
    ends: jax.Array | None = None,
    observe: Observe | None = None,
) -> tuple[EncoderOutput, dict[str, Any]]:
    """Applies the transformer to embedded tokens [B, S, D].

    Args:
      encoder: the encoder.
      x: the tokens in front and the patches, or the tokens of texts.
      kept: the hidden states that are returned, in [0, depth].
      lengths: [B] int32, the number of tokens of each image, if padding follows them.
      mask: [B, S], False or 0 for padding at other places.
      segments: the images, if the rows of x have the tokens of several images.
      ends: [B], the positions of the tokens that summarise texts; None for images.
      observe: sees the inputs of the blocks' dense layers, none of which is in 8 bits.

    Returns:
      EncoderOutput, in which the projection of a text is its `image_embeds`; and for each dense
      layer what `observe` returned.
    """
    config = encoder.config
    padding: dict[str, Any] = {}
    if segments is not None:
        padding["segments"] = segments
    if lengths is not None:
        padding["lengths"] = lengths
    if mask is not None:
        padding["mask"] = mask.astype(bool)
    precision = "highest" if encoder.dtype == "float32" else None
    rotation = None
    if isinstance(config, Config) and config.rope_theta is not None:
        rotation = _rotation(config)
    # A block writes its result to one of these slots; the last one holds what nobody asked for.
    wanted = sorted(set(kept))
    slots = np.full(config.depth + 1, len(wanted), np.int32)
    slots[wanted] = np.arange(len(wanted))

    type Carry = tuple[jax.Array, jax.Array, jax.Array | None]

    def block(
        stacked: dict[str, Any], first: int, carry: Carry, p: dict[str, Any]
    ) -> tuple[Carry, dict[str, Any]]:
        x, layer, states = carry
        p = p | stacked
        # These have a row for each block of the run that starts with the block `first`.
        row = layer - first if first else layer
        seen: dict[str, Any] = {}

        def observed(name: str, x: Any) -> Any:
            if observe is not None:
                x, seen[name] = observe(name, x, p.get("observed"))
            return x

        def norm(name: str, next_layer: str, x: jax.Array) -> Any:
            """Computes a norm for the layer that follows, in 8 bits if that layer is."""
            y = _norm(x, p[name], config, layer=row, levels=dtype_in_8_bits(p[next_layer]))
            return observed(next_layer, y)

        y = norm("norm1", "qkv", x)
        q, k, v = _parts(y, p["qkv"], 3, row)
        if rotation is not None:
            q, k = (_rotated(part, rotation, config) for part in (q, k))
        # The scale of v makes levels of the result, if the next layer is in 8 bits.
        levels = dtype_in_8_bits(p["out"])
        attended = observed("out", _attention(q, k, v, config, padding, levels))
        x = _dense(attended, p["out"], residual=x, layer=row)
        hidden = observed("fc2", _hidden(norm("norm2", "fc1", x), p, config, row))
        x = _dense(hidden, p["fc2"], residual=x, layer=row)
        layer = layer + 1
        if states is not None:
            slot = jnp.asarray(slots)[layer]
            states = lax.dynamic_update_index_in_dim(states, x, slot, 0)
        return (x, layer, states), seen

    with jax.default_matmul_precision(precision):
        if encoder.first_norm is not None:
            x = _norm(x, encoder.first_norm, config)
        states = None
        if wanted:
            # With x in all slots, they have its sharding.
            states = lax.broadcast(x, (len(wanted) + 1,))
        runs = encoder.blocks if isinstance(encoder.blocks, tuple) else (encoder.blocks,)
        carry, first = (x, jnp.int32(0), states), 0
        seen: dict[str, Any] = {}
        for run in runs:
            # Kernels read the parameters of a block in place; XLA slices those of other layers.
            in_place = {
                name: p for name, p in run.items() if name.startswith("norm") or "weight" in p
            }
            sliced = {name: p for name, p in run.items() if name not in in_place}
            depth = len(run["norm1"]["scale"])
            carry, seen = lax.scan(
                functools.partial(block, in_place, first), carry, sliced, length=depth
            )
            first += depth
        x, _, states = carry
        if encoder.norm is not None and not config.norm_after_pooling:
            x = _norm(x, encoder.norm, config)
        pooled: jax.Array | None
        if ends is not None:
            # This sum of one token has the sharding of x on every mesh; a gather has not.
            at_end = lax.broadcasted_iota(jnp.int32, x.shape[:2], 1) == ends[:, None]
            pooled = jnp.where(at_end[..., None], x, 0).sum(1)
        else:
            assert isinstance(encoder, Encoder)
            pooled = _pooled(encoder, x, padding)
        projected = None
        if pooled is not None:
            if encoder.norm is not None and config.norm_after_pooling:
                pooled = _norm(pooled, encoder.norm, config)
            if encoder.projection is not None:
                projected = _dense(pooled, encoder.projection)
        found = () if states is None else tuple(states[slots[i]] for i in kept)
        return EncoderOutput(x, pooled, projected, found), seen


def _pooled(encoder: Encoder, x: jax.Array, padding: dict[str, Any]) -> jax.Array | None:
    """Computes the pooled vector [B, D] of the tokens [B, S, D], as `config.pooling` says.

    With segments it computes those of the images [N, D].
    """
    config, head = encoder.config, encoder.head
    segments: Segments | None = padding.get("segments")
    if segments is not None:
        padding = {"lengths": segments.lengths}

    def of_images(x: jax.Array) -> jax.Array:
        return x if segments is None else segments.gather(x)

    pooling = config.pooling
    if pooling is None:  # The encoder was made without `load_encoder`.
        pooling = "none" if head is None else "attention"
    match pooling:
        case "class":
            return x[:, 0]
        case "dense":
            assert head is not None
            return jnp.tanh(_dense(x[:, 0], head))
        case "mean":
            return mean_of_patches(of_images(x), config, **padding)
        case "attention":
            assert head is not None
            # The tokens in front are left out, as in timm; SigLIP has none.
            tokens = x[:, config.prefix :]
            k, v = map(of_images, _parts(tokens, head["kv"], 2))
            # The query is computed from k, so that it has the same sharding along the batch.
            query = 0 * k[:, :1] + _row(head["query"], k)
            pooled = _dense(_attention(query, k, v, config, padding), head["out"])
            hidden = _dense(_norm(pooled, head["norm"], config), head["fc1"], config.activation)
            fc = _dense(hidden, head["fc2"])
            return (pooled + fc)[:, 0]
    return None


def mean_of_patches(
    x: jax.Array,
    config: Config,
    *,
    lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes the mean [B, D] of the patches' tokens of x [B, S, D], leaving out the padding."""
    patches = x[:, config.prefix :].astype(jnp.float32)
    if lengths is not None:
        mask = prefix_mask(lengths, x.shape[1])
    if mask is None:
        return patches.mean(1).astype(x.dtype)
    number = mask.sum(1, keepdims=True, dtype=jnp.float32)
    patches = jnp.where(mask[..., None], patches, 0)
    return (patches.sum(1) / jnp.maximum(number, 1)).astype(x.dtype)


def check_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Returns the numbers of hidden states in [0, depth]."""
    several = isinstance(layers, Sequence | np.ndarray)
    found = []
    for layer in layers if several else [layers]:
        try:
            number = None if isinstance(layer, bool) else operator.index(layer)
        except TypeError:
            number = None
        if number is None or not -depth - 1 <= number <= depth:
            raise ValueError(
                f"encoder: layers is {layers!r}, expected numbers of hidden states from "
                f"{-depth - 1} to {depth}: this encoder has {depth} blocks."
            )
        found.append(number % (depth + 1))
    return tuple(found)


def _rotation(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Computes the cosines and sines [S, head] by which rotary positions turn queries and keys.

    The centre of a patch has the coordinates (y, x) in [-1, 1]. Channel i of the first quarter of a
    head turns with the angle 2 pi y theta^(-4 i / head), the second quarter with x, and the second
    half repeats the first. The tokens in front turn by 0. Source: `DINOv3ViTRopePositionEmbedding`
    of transformers 5.24.
    """
    (h, w), head = config.grid, config.width // config.heads
    assert config.rope_theta is not None
    frequencies = config.rope_theta ** -(np.arange(head // 4) * 4 / head)
    y, x = ((np.arange(n) + 0.5) / n * 2 - 1 for n in (h, w))
    centres = np.stack(np.meshgrid(y, x, indexing="ij"), -1).reshape(h * w, 2, 1)
    angles = np.tile((2 * np.pi * centres * frequencies).reshape(h * w, head // 2), 2)
    angles = np.pad(angles, ((config.prefix, 0), (0, 0)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotated(
    x: jax.Array, rotation: tuple[np.ndarray, np.ndarray], config: Config | TextConfig
) -> jax.Array:
    """Turns pairs of channels (i, i + head / 2) of queries or keys [B, S, D] by their angles."""
    B, S, D = x.shape
    heads = x.reshape(B, S, config.heads, D // config.heads).astype(jnp.float32)
    first, second = jnp.split(heads, 2, axis=-1)
    turned = jnp.concatenate([-second, first], -1)
    cosine, sine = (jnp.asarray(part)[None, :, None] for part in rotation)
    return (heads * cosine + turned * sine).astype(x.dtype).reshape(B, S, D)


def _row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Gives the vector as many axes as x, because users may forbid implicit rank promotion."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def _norm(
    x: jax.Array,
    p: dict[str, jax.Array],
    config: Config | TextConfig,
    layer: jax.Array | None = None,
    levels: str = "",
) -> Any:
    arguments = (x, p["scale"], p["bias"])
    if levels:
        return layer_norm_levels(*arguments, eps=config.eps, dtype=levels, layer=layer)
    return layer_norm(*arguments, eps=config.eps, layer=layer)


def dtype_in_8_bits(p: dict[str, Any]) -> str:
    """Returns the dtype of a dense layer that is in 8 bits; empty for others."""
    dtype = p["weight"].dtype.name if "weight" in p else ""
    return dtype if dtype in EIGHT_BITS else ""


def _dense(
    x: jax.Array | tuple[jax.Array, jax.Array],
    p: dict[str, jax.Array],
    activation: str = "",
    *,
    residual: jax.Array | None = None,
    levels: tuple[jax.Array, jax.Array] | None = None,
    layer: jax.Array | None = None,
) -> Any:
    """Computes a dense layer in 8 bits or in the encoder's dtype, as its parameters say.

    Args:
      x: the input, which for a layer in 8 bits is levels, with a scale for each row or without.
      p: the layer's parameters, as in `Encoder`.
      activation: one of `ACTIVATIONS`; empty for none.
      residual: added to the result.
      levels, layer: as in `dense`, for a layer with a "weight".
    """
    if "weight" in p:
        x, row_scale = x if isinstance(x, tuple) else (x, None)
        return dense(
            x,
            p["weight"],
            p["scale"],
            p["bias"],
            activation=activation,
            row_scale=row_scale,
            residual=residual,
            levels=levels,
            layer=layer,
            scaled=p["weight"].dtype != jnp.bfloat16,
        )
    assert not isinstance(x, tuple) and levels is None
    return in_steps(x, p["kernel"], p.get("bias"), activation, residual)


def _parts(
    x: Any, p: dict[str, Any], number: int, layer: jax.Array | None = None
) -> list[jax.Array]:
    """Computes the equal parts of a dense layer, each an array of its own.

    Each "kernel" has its own product, because attention needs contiguous arrays, and XLA would copy
    the parts of a single product.
    """
    if "weight" in p:
        return list(_dense(x, p, layer=layer))
    kernels, biases = (jnp.split(p[name], number, axis=-1) for name in ("kernel", "bias"))
    return [_dense(x, {"kernel": k, "bias": b}) for k, b in zip(kernels, biases)]


def _hidden(x: Any, p: dict[str, Any], config: Config | TextConfig, layer: jax.Array) -> Any:
    """Computes what an MLP's fc2 gets, from the result of the norm."""
    fc1, fc2 = p["fc1"], p["fc2"]
    levels = (fc2["factor"], fc2["shift"]) if "factor" in fc2 else None
    if config.gated:
        gate, up = _parts(x, fc1, 2, layer)
        hidden = ACTIVATIONS[config.activation].of_array(gate) * up
    else:
        of_fc1 = levels if dtype_in_8_bits(fc1) else None
        hidden = _dense(x, fc1, config.activation, levels=of_fc1, layer=layer)
    dtype = dtype_in_8_bits(fc2)
    if not dtype or hidden.dtype == dtype:
        return hidden
    hidden = hidden.astype(jnp.float32)
    if levels is not None:
        of_layer = functools.partial(lax.dynamic_index_in_dim, index=layer, keepdims=False)
        factor, shift = (_row(of_layer(x), hidden) for x in levels)
        hidden = hidden * factor + shift
    hidden = not_differentiated(hidden, refuse_gradient)
    return quantised(hidden, dtype) if levels is None else to_levels(hidden, dtype)


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    config: Config | TextConfig,
    padding: dict[str, Any],
    levels: str = "",
) -> jax.Array:
    """Computes the attention of q [B, T, D] to k and v [B, S, D], leaving out the padding."""
    head = config.width // config.heads
    heads = (x.reshape(*x.shape[:2], config.heads, head) for x in (q, k, v))
    return attention(*heads, **padding, causal=config.causal, levels=levels).reshape(q.shape)
