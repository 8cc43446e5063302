"""The JAX primitive: shapes, batching, differentiation, sharding and lowering of the operator.

`patch_embed_p` is what users trace: one equation with four operands whose leading axes broadcast
as in numpy (see `Problem`). So vmap over any operand adds a leading axis to it, and nothing is
copied. The first operand is patches [..., S, K], or, with a `layout`, uint8 images [..., H, W, 3]
or videos [..., F, H, W, 3], which XLA cuts into patches for a backend that cannot. How the equation
is sharded:

  inside a shard_map    it is lowered to the chosen backend
  explicit sharding     it becomes a shard_map with specs from the types: in `to_lojax`, which JAX
                        calls just before lowering
  automatic sharding    on several devices it becomes a custom_partitioning with a Shardy rule
  backend="xla"         under automatic sharding: XLA splits it
"""

import functools
import importlib.util
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed.backends import choose, xla
from pallas_patch_embed.chips import Target
from pallas_patch_embed.patches import Encoding, rows
from pallas_patch_embed.problem import PatchLayout, Problem

patch_embed_p = Primitive("patch_embed")


class Call(NamedTuple):
    """The primitive's only parameter: what to compute from the four operands.

    Jaxprs are printed with all parameters of each equation; this one prints as a few words.

    Attributes:
      out_dtype: "bfloat16" or "float32".
      layout: how patches are cut of uint8 images; None for patches.
      backend: the user's choice; None for the best backend that serves.
      cut: "kernel" if a kernel must cut the images; None if XLA may do it.
      tuned: path of the user's file of measured configs, or None.
      devices: a jaxpr that makes JAX pass the devices to the lowering rule (`_needs_devices`), or
        None.
    """

    out_dtype: str
    layout: PatchLayout | None
    backend: str | None
    cut: str | None = None
    tuned: str | None = None
    devices: Any = None

    def __repr__(self) -> str:
        source = None if self.layout is None else f"images/{self.layout.patch_size}"
        cut = self.cut and f"cut={self.cut}"
        return ",".join(filter(None, (source, self.out_dtype, self.backend, cut)))


@functools.cache
def _needs_devices():
    """A jaxpr that makes JAX pass the devices to the lowering rule of an equation.

    JAX searches a program's equations, and the jaxprs among their parameters (also in tuples), for
    a primitive that is known to need the devices.
    """
    split = custom_partitioning(lambda x: x)
    split.def_partition(None, sharding_rule="i -> i")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(split)(jax.ShapeDtypeStruct((1,), jnp.float32))


def patch_embed(
    source, weight, scale, table, *, backend, out_dtype, layout, cut=None, tuned=None
) -> jax.Array:
    """The primitive's equation.

    Args:
      source: patches [..., S, K], or uint8 images [..., H, W, 3] or videos [..., F, H, W, 3].
      weight, scale, table: as for `backends.xla.run`.
      backend: a name, or None for the one chosen.
      out_dtype: "bfloat16" or "float32".
      layout: how patches are cut of images, None for patches.
      cut, tuned: as in `Call`.
    """
    operands = (source, weight, scale, table)
    types = [jax.typeof(x) for x in operands]
    automatic = backend != "xla" and not _is_manual(types) and _explicit_mesh(types) is None
    devices = _needs_devices() if automatic else None
    call = Call(out_dtype, layout, backend, cut, tuned, devices)
    return patch_embed_p.bind(*operands, call=call)


patch_embed_p.def_impl(functools.partial(apply_primitive, patch_embed_p))


# Types: shape, dtype, and the sharding of the result under an explicit mesh.


@patch_embed_p.def_abstract_eval
def _result_type(*operands, call):
    mesh = _explicit_mesh(operands)
    if mesh is not None:
        shapes = [a.shape for a in operands]
        spec = _result_spec(shapes, [a.sharding.spec for a in operands], call.layout)
        operands = tuple(a.update(sharding=_replicated(mesh, a.ndim)) for a in operands)
    avals = _with_patches(operands, call.layout)
    (result,) = jax.make_jaxpr(functools.partial(xla.run, out_dtype=call.out_dtype))(
        *avals
    ).out_avals
    return result if mesh is None else result.update(sharding=NamedSharding(mesh, spec))


def _explicit_mesh(operands) -> AbstractMesh | None:
    meshes = (operand.sharding.mesh for operand in operands)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _is_manual(operands) -> bool:
    meshes = [jax.sharding.get_abstract_mesh(), *(operand.sharding.mesh for operand in operands)]
    return any(AxisType.Manual in mesh.axis_types for mesh in meshes)


