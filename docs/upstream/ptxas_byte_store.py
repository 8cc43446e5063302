"""Shows that ptxas of CUDA 12.8 to 13.0 converts a float32 where it should store its low byte.

  python docs/upstream/ptxas_byte_store.py [PTXAS [NVDISASM]]

Needs no GPU. docs/upstream.md explains the fault.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The register has no type but a size, and st.b8 stores its low byte.
PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [x];
    ld.param.b64 %rd2, [y];
    ld.global.b32 %r1, [%rd1];
    add.rn.f32 %r2, %r1, 0f4B400000;
    st.global.b8 [%rd2], %r2;
    ret;
}
"""


def main() -> None:
    given = sys.argv[1:]
    ptxas, nvdisasm = [*given, *("ptxas", "nvdisasm")[len(given) :]]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(PTX)
        subprocess.run([ptxas, "-arch=sm_90a", source, "-o", cubin], check=True)
        run = dict(capture_output=True, text=True, check=True)
        version = subprocess.run([ptxas, "--version"], **run).stdout
        code = subprocess.run([nvdisasm, "-c", cubin], **run).stdout
    print(re.search(r"release.*", version)[0])
    for instruction in re.findall(r"(?:FADD|F2I|STG)[^;]*", code):
        print("   ", instruction.strip())


if __name__ == "__main__":
    main()
