"""Launches a kernel that Triton compiled, with the parameters and grid of Triton's driver.

The parameters include tensor maps and scratch memory.
"""

import math

import numpy as np

from tests.ptx_emulator.errors import UnsupportedError
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.memory import POISON, GlobalMemory
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.tma import SWIZZLE_BYTES, TensorMap

# The numpy types of numbers in a signature.
NUMBERS = ("i32", "i64")


def prepare(compiled, grid: tuple[int, ...], arguments, **options) -> tuple[Machine, list[int]]:
    """Prepares a machine to launch a kernel.

    Args:
      compiled: result of triton.compile.
      grid: number of programs in each dimension.
      arguments: the kernel's arguments in order, without constants. A pointer or a tensor
        descriptor is given as an array; the descriptor describes the whole array.
      options: keyword arguments of `Machine`.

    Returns:
      The machine, and the addresses of the arrays.
    """
    metadata = compiled.metadata
    kernel = parse(compiled.asm["ptx"], metadata.name)
    memory, addresses, values = GlobalMemory(), [], []
    descriptions = iter(metadata.tensordesc_meta)
    types = [name for name in compiled.src.signature.values() if name != "constexpr"]
    for argument_type, argument in zip(types, arguments, strict=True):
        if argument_type in NUMBERS:
            values.append(argument)
            continue
        address = memory.allocate(argument, f"argument {len(addresses)}")
        addresses.append(address)
        if argument_type.startswith("*"):
            values.append(address)
        elif argument_type.startswith("tensordesc<") and metadata.tensordesc_meta:
            # After the tensor map come the shape and the strides.
            strides = [step // argument.itemsize for step in argument.strides]
            name = f"argument {len(addresses)}"
            tensor_map = describe_array(argument, address, next(descriptions), name)
            values += [tensor_map, *argument.shape, *strides]
        else:
            raise UnsupportedError(f"an argument of type {argument_type} is not supported")
    grid = (*grid, 1, 1)[:3]
    programs = math.prod(grid) * metadata.num_ctas
    for size in (metadata.global_scratch_size, metadata.profile_scratch_size):
        scratch = np.full(programs * size, POISON, np.uint8)
        values.append(memory.allocate(scratch, "scratch memory") if size else 0)
    machine = Machine(
        kernel,
        (grid[0] * metadata.num_ctas, *grid[1:]),
        (32 * metadata.num_warps, 1, 1),
        (metadata.num_ctas, 1, 1),
        dynamic_shared=metadata.shared,
        memory=memory,
        **options,
    )
    for i, (value, parameter) in enumerate(zip(values, kernel.parameters, strict=True)):
        if isinstance(value, TensorMap):
            machine.set_parameter(i, bytes(parameter.size))
            machine.tensor_maps[machine.parameter_address(i)] = value
        else:
            machine.set_parameter(i, value)
    return machine, addresses


def describe_array(array: np.ndarray, address: int, description: dict, name: str) -> TensorMap:
    """Returns the tensor map of an array, for Triton's description of a tensor descriptor."""
    if description["fp4_padded"] or description["is_im2col"]:
        raise UnsupportedError(f"a tensor descriptor with {description} is not supported")
    if description["elem_size"] != array.itemsize:
        raise UnsupportedError(f"an array of {array.dtype} does not fit {description}")
    return TensorMap(
        base=address,
        itemsize=array.itemsize,
        dimensions=array.shape[::-1],
        strides=array.strides[::-1],
        box=tuple(description["block_size"][::-1]),
        swizzle=SWIZZLE_BYTES[description["swizzle"]],
        name=name,
    )