def _replicated(mesh, ndim: int) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * ndim))


def _with_patches(avals, layout: PatchLayout | None) -> list:
    """The operands' types, with patches instead of images."""
    source, weight, *rest = avals
    if layout is not None:
        shape = layout.rows_shape(source.shape)
        sharding = _replicated(source.sharding.mesh, len(shape))
        source = source.update(shape=shape, dtype=weight.dtype, sharding=sharding)
    return [source, weight, *rest]


def _whole(layout: PatchLayout | None) -> tuple:
    """The axes, as `_axes` names them, that are never sharded: K, and all of an image's."""
    return ("k",) if layout is None else ("k", "f", "h", "w", "c", -2)


def _axes(shapes, layout) -> list[list]:
    """For each axis of the four operands, the corresponding axis of the result.

    Axes of the result are counted from its end: S is -2, N is -1. K is "k"; the axes of an image
    are "h", "w" and "c", before them "f" of a video; a broadcast axis is None.
    """
    source, weight, scale, table = shapes
    patches = source if layout is None else layout.rows_shape(source)
    result = (*_leading(patches, weight, scale, table), patches[-2], weight[-2])
    of_one = [-2, "k"] if layout is None else [*"fhwc"][-layout.image_ndim :]
    along = (
        (source, [*range(-len(patches), -2), *of_one]),
        (weight, [*range(-len(weight), -2), -1, "k"]),
        (scale, [*range(-len(scale) - 1, -2), -1]),
        (table, [*range(-len(table), 0)]),
    )
    return [
        [a if isinstance(a, str) or size == result[a] else None for size, a in zip(shape, axes)]
        for shape, axes in along
    ]


def _leading(patches, weight, scale, table) -> tuple[int, ...]:
    return jnp.broadcast_shapes(patches[:-2], weight[:-2], scale[:-1], table[:-2])


def _result_spec(shapes, specs, layout) -> PartitionSpec:
    """The result's sharding: each axis is sharded as in the operands that have it."""
    sides, whole = _axes(shapes, layout), _whole(layout)
    # The result has S also if no operand has: an image has none, nor has a table without positions.
    ndim = max(2, *(-axis for axes in sides for axis in axes if isinstance(axis, int)))
    found: dict[int, list[Any]] = {axis: [] for axis in range(-ndim, 0)}
    split = found.keys() - set(whole)
    for axes, spec in zip(sides, specs):
        for axis, names in zip(axes, spec):
            if axis in split and names is not None and names not in found[axis]:
                found[axis].append(names)
    used = [name for names in found.values() for name in _mesh_axes(names)]
    if any(len(names) > 1 for names in found.values()) or len(used) > len(set(used)):
        raise ValueError(
            "patch_embed: the operands' shardings do not fit each other: patches, weight, scale "
            f"and table are sharded as {', '.join(map(str, specs))}. Expected one sharding for "
            "each of the axes batch, S and N, no mesh axis twice. Use jax.sharding.reshard."
        )
    return PartitionSpec(*(names[0] if names else None for names in found.values()))


def _mesh_axes(names) -> list:
    return [axis for name in names for axis in (name if isinstance(name, tuple) else (name,))]


def _operand_specs(shapes, result_spec, layout) -> list[PartitionSpec]:
    """How the operands are sharded for a result sharded as `result_spec`, which has all axes."""
    names = tuple(result_spec)
    return [
        PartitionSpec(*(names[axis] if isinstance(axis, int) else None for axis in axes))
        for axes in _axes(shapes, layout)
    ]


# Differentiation is refused where a derivative would be used. A tangent that nothing uses, as after
# stop_gradient, is dropped before it is transposed or lowered.

_tangent_p = Primitive("patch_embed_tangent")


def _refuse_gradient(*_, **__):
    raise TypeError(
        "patch_embed is inference-only: it has no derivative. To keep it frozen inside a model "
        "that is differentiated, apply jax.lax.stop_gradient to its input or output; to train it, "
        "use jnp.dot on the unpacked kernel."
    )


_tangent_p.def_impl(_refuse_gradient)
_tangent_p.def_abstract_eval(lambda tangent, result: result)
mlir.register_lowering(_tangent_p, _refuse_gradient)
ad.primitive_jvps[_tangent_p] = _refuse_gradient
ad.primitive_transposes[_tangent_p] = _refuse_gradient


