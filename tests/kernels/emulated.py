"""The Pallas kernels whose compiled PTX the emulator executes.

  python tests/kernels/emulated.py BACKEND

This program compiles the cases of a backend that standard input names. It is a separate process
because the compilers read their settings when JAX is imported.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from tests.ptx_emulator.machine import EAGER
from tests.repository import environment

# Number of multiprocessors of the emulated GPU, small enough for more tiles than workers.
MULTIPROCESSORS = 4

# Schedules of asynchronous work, each with a seed for random choices. A correct protocol passes
# with all of them. With late arrivals and everything else eager, an arrival at a block that exits
# too early comes after its exit.
SCHEDULES = (
    ("eager", 0),
    ("late", 1),
    ("random", 2),
    (EAGER | {"arrival": "late"}, 5),
    ("random", 3),
    ({"load": "eager", "multiply": "late", "store": "late", "write": "late"}, 4),
)
# The schedules of a case by its number: one, another for the next case, or all.
ONE_OR_ALL = pytest.mark.parametrize(
    "schedules_of",
    [
        lambda number: [SCHEDULES[number % len(SCHEDULES)]],
        pytest.param(
            lambda _: SCHEDULES,
            marks=pytest.mark.exhaustive("it takes about 20 minutes on one core"),
        ),
    ],
    ids=["one schedule", "all schedules"],
)
# Warnings that do not indicate a fault of the kernels (the emulator's README says why).
ALLOWED = frozenset({"descriptor version", "moved before wait::ld"})


@dataclasses.dataclass(frozen=True)
class PallasCase:
    """A Pallas kernel for small operands.

    `config` and `options` are arguments of its config, `epilogue` those of its `Epilogue`.
    """

    backend: str
    patches: tuple[int, ...]
    N: int
    dtype: str
    table: str
    config: tuple
    options: tuple[tuple[str, object], ...] = ()
    out_dtype: str = "bfloat16"
    epilogue: tuple = ()

    @property
    def served_by(self):
        """Returns the backend."""
        from pallas_patch_embed.backends import BACKENDS

        return BACKENDS[self.backend]

    @property
    def chosen(self):
        """Returns the kernel's config."""
        from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
        from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig

        config = HopperConfig if self.backend == "mosaic_sm90" else BlackwellConfig
        return config(*self.config, **dict(self.options))

    @property
    def target(self):
        """Returns the kernel's chip, with few multiprocessors."""
        from pallas_patch_embed.base.chips import B200, H200
        from tests.operator.planned import few

        return few(H200 if self.backend == "mosaic_sm90" else B200, MULTIPROCESSORS)

    def function(self):
        """Returns the operator computed by this kernel."""
        from pallas_patch_embed.base.problem import Epilogue
        from tests.operator.planned import compute

        choices = dict(out_dtype=self.out_dtype, target=self.target, config=self.chosen)
        epilogue = Epilogue(*self.epilogue)
        return functools.partial(compute, self.served_by, epilogue=epilogue, **choices)

    def draw(self, seed):
        """Draws operands whose result is exact."""
        from pallas_patch_embed.base.problem import Epilogue
        from tests.kernels.interpreter import draw_epilogue, draw_operands, stack_parts

        def draw(seed):
            operands = draw_operands(seed, self.patches, self.N, self.dtype, self.table)
            return (*operands, *draw_epilogue(seed, self.patches, self.N, self.epilogue))

        if parts := Epilogue(*self.epilogue).parts:
            return stack_parts([draw(seed + part) for part in range(3 * parts)], self.epilogue)
        return draw(seed)


def case(backend, patches, N, dtype, table, *config, out="bfloat16", epilogue=(), **options):
    """Makes a case; `config` and `options` are the arguments of the kernel's config."""
    options = tuple(options.items())
    return PallasCase(backend, patches, N, dtype, table, config, options, out, epilogue)


# Cases of Blackwell kernels with clusters of two blocks and with single blocks, and of Hopper's.
two = functools.partial(case, "mosaic_sm100")
one = functools.partial(two, collective=False)
hopper = functools.partial(case, "mosaic_sm90")

BF16, FP8, INT8 = "bfloat16", "float8_e4m3fn", "int8"

