"""Runners, functions that run each backend on this machine's GPU, an interpreter or the emulator.

A runner is a function of the operands (patches, weight, scale, table) and the output's dtype. It
raises NotImplementedError if its kernel does not serve them. For interpreters and the emulator a
chip has few multiprocessors, so that a worker can have several tiles.
"""

import functools
from collections.abc import Callable
from unittest import mock

import jax
import pytest

from pallas_patch_embed.backends import BACKENDS, cuda_build, xla
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base.chips import A100, B200, H200, Target
from pallas_patch_embed.base.problem import Problem
from tests.kernels import two_blocks
from tests.kernels.gpu import gpu
from tests.kernels.interpreter import check_wgmma, interpreted
from tests.operator.planned import compute, few


def run_xla(operands, out_dtype):
    return compute(xla, *operands, out_dtype=out_dtype, target=Target("cpu"))


def run_mosaic_sm90(operands, out_dtype):
    with pytest.MonkeyPatch.context() as patch:
        check_wgmma(patch)
        return interpreted(SM90, operands, out_dtype, few(H200, 4), HopperConfig(64, 4))


def run_mosaic_sm100(operands, out_dtype, collective):
    """If `collective`, clusters of two blocks multiply a tile together, otherwise single blocks."""
    if not two_blocks.KNOWN:
        pytest.skip(two_blocks.UNKNOWN)
    config = BlackwellConfig(64, 4, collective=collective)
    with pytest.MonkeyPatch.context() as patch:
        two_blocks.install(patch)
        return interpreted(SM100, operands, out_dtype, few(B200, 8), config)


run_mosaic_sm100_two_blocks = functools.partial(run_mosaic_sm100, collective=True)
run_mosaic_sm100_one_block = functools.partial(run_mosaic_sm100, collective=False)


def run_ptx(operands, out_dtype, chip, **config):
    """Executes the PTX of a chip's CUDA kernel, compiled by nvcc, on the emulator."""
    if reason := cuda_build.find_nvcc()[1]:
        pytest.skip(reason)
    from tests.kernels import emulated_cuda

    patches, weight, _, table = operands
    case = emulated_cuda.CudaCase(
        patches.shape,
        weight.shape[0],
        patches.dtype.name,
        "none" if table.ndim == 1 else "shared",
        out_dtype=out_dtype,
        capability=10 * chip.capability[0],
        **config,
    )
    case.config.check(Problem.of(*operands, out_dtype=out_dtype), chip)
    return emulated_cuda.run(emulated_cuda.compiled(case), case, operands)[0]


def run_cuda_sm90(operands, out_dtype):
    slots = 16 if operands[0].dtype == "bfloat16" else 8
    return run_ptx(operands, out_dtype, H200, tile_n=64, slots=slots)


def run_cuda_sm100(operands, out_dtype):
    slots = 7 if operands[0].dtype == "bfloat16" else 8
    return run_ptx(operands, out_dtype, B200, tile_n=64, slots=slots, rows=128, blocks=2)


def run_triton(operands, out_dtype):
    pytest.importorskip("triton", reason="triton is missing: the extra codegen installs it")
    from pallas_patch_embed.backends import triton
    from pallas_patch_embed.backends.triton import interpreted

    config = triton.TritonConfig(32, 32, 64, warps=4, stages=2, programs=1)
    with mock.patch.object(triton, "_call", lambda: interpreted.call):
        return compute(triton, *operands, out_dtype=out_dtype, target=few(A100, 2), config=config)


def on_gpu(name: str) -> Callable:
    """Returns a runner that uses this machine's GPU."""

    def run(operands, out_dtype):
        backend, target = BACKENDS[name], Target.of(gpu())
        small = Problem((1, 64, 128), (64, 128), (64,), (64, 64), "int8", "bfloat16", "bfloat16")
        try:
            backend.plan(small, target)
        except NotImplementedError as reason:
            pytest.skip(f"{name}: {reason}")
        with jax.default_device(gpu()):
            operands = jax.device_put(operands, gpu())
            return compute(backend, *operands, out_dtype=out_dtype, target=target)

    return run


RUNNERS = [
    pytest.param(run_xla, id="xla"),
    pytest.param(run_mosaic_sm90, id="mosaic_sm90 interpreted"),
    pytest.param(run_mosaic_sm100_two_blocks, id="mosaic_sm100 interpreted, two blocks"),
    pytest.param(run_mosaic_sm100_one_block, id="mosaic_sm100 interpreted, one block"),
    pytest.param(run_cuda_sm90, id="PTX of cuda's sm90 emulated", marks=pytest.mark.codegen),
    pytest.param(run_cuda_sm100, id="PTX of cuda's sm100 emulated", marks=pytest.mark.codegen),
    pytest.param(run_triton, id="triton interpreted", marks=pytest.mark.codegen),
    *(
        pytest.param(
            on_gpu(name),
            id=f"{name} on a GPU",
            marks=[pytest.mark.gpu, pytest.mark.skipif(gpu() is None, reason="no GPU")],
        )
        for name in BACKENDS
    ),
]
