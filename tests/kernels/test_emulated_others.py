"""The emulator executes kernels of jax and Triton that are known to run on Blackwell.

The data are small integers, so results are exact in any order of summation.
"""

import re
from pathlib import Path

import pytest

from tests.kernels.jax_kernels import BROKEN, MATMULS, Matmul, compiled
from tests.operator.bounds import assert_bit_equal
from tests.ptx_emulator import mosaic
from tests.ptx_emulator import triton as triton_launch
from tests.ptx_emulator.errors import RaceError
from tests.ptx_emulator.machine import EAGER

try:
    from tests.kernels import triton_kernels
except ImportError:
    triton_kernels = None

SCHEDULES = (("eager", 0), ("late", 1), ("random", 2), (EAGER | {"arrival": "late"}, 5))

# Warnings that the emulator reports for these kernels (its README says why).
JAX_ALLOWED = frozenset({"signal that nobody waits for"}) | frozenset(
    {"descriptor version", "used before wait::ld", "exit before a store's read"}
)
TRITON_ALLOWED = frozenset({"signal that nobody waits for"}) | frozenset(
    {"no tcgen05.fence", "same value stored", "unfenced mbarrier.init", "used before wait::ld"}
)

needs_codegen = pytest.mark.usefixtures("compilers")
needs_triton = pytest.mark.usefixtures("triton_package")


def run(stem: Path, matmul: Matmul, **options) -> None:
    """Executes a compiled kernel of jax and compares its result."""
    a, b, expected = matmul.draw(seed=options["seed"])
    result = (expected.shape, expected.dtype)
    machine, (address,) = mosaic.prepare(stem, [a, b], [result], allowed=JAX_ALLOWED, **options)
    machine.launch()
    assert_bit_equal(machine.memory.read(address, *result), expected)


@needs_codegen
@pytest.mark.parametrize("name", MATMULS)
def test_jaxs_matmul_is_exact_in_every_schedule(tmp_path, name):
    stem = compiled(name, tmp_path)
    for schedule, seed in SCHEDULES:
        run(stem, MATMULS[name], schedule=schedule, seed=seed)


@needs_codegen
@pytest.mark.parametrize("name", BROKEN)
def test_jaxs_matmul_of_two_blocks_overwrites_the_number_of_the_next_tile(tmp_path, name):
    """Both blocks request a tile, and each answer is written to both blocks.

    One warp of four arrives before the other three have read the answer (docs/upstream.md).
    """
    stem = compiled(name, tmp_path)
    found = []
    for schedule, seed in SCHEDULES:
        try:
            run(stem, BROKEN[name], schedule=schedule, seed=seed)
        except RaceError as error:
            found.append(str(error))
    assert found
    assert all(re.search(r"the try_cancel of line \d+ overwrites", message) for message in found)


@needs_triton
@pytest.mark.parametrize("name", triton_kernels.CASES if triton_kernels else ["none"])
def test_tritons_kernel_is_exact_in_every_schedule(monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    case = triton_kernels.CASES[name]
    kernel = case.compiled()
    assert "tcgen05.mma" in kernel.asm["ptx"]
    for schedule, seed in SCHEDULES:
        *operands, result = case.draw(seed)
        numbers = case.shape[1:] if case.kernel is triton_kernels.chained else case.shape
        machine, addresses = triton_launch.prepare(
            kernel,
            case.grid,
            [*operands, result, *numbers],
            schedule=schedule,
            seed=seed,
            allowed=TRITON_ALLOWED,
        )
        machine.launch()
        found = machine.memory.read(addresses[-1], result.shape, result.dtype)
        assert_bit_equal(found, case.expected(*operands))
