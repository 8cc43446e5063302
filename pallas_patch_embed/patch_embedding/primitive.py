"""The JAX primitive: shapes, batching, differentiation, sharding and lowering of the operator.

Tracing the operator gives one equation of `patch_embed_p` with four operands, whose leading axes
broadcast as in numpy (see `Problem`). So vmap over an operand only adds a leading axis to it, and
nothing is copied. The first operand is patches [..., S, K], or, with a `geometry`, uint8 images
[..., H, W, C] or videos [..., F, H, W, C]; XLA cuts them into patches if the backend cannot. The
equation is partitioned over devices as follows:

  inside a shard_map                 it is lowered to the chosen backend
  explicit sharding                  `to_lojax`, which JAX calls just before lowering, makes it a
                                     shard_map whose specs come from the types
  automatic sharding                 on several devices it becomes a custom_partitioning with a
                                     Shardy rule
  automatic sharding, backend="xla"  XLA partitions it
"""

import functools
import importlib.util
import itertools
import warnings
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

from pallas_patch_embed.backends import choose, slow_dtype, xla
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.problem import PatchGeometry, Problem
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows

patch_embed_p = Primitive("patch_embed")


class Call(NamedTuple):
    """The only parameter of the primitive: all static arguments of the call.

    A jaxpr prints all parameters of an equation, so this one has a short repr.

    Attributes:
      out_dtype: "bfloat16" or "float32".
      geometry: geometry of the patches that are cut from uint8 images; None if patches are given.
      backend: the user's choice; None for the best backend that serves.
      cut: "kernel" if a kernel must cut the images; None if XLA may cut them.
      tuned: path of the user's file of measured configs, or None.
      devices: the jaxpr from `_needs_devices`, which makes JAX pass the devices to the lowering
        rule; None if the rule does not need them.
    """

    out_dtype: str
    geometry: PatchGeometry | None
    backend: str | None
    cut: str | None = None
    tuned: str | None = None
    devices: Any = None

    def __repr__(self) -> str:
        source = None if self.geometry is None else f"images/{self.geometry.patch_size}"
        cut = self.cut and f"cut={self.cut}"
        return ",".join(filter(None, (source, self.out_dtype, self.backend, cut)))


@functools.cache
def _needs_devices():
    """Returns a jaxpr that makes JAX pass the devices to the lowering rule of an equation.

    JAX passes them if it finds a primitive that needs the devices, such as custom_partitioning, in
    a program's equations or in a jaxpr among the parameters of an equation (also inside tuples).
    """
    split = custom_partitioning(lambda x: x)
    split.def_partition(None, sharding_rule="i -> i")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(split)(jax.ShapeDtypeStruct((1,), jnp.float32))


def patch_embed(
    source, weight, scale, table, *, backend, out_dtype, geometry, cut=None, tuned=None
) -> jax.Array:
    """Binds the primitive to its operands.

    Args:
      source: patches [..., S, K], or uint8 images [..., H, W, C] or videos [..., F, H, W, C].
      weight, scale, table: as for `backends.xla.run`.
      backend, out_dtype, geometry, cut, tuned: as in `Call`.
    """
    operands = (source, weight, scale, table)
    types = [jax.typeof(x) for x in operands]
    automatic = backend != "xla" and not _is_manual(types) and _explicit_mesh(types) is None
    devices = _needs_devices() if automatic else None
    call = Call(out_dtype, geometry, backend, cut, tuned, devices)
    return patch_embed_p.bind(*operands, call=call)


patch_embed_p.def_impl(functools.partial(apply_primitive, patch_embed_p))


# Type of the result: its shape and dtype, and its sharding under an explicit mesh.


@patch_embed_p.def_abstract_eval
def _result_type(*operands, call):
    mesh = _explicit_mesh(operands)
    if mesh is not None:
        shapes = [a.shape for a in operands]
        spec = _result_spec(shapes, [a.sharding.spec for a in operands], call.geometry)
        operands = tuple(a.update(sharding=_replicated(mesh, a.ndim)) for a in operands)
    avals = _with_patches(operands, call.geometry)
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