def _differentiate(primals, tangents, *, call):
    result = patch_embed_p.bind(*primals, call=call)
    tangent = next(t for t in tangents if not isinstance(t, ad.Zero))
    return result, _tangent_p.bind(tangent, lax.stop_gradient(result))


ad.primitive_jvps[patch_embed_p] = _differentiate


def _batch_tangent(operands, axes):
    size = next(x.shape[a] for x, a in zip(operands, axes) if a is not None)
    batched = (
        jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(operands, axes)
    )
    return _tangent_p.bind(*batched), 0


batching.primitive_batchers[_tangent_p] = _batch_tangent


@jax.custom_jvp
def without_gradient(x, y):
    """Returns y, which was computed from x through integers; refuses to differentiate it by x."""
    del x
    return y


@functools.partial(without_gradient.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    by_x, tangent = tangents
    if isinstance(tangent, SymbolicZero) and not isinstance(by_x, SymbolicZero):
        tangent = _tangent_p.bind(by_x, lax.stop_gradient(primals[1]))
    return primals[1], tangent


@jax.custom_jvp
def not_differentiated(x):
    """Returns x, of which integers are to be computed; refuses to differentiate by it at once.

    Integers have no tangent that could remember x until a derivative is used.
    """
    return x


@functools.partial(not_differentiated.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    if not isinstance(tangents[0], SymbolicZero):
        _refuse_gradient()
    return primals[0], tangents[0]


# vmap.


def _batch(operands, axes, *, call):
    # Axes of the operands without leading axes: [S, K] or an image's, [N, K], [N], [S, N].
    own = (2 if call.layout is None else call.layout.image_ndim, 2, 1, 2)
    unbatched = [x.ndim - (a is not None) for x, a in zip(operands, axes)]
    leading = max(ndim - n for ndim, n in zip(unbatched, own))

    def to_front(x, axis, ndim, n):
        if axis is None:
            return x
        x = jnp.moveaxis(x, axis, 0)
        return lax.expand_dims(x, range(1, 1 + leading + n - ndim))

    operands = (to_front(*x) for x in zip(operands, axes, unbatched, own))
    return patch_embed_p.bind(*operands, call=call), 0


batching.primitive_batchers[patch_embed_p] = _batch


# Sharding.


def _explicitly(*operands, call):
    mesh = _explicit_mesh(map(jax.typeof, operands))
    shapes, layout = [x.shape for x in operands], call.layout
    result_spec = _result_spec(shapes, [jax.typeof(x).sharding.spec for x in operands], layout)
    specs = _operand_specs(shapes, result_spec, layout)
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}
    # The sum over K is local: an operand sharded along K is gathered here.
    gathered = [jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs)]
    return jax.shard_map(
        functools.partial(patch_embed_p.bind, call=call),
        mesh=mesh,
        axis_names=explicit,
        in_specs=tuple(specs),
        out_specs=result_spec,
    )(*gathered)


patch_embed_p.is_high = lambda *types, **_: (  # type: ignore[method-assign]
    _explicit_mesh(types) is not None and not _is_manual(types)
)
patch_embed_p.to_lojax = jax.jit(  # type: ignore[method-assign]
    _explicitly, static_argnames=("call",)
)


@functools.partial(custom_partitioning, static_argnums=(4,))
def _automatically(source, weight, scale, table, call):
    return patch_embed_p.bind(source, weight, scale, table, call=call)


def _partition(call, mesh, operands, result):
    if mesh.empty and result.sharding.is_fully_replicated:
        # A mesh is active, and no operand is on it.
        bind = functools.partial(patch_embed_p.bind, call=call)
        return mesh, bind, result.sharding, (result.sharding,) * len(operands)
    if not isinstance(result.sharding, NamedSharding):
        raise ValueError(
            f"patch_embed: its result is sharded as {result.sharding}, expected a NamedSharding. "
            "Shard the inputs with jax.NamedSharding, or ask for backend='xla'."
        )
    ndim, whole = len(result.shape), _whole(call.layout)
    names = itertools.zip_longest(range(-ndim, 0), result.sharding.spec)
    spec = PartitionSpec(*(None if axis in whole else name for axis, name in names))
    specs = _operand_specs([x.shape for x in operands], spec, call.layout)

    def local(*operands):
        # An explicit mesh may be active while XLA compiles.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return patch_embed_p.bind(*operands, call=call)

    shardings = [NamedSharding(mesh, spec) for spec in (spec, *specs)]
    return mesh, local, shardings[0], tuple(shardings[1:])


