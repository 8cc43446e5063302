"""Shows that Triton's interpreter truncates to bfloat16 and multiplies the bits of bfloat16.

Needs only triton and numpy. docs/upstream.md explains the fault.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.language as tl


@triton.jit
def rounds_to_bfloat16():
    # This number is halfway between 1.0078125 and 1.015625. The last bit of the latter is even.
    tie = tl.full((1,), 1.01171875, tl.float32)
    tl.device_print("1.01171875 to bfloat16, 1.015625 expected", tie.to(tl.bfloat16).to(tl.float32))
    above = tl.full((1,), 1.00390625 + 2.0**-12, tl.float32)
    tl.device_print(
        "a little above 1.00390625 to bfloat16, 1.0078125 expected",
        above.to(tl.bfloat16).to(tl.float32),
    )


@triton.jit
def multiplies_bfloat16():
    one = tl.full((16, 16), 1.0, tl.float32).to(tl.bfloat16)
    tl.device_print("16 products of 1 and 1, 16 expected", tl.max(tl.max(tl.dot(one, one), 0), 0))


@triton.jit
def fused_multiply_add():
    x = tl.full((1,), 1.0 + 2.0**-12, tl.float32)
    y = tl.full((1,), -(1.0 + 2.0**-11), tl.float32)
    tl.device_print("fma, 5.9604645e-08 expected", tl.fma(x, x, y))


@triton.jit
def loop_with_bound():
    for i in range(0, tl.num_programs(0)):
        tl.device_print("a loop over range(0, num_programs)", i)


if __name__ == "__main__":
    print(f"triton {triton.__version__}, numpy {np.__version__}", flush=True)
    for kernel in (rounds_to_bfloat16, multiplies_bfloat16, fused_multiply_add, loop_with_bound):
        try:
            kernel[(1,)]()
        except Exception as error:
            print(f"{kernel.fn.__name__}: {type(error).__name__}: {error}")
