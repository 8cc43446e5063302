"""jax's matrix product for Blackwell, compiled for sm_100a without a GPU.

  python tests/kernels/jax_kernels.py NAME FOLDER

This program compiles one case into a folder. It is a separate process because the compilers read
their settings when JAX is imported.
"""

import contextlib
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np

from tests.repository import environment


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A case of jax's blackwell_matmul_mgpu: shape (M, N, K), and arguments of its TuningConfig.

    `cluster_axes` are passed to its dynamic_scheduling_loop, whose documentation requires them; the
    kernel itself does not pass them. With `synchronised`, all warps of a warpgroup finish reading
    before one of them arrives for all at a barrier of the cluster (docs/upstream.md). With
    `scoped`, arrivals at the other block's barriers have the scope of the cluster; without one, PTX
    orders memory only within a block.
    """

    dtype: str
    shape: tuple[int, int, int]
    tile: tuple[int, int, int]
    max_concurrent_steps: int
    epilogue_tile_n: int
    collective: bool = False
    cluster_axes: tuple[str, ...] = ()
    synchronised: bool = False
    scoped: bool = False
    grid_minor_dim: str = "N"
    grid_tile_width: int = 1

    def function(self):
        """Returns jax's kernel with this config."""
        from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as matmul

        config = matmul.TuningConfig(
            *self.tile,
            max_concurrent_steps=self.max_concurrent_steps,
            collective=self.collective,
            epilogue_tile_n=self.epilogue_tile_n,
            grid_minor_dim=matmul.MatmulDimension[self.grid_minor_dim],
            grid_tile_width=self.grid_tile_width,
        )
        return functools.partial(matmul.matmul_kernel, config=config)

    @contextlib.contextmanager
    def corrected(self) -> Iterator[None]:
        """Applies these corrections to jax's kernel while the `with` block runs."""
        import jax.experimental.pallas.mosaic_gpu as plgpu
        from jax.experimental.mosaic.gpu import utils

        loop = functools.partial(plgpu.dynamic_scheduling_loop, cluster_axes=self.cluster_axes)
        arrive = utils.CollectiveBarrierRef.arrive

        def arrive_together(barrier, **options):
            utils.warpgroup_barrier()
            arrive(barrier, **options)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(plgpu, "dynamic_scheduling_loop", loop))
            if self.synchronised:
                together = mock.patch.object(utils.CollectiveBarrierRef, "arrive", arrive_together)
                stack.enter_context(together)
            yield

    def draw(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws operands; returns them and the expected result."""
        generator, (M, N, K) = np.random.default_rng(seed), self.shape
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        # Most numbers are 0, so that sums stay small: float8 cannot represent odd numbers above 15.
        share = 3 / K if dtype.itemsize == 1 else 0.3
        a, b = (
            generator.integers(-2, 3, shape) * (generator.random(shape) < share)
            for shape in ((M, K), (K, N))
        )
        result = (a @ b).astype(dtype)
        assert (result.astype(np.int64) == a @ b).all()
        return a.astype(dtype), b.astype(dtype), result


two = functools.partial(
    Matmul, collective=True, cluster_axes=("x",), synchronised=True, scoped=True
)

MATMULS = {
    "one block, float16": Matmul("float16", (256, 256, 256), (128, 128, 64), 2, 64),
    "one block, bfloat16, all of tensor memory": Matmul(
        "bfloat16", (256, 512, 128), (128, 256, 64), 2, 32
    ),
    "one block, float8": Matmul("float8_e4m3fn", (256, 256, 256), (128, 128, 128), 2, 64),
    "one block, bfloat16, narrow tiles of K": Matmul(
        "bfloat16", (384, 256, 128), (128, 64, 32), 3, 64, grid_minor_dim="M", grid_tile_width=2
    ),
    "two blocks, float16": two(
        "float16", (512, 512, 256), (128, 128, 64), 4, 64, grid_minor_dim="M", grid_tile_width=2
    ),
    "two blocks, bfloat16": two("bfloat16", (512, 256, 192), (128, 64, 64), 2, 32),
    "two blocks, bfloat16, narrow tiles": two("bfloat16", (512, 128, 128), (128, 32, 32), 3, 16),
}

# The kernel as in jax 0.11.2 and 0.12.0, without one of the corrections.
BROKEN = {
    "two blocks, no cluster_axes": dataclasses.replace(
        MATMULS["two blocks, bfloat16"], cluster_axes=()
    ),
    "two blocks, not synchronised": dataclasses.replace(
        MATMULS["two blocks, bfloat16"], synchronised=False
    ),
    "two blocks, no scope": dataclasses.replace(MATMULS["two blocks, bfloat16"], scoped=False),
}


def compiled(name: str, folder: Path) -> Path:
    """Compiles a case in a separate process; returns the stem of its files."""
    stem = folder / "kernel"
    command = [sys.executable, "-m", __name__, name, stem]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    ptx = stem.with_suffix(".ptx")
    if (MATMULS | BROKEN)[name].scoped:
        scope = "mbarrier.arrive.release.cluster.shared::cluster.b64"
        ptx.write_text(ptx.read_text().replace("mbarrier.arrive.shared::cluster.b64", scope))
    return stem


def main(name: str, stem: Path) -> None:
    """Compiles a case."""
    from benchmarks import offline_compile

    with offline_compile.compiler():
        import jax

        matmul = (MATMULS | BROKEN)[name]
        M, N, K = matmul.shape
        shapes = [jax.ShapeDtypeStruct(shape, matmul.dtype) for shape in ((M, K), (K, N))]
        chip = offline_compile.CHIPS["b200"]
        with matmul.corrected():
            offline_compile.dump_kernel(matmul.function(), tuple(shapes), chip, stem)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