CASES = {
    "two blocks, int8": two((4, 72, 768), 256, INT8, "shared", 256, 6, buffers=1),
    "two blocks, float8": two((3, 97, 256), 256, FP8, "shared", 256, 4),
    "two blocks, bfloat16": two((5, 72, 256), 128, BF16, "shared", 128, 4),
    "two blocks, M % 8 = 3": two((3, 97, 256), 128, INT8, "shared", 128, 4),
    "two blocks, M % 8 = 7, float8": two((1, 511, 128), 64, FP8, "shared", 64, 4),
    "two blocks, a tail in the first block": two((3, 100, 256), 128, FP8, "shared", 128, 4),
    "two blocks, a phase change in a worker": two((16, 97, 128), 64, INT8, "shared", 64, 3),
    "two blocks, all barriers and buffers used again": two(
        (15, 97, 256), 64, INT8, "shared", 64, 3
    ),
    "two blocks, segments of several tiles": two((20, 160, 256), 64, INT8, "shared", 64, 3),
    "two blocks, more tiles than slots": two((9, 256, 128), 64, FP8, "shared", 64, 2),
    "two blocks, streamed weight": two(
        (5, 72, 512), 128, BF16, "shared", 128, 4, stream_weight=True
    ),
    "two blocks, streamed weight, K = 3072": two(
        (1, 197, 3072), 128, INT8, "none", 128, 4, stream_weight=True
    ),
    "two blocks, streamed weight, two stores a tile": two(
        (11, 97, 256), 128, FP8, "none", 128, 3, stream_weight=True, out="float32"
    ),
    "two blocks, K = 640": two((5, 97, 640), 128, INT8, "shared", 128, 4),
    "two blocks, 197 rows an image, as CLIP has": two((2, 197, 256), 128, INT8, "shared", 128, 4),
    "two blocks, K = 1280, as Qwen2-VL has": two((1, 99, 1280), 64, INT8, "none", 64, 4),
    "two blocks, N = 1152": two((1, 201, 128), 1152, FP8, "shared", 192, 4),
    "two blocks, float32": two((4, 72, 128), 256, INT8, "shared", 256, 4, out="float32"),
    "two blocks, bfloat16 to float32": two((3, 97, 256), 128, BF16, "none", 128, 4, out="float32"),
    "two blocks, per-image positions": two((7, 75, 128), 128, INT8, "per image", 128, 4),
    "two blocks, no table": two((5, 72, 256), 128, FP8, "none", 128, 4),
    "one block, int8": one((3, 97, 256), 128, INT8, "shared", 128, 4),
    "one block, float8": one((3, 97, 384), 128, FP8, "shared", 128, 4),
    "one block, bfloat16": one((3, 97, 256), 64, BF16, "shared", 64, 4),
    "one block, more tiles than slots": one((9, 128, 128), 64, INT8, "shared", 64, 2),
    "one block, streamed weight": one((3, 97, 640), 128, FP8, "shared", 128, 4, stream_weight=True),
    "one block, float32": one((3, 97, 128), 64, INT8, "shared", 64, 4, out="float32"),
    "one block, per-image positions": one((5, 75, 128), 64, FP8, "per image", 64, 4),
    "one block, segments of several tiles, two slices": one(
        (9, 160, 128), 128, BF16, "shared", 64, 3
    ),
    "one block, N = 1152, K = 640": one((1, 100, 640), 1152, INT8, "none", 192, 4),
    "two blocks, rows' scales and a residual": two(
        (5, 73, 384), 128, INT8, "none", 128, 4, epilogue=("", True, True)
    ),
    "two blocks, int8 levels, 96 columns of a warpgroup": two(
        (3, 97, 256), 192, INT8, "none", 192, 4, out=INT8, epilogue=("", True, False, True)
    ),
    "two blocks, float8 levels, the second layer": two(
        (3, 97, 256), 256, FP8, "none", 256, 4, out=FP8, epilogue=("", True, False, True, 2)
    ),
    "one block, an activation, the second layer": one(
        (3, 73, 512),
        *(128, BF16, "none", 64, 4),
        stream_weight=True,
        epilogue=("relu", False, True, False, 1),
    ),
    "Hopper, int8": hopper((5, 73, 384), 192, INT8, "shared", 192, 8),
    "Hopper, float8": hopper((9, 97, 256), 128, FP8, "shared", 128, 4),
    "Hopper, a loop over chunks": hopper((5, 73, 2048), 64, INT8, "shared", 64, 5),
    "Hopper, a loop over all chunks but the ends": hopper(
        (3, 73, 1792), 64, INT8, "shared", 64, 5, stream_weight=True
    ),
    "Hopper, bfloat16": hopper(
        (5, 73, 256), 192, BF16, "shared", 192, 5, rows=128, stream_weight=True
    ),
    "Hopper, float32": hopper((5, 73, 256), 64, INT8, "none", 64, 4, out="float32"),
    "Hopper, per-image positions": hopper((5, 75, 128), 64, BF16, "per image", 64, 4),
    "Hopper, rows' scales and a residual": hopper(
        (5, 73, 384), 128, INT8, "none", 128, 4, epilogue=("", True, True)
    ),
    "Hopper, int8 levels": hopper(
        (3, 73, 256), 128, INT8, "none", 64, 4, out="int8", epilogue=("", True, False, True, 2)
    ),
    "Hopper, float8 levels": hopper(
        (3, 73, 256), 128, FP8, "none", 128, 4, out=FP8, epilogue=("", True, False, True, 2)
    ),
    "Hopper, one consumer": hopper((7, 73, 256), 64, INT8, "shared", 64, 4, consumers=1),
    "Hopper, one consumer and a residual": hopper(
        *((3, 173, 512), 128, BF16, "none", 128, 4),
        consumers=1,
        stream_weight=True,
        epilogue=("", False, True),
    ),
    "Hopper, three consumers": hopper((7, 73, 256), 64, INT8, "shared", 64, 5, consumers=3),
    "Hopper, three consumers and levels": hopper(
        *((3, 173, 256), 128, INT8, "none", 64, 4),
        consumers=3,
        out="int8",
        epilogue=("relu", True, False, True, 2),
    ),
    "Hopper, an activation": hopper(
        (3, 73, 512), 128, BF16, "none", 64, 4, stream_weight=True, epilogue=("relu", False, True)
    ),
}

