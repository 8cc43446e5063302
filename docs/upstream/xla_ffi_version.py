"""Shows that a handler of a newer FFI version is registered without an error but disables XLA.

Compiles a handler that reports a version one minor version newer than that of the jaxlib. Needs
only jax and a C compiler. docs/upstream.md explains the fault.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import jax

HANDLER = """
#include <stddef.h>
#include "xla/ffi/api/c_api.h"

XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata =
        ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR + 1;
    metadata->traits = 0;
  }
  return NULL;
}
"""


def compile_handler(folder: Path) -> ctypes.CDLL:
    """Compiles the handler with the headers of the installed jaxlib."""
    source, library = folder / "handler.c", folder / "handler.so"
    source.write_text(HANDLER)
    command = ["cc", "-shared", "-fPIC", "-I", jax.ffi.include_dir(), source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def main() -> None:
    print(f"jax {jax.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        handler = jax.ffi.pycapsule(compile_handler(Path(folder)).handler)
        jax.ffi.register_ffi_target("too_new", handler, platform="cpu")
        print("  register_ffi_target returned without an error")
        try:
            print(" ", jax.numpy.zeros(1))
        except RuntimeError as error:
            print(f"  jnp.zeros(1): {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
