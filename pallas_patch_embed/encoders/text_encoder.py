"""The text encoder: the vision encoder's transformer behind a table of tokens."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.problem import is_known
from pallas_patch_embed.encoders.config import TextConfig
from pallas_patch_embed.encoders.encoder import check_layers, described_weights, transform
from pallas_patch_embed.encoders.program import Program


class TextOutput(NamedTuple):
    """The result of a text encoder, in the encoder's dtype.

    Attributes:
      last_hidden_state: [B, L, D], the result of the last layer norm. Nothing is masked: SigLIP's
        tokens attend to padding, and CLIP's padding has values, too.
      pooler_output: [B, D], as transformers pools the tokens: the normed end token of a CLIP, and
        text_embeds [B, P] of a SigLIP.
      text_embeds: [B, P], the vector to compare with that of an image, which is the pooler_output
        of a SigLIP's vision encoder, and image_embeds of a CLIP's. It is not normalised. None if
        the checkpoint of a CLIP has no projection.
      hidden_states: the [B, L, D] that `layers` asked for, in that order.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array
    text_embeds: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TextEncoder:
    """A text encoder for inference, a pytree that `load_text_encoder` makes.

    It can be called inside or outside of jit, and computes as `Encoder` does: layers are scanned,
    matrix products accumulate in float32, layer norms and softmax are computed in float32.

    Attributes:
      embedding: [V, D] in `dtype`.
      positions: [length, D] float32.
      blocks, norm: as in `Encoder`, also in 8 bits.
      projection: {"kernel" [D, P]}, with "bias" [P] for SigLIP; None if there is none.
      config: TextConfig, which is static.
      dtype: "bfloat16" or "float32", which is static: that of all that is not in 8 bits.
    """

    embedding: jax.Array
    positions: jax.Array
    blocks: dict[str, Any] | tuple[dict[str, Any], ...]
    norm: dict[str, jax.Array]
    projection: dict[str, jax.Array] | None
    config: TextConfig
    dtype: str

    # What an `Encoder` may have and no text encoder has.
    head: ClassVar[None] = None
    first_norm: ClassVar[None] = None

    def __call__(self, ids: AnyArray, *, layers: int | Sequence[int] = ()) -> TextOutput:
        """Encodes texts.

        Args:
          ids: [B, L] integers in [0, V) from a `Tokenizer`, L at most `config.length`. A SigLIP was
            trained with L = `config.length` and pools the last position, so fewer ids give another
            result. Values are checked outside of jit; inside, an id that does not exist makes its
            text NaN, unless it is behind the end token of a CLIP.
          layers: hidden states to return, as for an `Encoder`.

        Returns:
          TextOutput.

        Raises:
          TypeError, ValueError: an argument has another type, shape or value.
        """
        ids = self.checked(ids)
        kept = check_layers(layers, self.config.depth)
        return _encode(self, ids, kept=kept, rows=math.prod(ids.shape))

    def checked(self, ids: AnyArray) -> jax.Array | np.ndarray:
        """Returns ids [B, L], after a check of dtype, shape and values."""
        ids = as_array(ids, "text encoder: ids")
        _check_ids(ids, self.config)
        return ids

    def __repr__(self) -> str:
        return f"TextEncoder({described_weights(self)}, {self.config})"


CHILDREN = ("embedding", "positions", "blocks", "norm", "projection")


def _flatten(encoder: TextEncoder) -> tuple[list[tuple[Any, Any]], tuple[TextConfig, str]]:
    children = [(jax.tree_util.GetAttrKey(name), getattr(encoder, name)) for name in CHILDREN]
    return children, (encoder.config, encoder.dtype)


def _unflatten(static: tuple[TextConfig, str], children: Iterable[Any]) -> TextEncoder:
    config, dtype = static
    return TextEncoder(config=config, dtype=dtype, **dict(zip(CHILDREN, children)))


def _static_fields(config: dict[str, Any], dtype: str) -> tuple[TextConfig, str]:
    return TextConfig(**config), dtype


jax.tree_util.register_pytree_with_keys(TextEncoder, _flatten, _unflatten)
jax.export.register_namedtuple_serialization(
    TextOutput, serialized_name="pallas_patch_embed.TextOutput"
)
jax.export.register_pytree_node_serialization(
    TextEncoder,
    serialized_name="pallas_patch_embed.TextEncoder",
    serialize_auxdata=lambda static: json.dumps(
        [dataclasses.asdict(static[0]), static[1]]
    ).encode(),
    deserialize_auxdata=lambda data: _static_fields(*json.loads(data)),
)


def _check_ids(ids: Any, config: TextConfig) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"text encoder: ids have dtype {ids.dtype}, expected integers. Make them with the "
            "tokenizer of the same checkpoint, load_tokenizer(source)(texts)."
        )
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(
            f"text encoder: ids have shape {list(ids.shape)}, expected [B, L]. Pass a batch of "
            "texts, also if it is a single one."
        )
    if ids.shape[1] > config.length:
        raise ValueError(
            f"text encoder: texts have {ids.shape[1]} tokens, but this encoder has positions for "
            f"{config.length}. Cut them with load_tokenizer(source), which keeps the end token."
        )
    if not is_known(ids):
        return
    values = np.asarray(jax.device_get(ids))
    wrong = ((values < 0) | (values >= config.vocabulary)).any(1)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"text encoder: text {i} has ids from {values[i].min()} to {values[i].max()}, but this "
            f"encoder has {config.vocabulary} tokens. Use the tokenizer of the same checkpoint."
        )
    if config.pooling == "end" and not (found := (values == config.end_token).any(1)).all():
        raise ValueError(
            f"text encoder: text {int(found.argmin())} lacks the end token, {config.end_token}, "
            "which summarises a text. Use the tokenizer of the same checkpoint."
        )


def embedded_tokens(encoder: TextEncoder, ids: jax.Array) -> jax.Array:
    """Returns what the first block of a text encoder gets, [B, L, D]."""
    # On a mesh with explicit axes a gather has to be told the sharding of its result.
    sharding = jax.typeof(ids).sharding
    tokens = encoder.embedding.at[ids].get(
        mode="fill",
        wrap_negative_indices=False,
        out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None)),
    )
    x = tokens.astype(jnp.float32) + encoder.positions[None, : ids.shape[1]]
    return x.astype(encoder.dtype)


@Program
def _encode(encoder: TextEncoder, ids: jax.Array, kept: tuple[int, ...]) -> TextOutput:
    ends = ends_of(ids, encoder.config)
    y = transform(encoder, embedded_tokens(encoder, ids), kept=kept, ends=ends)
    pooled, projected = y.pooler_output, y.image_embeds
    if encoder.config.family == "siglip":
        pooled = projected
    assert pooled is not None  # Texts are pooled at a token, and SigLIP's are projected.
    return TextOutput(y.last_hidden_state, pooled, projected, y.hidden_states)


def ends_of(ids: jax.Array, config: TextConfig) -> jax.Array:
    """Returns the positions [B] of the tokens that summarise the texts [B, L]."""
    match config.pooling:
        case "end":
            return jnp.argmax(ids == config.end_token, 1)
        case "largest":
            return jnp.argmax(ids, 1)
    return jnp.full_like(ids[:, 0], ids.shape[1] - 1)