def _with_patches(avals, geometry: PatchGeometry | None) -> list:
    """Returns the operands' types with patches in place of images."""
    source, weight, *rest = avals
    if geometry is not None:
        shape = geometry.patches_shape(source.shape)
        sharding = _replicated(source.sharding.mesh, len(shape))
        source = source.update(shape=shape, dtype=weight.dtype, sharding=sharding)
    return [source, weight, *rest]


def _unsharded_axes(geometry: PatchGeometry | None) -> tuple:
    """Returns the axes that are never sharded, named as in `_axes`.

    They are K, and with images also S and all axes of an image.
    """
    return ("k",) if geometry is None else ("k", "f", "h", "w", "c", -2)


def _axes(shapes, geometry) -> list[list]:
    """Returns, for each axis of the four operands, the corresponding axis of the result.

    Axes of the result are counted from its end: S is -2, N is -1. Axes that the result does not
    have are "k" for K, "h", "w" and "c" for an image, and "f" for the frames of a video. A
    broadcast axis is None.
    """
    source, weight, scale, table = shapes
    patches = source if geometry is None else geometry.patches_shape(source)
    result = (*_leading(patches, weight, scale, table), patches[-2], weight[-2])
    of_one = [-2, "k"] if geometry is None else [*"fhwc"][-geometry.image_ndim :]
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


def _result_spec(shapes, specs, geometry) -> PartitionSpec:
    """Returns the result's sharding: each axis is sharded as in the operands that have it."""
    sides, whole = _axes(shapes, geometry), _unsharded_axes(geometry)
    # The result always has an axis S, but images and a table without positions have none.
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
            "patch_embed: the operands' shardings contradict each other: patches, weight, scale "
            f"and table are sharded as {', '.join(map(str, specs))}. Expected one sharding for "
            "each of the axes batch, S and N, and no mesh axis for two of them. Change the "
            "shardings with jax.sharding.reshard."
        )
    return PartitionSpec(*(names[0] if names else None for names in found.values()))


def _mesh_axes(names) -> list:
    return [axis for name in names for axis in (name if isinstance(name, tuple) else (name,))]


def _operand_specs(shapes, result_spec, geometry) -> list[PartitionSpec]:
    """Returns the operands' shardings for a result that is sharded as `result_spec`.

    `result_spec` has an entry for every axis of the result.
    """
    names = tuple(result_spec)
    return [
        PartitionSpec(*(names[axis] if isinstance(axis, int) else None for axis in axes))
        for axes in _axes(shapes, geometry)
    ]


# Differentiation is refused only if a derivative is used. JAX drops a tangent that nothing uses,
# for example after stop_gradient, before it transposes or lowers the tangent.

_tangent_p = Primitive("patch_embed_tangent")


def refuse_gradient(*_, **__):
    raise TypeError(
        "patch_embed is inference-only: it has no derivative. To keep it frozen inside a model "
        "that is differentiated, apply jax.lax.stop_gradient to its input or output; to train it, "
        "use jnp.dot on the unpacked kernel."
    )


_tangent_p.def_impl(refuse_gradient)
_tangent_p.def_abstract_eval(lambda tangent, result: result)
mlir.register_lowering(_tangent_p, refuse_gradient)
ad.primitive_jvps[_tangent_p] = refuse_gradient
ad.primitive_transposes[_tangent_p] = refuse_gradient


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
    """Returns y, which was computed from x through integers; differentiating it by x raises."""
    del x
    return y


