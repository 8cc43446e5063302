"""Launches what Triton compiled, as its driver does: parameters, tensor maps, scratch memory."""

import math

import numpy as np

from ptx_emulator.errors import UnsupportedError
from ptx_emulator.machine import Machine
from ptx_emulator.memory import POISON, GlobalMemory
from ptx_emulator.parser import parse
from ptx_emulator.tma import TensorMap

# Triton's codes of swizzles: their bytes.
SWIZZLE = {0: 0, 1: 32, 2: 64, 3: 128}

NUMBERS = ("i32", "i64")


def prepare(compiled, grid: tuple[int, ...], arguments, **options) -> tuple[Machine, list[int]]:
    """A machine that is ready to launch a kernel.

    Args:
      compiled: what triton.compile returned.
      grid: programs in each dimension.
      arguments: arrays for pointers and for tensor descriptors, which describe all of an array, and
        numbers, in the order of the kernel's arguments that are no constants.
      options: of `Machine`.

    Returns:
      The machine, and the addresses of the arrays.
    """
    metadata = compiled.metadata
    kernel = parse(compiled.asm["ptx"], metadata.name)
    memory, addresses, values = GlobalMemory(), [], []
    descriptions = iter(metadata.tensordesc_meta)
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind in NUMBERS:
            values.append(argument)
            continue
        address = memory.place(argument, f"argument {len(addresses)}")
        addresses.append(address)
        if kind.startswith("*"):
            values.append(address)
        elif kind.startswith("tensordesc<") and metadata.tensordesc_meta:
            # After the map come its shape and strides.
            strides = [step // argument.itemsize for step in argument.strides]
            tensor = described(argument, address, next(descriptions), f"argument {len(addresses)}")
            values += [tensor, *argument.shape, *strides]
        else:
            raise UnsupportedError(f"an argument of type {kind}")
    grid = (*grid, 1, 1)[:3]
    programs = math.prod(grid) * metadata.num_ctas
    for size in (metadata.global_scratch_size, metadata.profile_scratch_size):
        scratch = np.full(programs * size, POISON, np.uint8)
        values.append(memory.place(scratch, "scratch memory") if size else 0)
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


def described(array: np.ndarray, address: int, description: dict, name: str) -> TensorMap:
    """The tensor map of a tensor descriptor."""
    if description["fp4_padded"] or description["is_im2col"]:
        raise UnsupportedError(f"a tensor descriptor with {description}")
    if description["elem_size"] != array.itemsize:
        raise UnsupportedError(f"an array of {array.dtype} for {description}")
    return TensorMap(
        base=address,
        itemsize=array.itemsize,
        dimensions=array.shape[::-1],
        strides=array.strides[::-1],
        box=tuple(description["block_size"][::-1]),
        swizzle=SWIZZLE[description["swizzle"]],
        name=name,
    )
