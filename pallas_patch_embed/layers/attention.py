"""Attention, computed by the fastest program that serves.

The JAX primitive `attention_p` is lowered to the first of these that serves, as `program_for` says:

  mosaic_sm90  the kernel of attention_sm90.py, for the shapes in `SERVED`.
  cudnn        cuDNN's fused attention, on NVIDIA GPUs.
  xla          the formula.

The last two are also used in exported programs, and if XLA partitions the program over several
devices, because XLA would gather the operands of a kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# JAX has no public name for this.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import Target, cuda_is_installed
from pallas_patch_embed.base.gradients import not_differentiated
from pallas_patch_embed.base.levels import refuse_gradient, to_levels
from pallas_patch_embed.layers import attention_sm90
from pallas_patch_embed.layers.attention_sm90 import Config, Shape

# Largest number of channels of a head for which cuDNN's fused attention runs on every GPU that it
# supports.
CUDNN_LARGEST_HEAD = 128

# The compute capability for which the kernel was measured.
CAPABILITY = (9, 0)

# Where the kernel was measured to be faster than cuDNN (benchmarks/h200/attention.jsonl): the
# numbers of tokens, by the channels of a head, for whole images, with lengths, and for segments.
Kind = Literal["whole", "lengths", "segments"]
SERVED: dict[Kind, dict[int, range]] = {
    "whole": {64: range(50, 1025), 72: range(256, 730), 80: range(257, 258)},
    "lengths": {64: range(256, 1025), 72: range(256, 1025)},
    "segments": {64: range(64, 1025), 72: range(256, 1025)},
}

# The kernel gets at least this many units of work for each multiprocessor: for whole images 88 on
# an H200. With 96 units, 8 images of B/16, it takes 0.84 of cuDNN's time, with 12 to 48 units 1.2
# to 1.6 times that, because most multiprocessors are idle then. Few images with their own numbers
# of tokens were not measured.
FEWEST_UNITS: dict[Kind, float] = {"whole": 2 / 3, "lengths": 4, "segments": 4}

attention_p = Primitive("attention")
attention_p.def_impl(functools.partial(apply_primitive, attention_p))

# The lowering of cuDNN's attention asks for the devices. JAX passes them on only in programs that
# contain one of these primitives.
prim_requires_devices_during_lowering.add(attention_p)


class Choice(NamedTuple):
    """How attention is computed.

    Attributes:
      name: "mosaic_sm90", "cudnn" or "xla".
      reason: why the programs before it do not compute it; empty if it is the kernel.
      config: the kernel's config.
    """

    name: str
    reason: str
    config: Config | None = None


class Segments(NamedTuple):
    """Where the tokens of images are among the tokens of rows that hold several images.

    Attributes:
      first: [N] int32, the index of each image's first token among the R * T tokens of R rows, a
        multiple of 8.
      lengths: [N] int32, the number of its tokens, at most `longest`.
      longest: a Python integer.
    """

    first: jax.Array
    lengths: jax.Array
    longest: int

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns the tokens of each image [N, longest, ...] of x [R, T, ...], padded with 0."""
        tokens = x.reshape(-1, *x.shape[2:])
        return tokens.at[self._index(len(tokens))].get(mode="fill", fill_value=0)

    def scatter(self, y: jax.Array, rows: int, tokens: int) -> jax.Array:
        """Returns rows of tokens [R, T, ...] with the tokens y [N, longest, ...] of the images.

        Tokens that no image has are 0.
        """
        found = jnp.zeros((rows * tokens, *y.shape[2:]), y.dtype)
        found = found.at[self._index(rows * tokens)].set(y, mode="drop")
        return found.reshape(rows, tokens, *y.shape[2:])

    def _index(self, tokens: int) -> jax.Array:
        """Returns the index of each token [N, longest]; that of padding is out of bounds."""
        inside = prefix_mask(self.lengths, self.longest)
        index = self.first[:, None] + lax.broadcasted_iota(jnp.int32, inside.shape, 1)
        return jnp.where(inside, index, tokens)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    segments: Segments | None = None,
    causal: bool = False,
    levels: str = "",
) -> jax.Array:
    """Computes attention, with the softmax in float32.

        y[b, s, h] = sum_t p[t] v[b, t, h],  p = softmax_t(q[b, s, h] . k[b, t, h] / sqrt(D))

    Args:
      q: [B, T, H, D].
      k, v: [B, S, H, D].
      lengths: [B] int32 in [0, S], the number of keys of each image, and of its queries if T is S.
        Rows of y from there on have no defined value.
      mask: [B, S] bool, False for keys that get no weight. The kernel takes no mask.
      segments: the images whose tokens attend to each other, if q, k and v [R, T, H, D] have rows
        of several images. Rows of y that no image has are finite if q is. At most one of lengths,
        mask and segments may be given.
      causal: whether query s attends only to the keys up to s. The kernel does not compute it.
      levels: dtype of the result if it is in 8 bits, one of `EIGHT_BITS`: y rounded to nearest and
        clipped to [-127, 127], for float8 [-448, 448]. So the values have the scale of the result.
        The kernel rounds y in float32, other programs round it to the dtype of q first.

    Returns:
      [B, T, H, D] in the dtype of q, or `levels`.
    """
    if segments is not None:
        first, lengths, longest = segments
        return attention_p.bind(q, k, v, lengths, first, longest=longest, levels=levels)
    if mask is not None or causal or q.shape != k.shape:
        if lengths is not None:
            mask = prefix_mask(lengths, k.shape[1])
        return _rounded(_by_jax(q, k, v, mask=mask, causal=causal), levels)
    more = () if lengths is None else (lengths,)
    return attention_p.bind(q, k, v, *more, longest=None, levels=levels)