@functools.partial(without_gradient.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    by_x, tangent = tangents
    if isinstance(tangent, SymbolicZero) and not isinstance(by_x, SymbolicZero):
        tangent = _tangent_p.bind(by_x, lax.stop_gradient(primals[1]))
    return primals[1], tangent


# The rule for vmap.


def _batch(operands, axes, *, call):
    # Number of axes of each operand without leading axes: [S, K] or an image, [N, K], [N], [S, N].
    own = (2 if call.geometry is None else call.geometry.image_ndim, 2, 1, 2)
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


# The rules for explicit and automatic sharding.


def _explicitly(*operands, call):
    mesh = _explicit_mesh(map(jax.typeof, operands))
    shapes, geometry = [x.shape for x in operands], call.geometry
    result_spec = _result_spec(shapes, [jax.typeof(x).sharding.spec for x in operands], geometry)
    specs = _operand_specs(shapes, result_spec, geometry)
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}
    # Each device sums over all of K, so an operand that is sharded along K is gathered here.
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
        # A mesh is active, but no operand is sharded over it.
        bind = functools.partial(patch_embed_p.bind, call=call)
        return mesh, bind, result.sharding, (result.sharding,) * len(operands)
    if not isinstance(result.sharding, NamedSharding):
        raise ValueError(
            f"patch_embed: the result is sharded as {result.sharding}, expected a NamedSharding. "
            "Shard the inputs with jax.NamedSharding, or pass backend='xla'."
        )
    ndim, whole = len(result.shape), _unsharded_axes(call.geometry)
    names = itertools.zip_longest(range(-ndim, 0), result.sharding.spec)
    spec = PartitionSpec(*(None if axis in whole else name for axis, name in names))
    specs = _operand_specs([x.shape for x in operands], spec, call.geometry)

    def local(*operands):
        # An explicit mesh may be active while XLA compiles, so the primitive is bound without one.
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

    sides = _axes([tuple(x.shape) for x in operands], call.geometry)
    left = ", ".join(" ".join(map(factor, axes)) for axes in sides)
    right = " ".join(factor(axis) for axis in range(-len(results[0].shape), 0))
    # The axes in the order in which the rule mentions them.
    axes = dict.fromkeys(itertools.chain(*sides, [-2]))
    whole = tuple(factor(axis) for axis in axes if axis in _unsharded_axes(call.geometry))
    return f"{left} -> {right}", {"need_replication_factors": whole}


_automatically.def_partition(_partition, sharding_rule=_shardy_rule)


# The lowering rules.


@functools.cache
def _warn_once(text: str) -> None:
    """Warns, once in a process: every program that is lowered would repeat the warning."""
    warnings.warn(text, stacklevel=2)


def _check_serializable() -> None:
    """Refuses to export if the exported program could not be serialized.

    The error of `Exported.serialize` would not name the extra of this package that is missing.
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
    if automatic and lowering.devices_left_to_xla(module) > 1:
        return _lower_split(ctx, *operands, call=call)
    return _lower_whole(ctx, *operands, call=call, platform=platform)


def _lower_split(ctx, *operands, call):
    # custom_partitioning calls back into this process. An exported program cannot do that.
    if ctx.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            "patch_embed: a program with automatic sharding cannot be exported, because XLA would "
            "call back into Python to partition it. Use a mesh with explicit axes, jax.shard_map, "
            "or patch_embed(..., backend='xla')."
        )
    split = functools.partial(_automatically, call=call._replace(devices=None))
    return mlir.lower_fun(split, multiple_results=False)(ctx, *operands)


def _lower_whole(ctx, *operands, call, platform):
    out_dtype, geometry, backend, cut, tuned, _ = call
    module = ctx.module_context
    if backend not in (None, "xla") and len(module.platforms) > 1:
        raise NotImplementedError(
            f"patch_embed: backend {backend!r} cannot serve a program for several platforms, "
            f"{', '.join(module.platforms)}. Export the program for one platform, or leave "
            "backend=None."
        )
    problem = Problem.of(*ctx.avals_in, out_dtype=out_dtype, geometry=geometry)
    target = lowering.target_of(module, platform)
    if text := slow_dtype(problem, target):
        _warn_once(f"patch_embed: {text}")
    if lowering.devices_left_to_xla(module) == 1:
        option = choose(problem, target, backend, tuned, cut)
    elif backend in (None, "xla") and cut is None:
        option = choose(problem, target, "xla")
    else:
        raise NotImplementedError(
            f"patch_embed: backend {backend!r} and cut={cut!r} cannot serve inside a shard_map "
            "that leaves mesh axes to XLA. Make all axes of the mesh manual, or leave backend=None "
            "and cut=None."
        )

    def run(source, weight, *rest):
        if geometry is not None and not option.cuts_images:
            source = cut_into_rows(source, geometry, Encoding(weight.dtype.name))
        return option.plan.run(source, weight, *rest)

    with lowering.on_one_device(ctx) as plain:
        lower = mlir.lower_fun(run, multiple_results=False)
        return lower(plain, *operands)


mlir.register_lowering(patch_embed_p, _lower)
mlir.register_lowering(patch_embed_p, functools.partial(_lower, platform="cuda"), platform="cuda")