# The cases that also run on a Hopper GPU.
HOPPER = [name for name, case in CASES.items() if case.backend == "mosaic_sm90"]

# K, N and config of B/16 as in production, with 196 and 576 positions. There are enough images for
# a worker to have 1568 or 2880 rows, with several phases of the table and a partial last tile.
LONG = {
    "B/16, 196 positions": two((8, 196, 768), 768, FP8, "shared", 256, 4),
    "B/16, 576 positions": two((5, 576, 768), 768, INT8, "shared", 256, 4),
}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Makes the folder for compiled cases, which is deleted when this process ends."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _compiler(backend: str) -> subprocess.Popen:
    """Starts the process that compiles the cases of a backend; it ends when this process ends."""
    command = [sys.executable, "-m", __name__, backend]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return subprocess.Popen(command, text=True, env=environment(), **pipes)


@functools.cache
def compiled(name: str) -> Path:
    """Compiles a case and returns the stem of its files. Each case is compiled once."""
    stem = Path(tempfile.mkdtemp(dir=_folder().name), "kernel")
    process = _compiler((CASES | LONG)[name].backend)
    print(json.dumps([name, str(stem)]), file=process.stdin, flush=True)
    if problem := json.loads(process.stdout.readline() or '"the compilers crashed"'):
        raise RuntimeError(f"{name}: {problem}")
    return stem


def emulated(stem: Path, case: PallasCase, operands, **options):
    """Runs a compiled kernel on the emulator; returns the operator's result and the machine.

    `options` are those of `mosaic.prepare`.
    """
    import jax.numpy as jnp
    import numpy as np

    from tests.ptx_emulator import mosaic

    machines = []

    def make(config, tiling, problem, interpret, trace):
        def run(*arguments):
            arrays = [np.asarray(x) for x in arguments]
            shape = (problem.rows, problem.columns)
            results = [(shape, jnp.dtype(problem.out_dtype))] * problem.outputs
            machine, addresses = mosaic.prepare(stem, arrays, results, **options)
            machines.append(machine)
            machine.launch()
            found = [
                jnp.asarray(machine.memory.read(address, *result))
                for address, result in zip(addresses, results)
            ]
            return found[0] if problem.outputs == 1 else tuple(found)

        return run

    with mock.patch.object(case.served_by.kernel, "make", make):
        return case.function()(*operands), machines[0]


def main(backend: str) -> None:
    """Compiles cases; each line of standard input has a case's name and the stem of its files.

    Answers each line with the error, or null.
    """
    from benchmarks import offline_compile

    with offline_compile.compiler():
        import jax

        chip = offline_compile.CHIPS["h200" if backend == "mosaic_sm90" else "b200"]
        for line in sys.stdin:
            name, stem = json.loads(line)
            case, problem = (CASES | LONG)[name], None
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.draw(0)]
            try:
                offline_compile.dump_kernel(case.function(), tuple(shapes), chip, Path(stem))
            except Exception as error:
                problem = repr(error)
            print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