def formula(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array | None = None,
    first: jax.Array | None = None,
    *,
    longest: int | None = None,
    levels: str = "",
) -> jax.Array:
    """Computes `attention` without a kernel; rows from `lengths` on are finite.

    With `first` and `longest`, the fields of `Segments`, each image is gathered for an attention
    with lengths, for which there may be a kernel.
    """
    if first is None or lengths is None or longest is None:
        return _rounded(_by_jax(q, k, v, lengths=lengths), levels)
    segments = Segments(first, lengths, longest)
    y = attention(*map(segments.gather, (q, k, v)), lengths=lengths, levels=levels)
    return segments.scatter(y, *q.shape[:2])


def _rounded(y: jax.Array, levels: str) -> jax.Array:
    """Rounds y to 8 bits if `levels` names their dtype."""
    if not levels:
        return y
    return to_levels(not_differentiated(y, refuse_gradient).astype(jnp.float32), levels)


def prefix_mask(lengths: jax.Array, S: int) -> jax.Array:
    """Returns the mask [B, S] of the first `lengths` tokens of each image."""
    return lax.broadcasted_iota(jnp.int32, (len(lengths), S), 1) < lengths[:, None]


def _by_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    causal: bool = False,
    fused: bool = True,
) -> jax.Array:
    """Computes the attention by cuDNN if `fused` and where it serves, and otherwise by XLA."""
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None, None, :], (*q.shape[:1], 1, q.shape[1], k.shape[1]))

    def attend(implementation: Literal["xla", "cudnn"]) -> Callable[..., jax.Array]:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: Any, mask: Any) -> Any:
            # cuDNN leaves out what is beyond the lengths of queries and keys; XLA masks keys. An
            # image without tokens gets one.
            lengths = None if lengths is None else jnp.maximum(lengths, 1)
            of_queries = lengths if implementation == "cudnn" else None
            # dot_product_attention adds float32 to bfloat16, and users may forbid implicit dtype
            # promotion.
            with jax.numpy_dtype_promotion("standard"):
                return jax.nn.dot_product_attention(
                    *(q, k, v),
                    mask=mask,
                    is_causal=causal,
                    query_seq_lengths=of_queries,
                    key_value_seq_lengths=lengths,
                    implementation=implementation,
                )

        return attention

    # Tracing cuDNN's attention needs cuDNN, which is installed with JAX's CUDA backend.
    fused = fused and not _refused_by_cudnn(q) and cuda_is_installed()
    options = {"cuda": attend("cudnn")} if fused else {}
    return lax.platform_dependent(q, k, v, lengths, mask, **options, default=attend("xla"))