def _shardy_rule(call, mesh, operands, results):
    del mesh
    broadcast = (f"one{i}" for i in itertools.count())

    def factor(axis):
        if axis is None:
            return next(broadcast)
        return axis if isinstance(axis, str) else f"axis{-axis}"

    sides = _axes([tuple(x.shape) for x in operands], call.layout)
    left = ", ".join(" ".join(map(factor, axes)) for axes in sides)
    right = " ".join(factor(axis) for axis in range(-len(results[0].shape), 0))
    # In the order of their appearance.
    axes = dict.fromkeys(itertools.chain(*sides, [-2]))
    whole = tuple(factor(axis) for axis in axes if axis in _whole(call.layout))
    return f"{left} -> {right}", {"need_replication_factors": whole}


_automatically.def_partition(_partition, sharding_rule=_shardy_rule)


# Lowering.


def _devices_left_to_xla(module) -> int:
    """The number of devices over which XLA will split what is lowered here."""
    context = module.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        left = set(context.mesh.axis_names) - context.manual_axes
        return math.prod(context.mesh.shape[name] for name in left)
    return getattr(context, "num_devices", 1)


def _target(module, platform: str | None) -> Target:
    """Where the module will run."""
    if platform is None and len(module.platforms) == 1:
        return Target(module.platforms[0])
    if platform is not None and not module.lowering_parameters.for_export and module.backend:
        devices = module.backend.local_devices() or module.backend.devices()
        target = Target.of(devices[0])
        if target.platform == platform:
            return target
    return Target.unknown(platform or module.platforms[0])


def _check_serializable() -> None:
    """Refuses to export if the result could not be serialized.

    `Exported.serialize` would raise an error that cannot name this package's extra.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "patch_embed: jax.export serializes programs with flatbuffers, which is not installed. "
            "Install it with: pip install 'pallas_patch_embed[export]'.",
            name="flatbuffers",
        )


def _lower(ctx, *operands, call, platform=None):
    module = ctx.module_context
    if module.lowering_parameters.for_export:
        _check_serializable()
    automatic = call.devices and isinstance(module.axis_context, mlir.ShardingContext)
    if automatic and _devices_left_to_xla(module) > 1:
        return _lower_split(ctx, *operands, call=call)
    return _lower_whole(ctx, *operands, call=call, platform=platform)


def _lower_split(ctx, *operands, call):
    # custom_partitioning calls back into this process, which an exported program cannot.
    if ctx.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            "patch_embed: a program with automatic sharding cannot be exported, because XLA calls "
            "back into Python to partition it. Use a mesh with explicit axes, or jax.shard_map, or "
            "patch_embed(..., backend='xla')."
        )
    split = functools.partial(_automatically, call=call._replace(devices=None))
    return mlir.lower_fun(split, multiple_results=False)(ctx, *operands)


def _lower_whole(ctx, *operands, call, platform):
    out_dtype, layout, backend, cut, tuned, _ = call
    module = ctx.module_context
    if backend not in (None, "xla") and len(module.platforms) > 1:
        raise NotImplementedError(
            f"patch_embed: backend {backend!r} cannot serve a program for several platforms, "
            f"{', '.join(module.platforms)}. Export it for one, or leave backend=None."
        )
    problem = Problem.of(*ctx.avals_in, out_dtype=out_dtype, layout=layout, cut=cut)
    if _devices_left_to_xla(module) == 1:
        plan = choose(problem, _target(module, platform), backend, tuned)
    elif backend in (None, "xla") and cut is None:
        plan = xla.plan(problem, _target(module, platform))
    else:
        raise NotImplementedError(
            f"patch_embed: backend {backend!r} and cut={cut!r} cannot serve inside a shard_map "
            "that leaves mesh axes to XLA. Make all axes of the mesh manual, or leave backend=None "
            "and cut=None."
        )

    def run(source, weight, *rest):
        if layout is not None and not plan.takes_images:
            source = rows(source, layout, Encoding(weight.dtype.name))
        return plan.run(source, weight, *rest)

    # What is lowered here is one device's work. Pallas' kernels refuse operands whose types say how
    # they vary over a mesh, so the types are replaced by plain ones.
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        lower = mlir.lower_fun(run, multiple_results=False)
        return lower(ctx.replace(avals_in=plain), *operands)


mlir.register_lowering(patch_embed_p, _lower)
mlir.register_lowering(patch_embed_p, functools.partial(_lower, platform="cuda"), platform="cuda")
