"""Shows the faults that the emulator finds in jax's matrix product for Blackwell with two blocks.

Compiles jax's kernel for sm_100a, without a GPU, and executes the PTX in the emulator of this
repository. Needs the extra `codegen`. docs/upstream.md explains the fault.
"""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from tests.kernels.jax_kernels import BROKEN, MATMULS, Matmul, compiled
from tests.ptx_emulator import mosaic
from tests.ptx_emulator.errors import EmulatorError

# This kernel needs these exceptions from the emulator's checks (tests/ptx_emulator/README.md).
ALLOWED = frozenset({"signal that nobody waits for", "descriptor version", "used before wait::ld"})
SCHEDULES = (("eager", 0), ("late", 1), ("random", 2))

# The unchanged kernel, the kernel with one of two corrections, and the kernel with both.
CASES = {
    "without cluster_axes": BROKEN["two blocks, no cluster_axes"],
    "with cluster_axes, but no barrier before the arrival": BROKEN["two blocks, not synchronised"],
    "with both": MATMULS["two blocks, bfloat16"],
}
NAMES = {id(matmul): name for name, matmul in (MATMULS | BROKEN).items()}


def execute(stem: Path, matmul: Matmul, allowed: frozenset[str]) -> None:
    """Prints the emulator's result in each schedule."""
    for schedule, seed in SCHEDULES:
        a, b, expected = matmul.draw(seed)
        result = (expected.shape, expected.dtype)
        options = dict(schedule=schedule, seed=seed, allowed=allowed)
        machine, (address,) = mosaic.prepare(stem, [a, b], [result], **options)
        try:
            machine.launch()
        except EmulatorError as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            exact = (machine.memory.read(address, *result) == expected).all()
            found = "exact" if exact else "wrong values"
        print(f"  {schedule}: {found}")


def main() -> None:
    print(f"jax {jax.__version__}")
    for title, matmul in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            stem = compiled(NAMES[id(matmul)], Path(folder))
            print(title)
            execute(stem, matmul, ALLOWED)
            ptx = stem.with_suffix(".ptx").read_text()
            if title == "with both":
                print("the same, and the version of matrix descriptors is checked")
                execute(stem, matmul, ALLOWED - {"descriptor version"})
    waits = re.findall(r"cp\.async\.bulk\.wait_group\S*\s+\d+", ptx)
    print("the last wait for stores before the kernel ends:", " ".join(waits[-1].split()))


if __name__ == "__main__":
    main()
