"""Shows that plgpu.warp_map cannot be lowered in a shard_map that checks varying manual axes.

Needs only jax, and no GPU. docs/upstream.md explains the fault.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def by_warpgroup(x, y, memory, arrived):
    plgpu.copy_gmem_to_smem(x, memory, arrived)
    plgpu.barrier_wait(arrived)
    y[...] = memory[...]


def by_one_warp(x, y, memory, arrived):
    @plgpu.warp_map
    def copy(warp):
        @pl.when(warp == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, memory, arrived)

    plgpu.barrier_wait(arrived)
    y[...] = memory[...]


def lower(kernel, check_vma: bool) -> str:
    """Lowers a kernel for a GPU inside a shard_map over one device. Returns the outcome."""

    def call(x):
        axes = dict(manual_axis_type=jax.typeof(x).manual_axis_type) if check_vma else {}
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((128,), jnp.float32, **axes),
            scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        )(x)

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec("x")
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    try:
        jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",))
    except ValueError as error:
        return f"{type(error).__name__}: {str(error).split(':')[0]}"
    return "lowers"


if __name__ == "__main__":
    print(f"jax {jax.__version__}")
    for kernel in (by_warpgroup, by_one_warp):
        for check_vma in (False, True):
            print(f"  {kernel.__name__}, check_vma={check_vma}: {lower(kernel, check_vma)}")