def _refused_by_cudnn(q: Any) -> str:
    """Returns why cuDNN does not compute the attention of these queries, or an empty string."""
    T, _, D = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        return f"the dtype is {q.dtype}, not bfloat16."
    if D % 8 or D > CUDNN_LARGEST_HEAD:
        return f"heads have {D} channels, not a multiple of 8 up to {CUDNN_LARGEST_HEAD}."
    return "there is one query." if T == 1 else ""


def program_for(q: Any, target: Target, kind: Kind = "whole") -> Choice:
    """Chooses the program for B images of S tokens.

    Args:
      q: what has the shape [B, S, H, D] and the dtype of the queries.
      target: where the program runs.
      kind: whether the images have all S tokens, or their own numbers of them, or are segments of
        rows.
    """
    if target.platform != "cuda":
        return Choice("xla", "the program does not run on an NVIDIA GPU.")
    if reason := _refused_by_cudnn(q):
        return Choice("xla", reason)
    chip = target.chip
    if not target.known or chip is None:
        return Choice("cudnn", "the GPU is not known.")
    if chip.capability != CAPABILITY:
        return Choice("cudnn", "the kernel is for GPUs of compute capability 9.0.")
    B, S, H, D = q.shape
    shape = Shape(B, S, H, D)
    if S not in SERVED[kind].get(D, ()):
        what = f"{S} tokens and heads of {D} channels" + f", with {kind}" * (kind != "whole")
        return Choice("cudnn", f"the kernel was not measured to be faster for {what}.")
    config = attention_sm90.choose(shape, chip, lengths=kind != "whole")
    units, fewest = B * H * config.units(shape), round(FEWEST_UNITS[kind] * chip.multiprocessors)
    if units < fewest:
        return Choice("cudnn", f"the kernel would have {units} units of work, fewer than {fewest}.")
    return Choice("mosaic_sm90", "", config)


@attention_p.def_abstract_eval
def _result_type(*operands, **static):
    (result,) = jax.make_jaxpr(functools.partial(formula, **static))(*operands).out_avals
    return result


def _differentiate(primals, tangents, longest, levels):
    if levels:
        refuse_gradient()
    (q, k, v, *more), tangents = primals, map(ad.instantiate_zeros, tangents[:3])

    def function(q, k, v):
        if longest is not None:
            return formula(q, k, v, *more, longest=longest, levels="")
        # cuDNN's attention has no derivative in forward mode.
        lengths = more[0] if more else None
        return _by_jax(q, k, v, lengths=lengths, fused=False)

    return jax.jvp(function, (q, k, v), tuple(tangents))


ad.primitive_jvps[attention_p] = _differentiate


def _batch(operands, axes, longest, levels):
    """Makes the mapped axis a part of the axis of images."""
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes) if axis is not None}
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes)
    ]
    if longest is not None:
        tokens = moved[0].shape[1] * moved[0].shape[2]
        moved[4] = moved[4] + tokens * lax.broadcasted_iota(jnp.int32, moved[4].shape, 0)
    merged = (x.reshape(size * x.shape[1], *x.shape[2:]) for x in moved)
    y = attention_p.bind(*merged, longest=longest, levels=levels)
    return y.reshape(moved[0].shape), 0


batching.primitive_batchers[attention_p] = _batch


def _lower(ctx, *operands, **static):
    function = functools.partial(formula, **static)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _lower_for_cuda(ctx, *operands, longest, levels):
    split = lowering.devices_left_to_xla(ctx.module_context) > 1
    target = lowering.target_of(ctx.module_context, "cuda")
    q, *others = ctx.avals_in
    kind: Kind = "whole" if len(others) == 2 else "lengths"
    if longest is not None:
        kind, q = "segments", q.update(shape=(others[-1].size, longest, *q.shape[2:]))
    config = None if split else program_for(q, target, kind).config
    if config is None:
        return _lower(ctx, *operands, longest=longest, levels=levels)
    kernel = functools.partial(
        attention_sm90.kernel, longest=longest, levels=levels, config=config, chip=target.chip
    )

    def call(*operands):
        ordered = attention_sm90.with_order(config, *operands, longest=longest)
        return lowering.call_kernel(kernel, *ordered).reshape(ctx.avals_in[0].shape)

    with lowering.on_one_device(ctx) as plain:
        return mlir.lower_fun(call, multiple_results=False)(plain, *operands)


mlir.register_lowering(attention_p, _lower)
mlir.register_lowering(attention_p, _lower_for_cuda, platform="cuda")
