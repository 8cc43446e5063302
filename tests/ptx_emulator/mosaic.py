"""Launches a kernel that Mosaic GPU compiled, by executing Mosaic's host function.

Before Mosaic lowers it to LLVM, the host function is straight-line MLIR: it stores numbers to stack
memory, calls mosaic_gpu_init_tma_desc for each tensor map, and then one of the functions in
LAUNCHES. `Host` executes it with its own memory.
"""

import math
import operator
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from tests.ptx_emulator.errors import UnsupportedError
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.memory import POISON, GlobalMemory
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.tma import TENSOR_MAP_BYTES, TensorMap

# Code of an element type in mosaic_gpu_init_tma_desc -> bytes of an element.
ITEMSIZES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}

# The functions that launch a kernel in jax 0.11 and 0.12. Their operands begin with a pointer, and
# with three numbers each for the grid in blocks, the cluster and the block. The values here are the
# positions of the bytes of dynamic shared memory and of the address of the parameters' addresses.
LAUNCHES = ("mosaic_gpu_launch_kernel", "mosaic_gpu_build_kernel_spec")
SHARED_MEMORY_OPERAND, PARAMETERS_OPERAND = 10, 13

# Position of the aligned pointer in a memref's descriptor.
ALIGNED_POINTER = (1,)

# Operations that only change the type of an address or a memref.
IDENTITIES = (
    "builtin.unrealized_conversion_cast",
    "llvm.inttoptr",
    "llvm.ptrtoint",
    "llvm.trunc",
    "memref.reinterpret_cast",
    "memref.transpose",
    "memref.expand_shape",
    "memref.collapse_shape",
    "memref.cast",
)


def sizeof(mlir_type: ir.Type | str) -> int:
    """Returns the bytes of an LLVM type, given as a type or as text."""
    text = str(mlir_type).removeprefix("!llvm.")
    if text in ("ptr", "index"):
        return 8
    if match := re.fullmatch(r"i(\d+)", text):
        return int(match[1]) // 8
    if match := re.fullmatch(r"array<(\d+) x (.*)>", text):
        return int(match[1]) * sizeof(match[2])
    if text.startswith("struct<("):
        (*_, end), alignment = _struct_layout(text)
        return -(-end // alignment) * alignment
    raise UnsupportedError(f"the type {text} in the host function is not supported")


def _struct_layout(text: str) -> tuple[list[int], int]:
    """Returns the offsets of a struct's fields and of its end, and its alignment."""
    fields = re.split(r", (?![^<]*>)", re.fullmatch(r"(?:!llvm\.)?struct<\((.*)\)>", text)[1])
    offsets, end, alignment_of_struct = [], 0, 1
    for field in fields:
        size = sizeof(field)
        alignment = 1 if field.startswith("array") and field.endswith("i8>") else min(8, size)
        end = -(-end // alignment) * alignment
        offsets.append(end)
        end, alignment_of_struct = end + size, max(alignment_of_struct, alignment)
    return [*offsets, end], alignment_of_struct


class Host:
    """Executes the host function.

    Args:
      arguments: addresses in global memory of the kernel's operands.
      launch: function launch(host, operands) that is called with the operands of the launch.
    """

    def __init__(self, arguments: list[int], launch: Callable):
        self.memory, self.next_address = {}, 0x1000
        self.launch = launch
        # The host's address of each encoded tensor map -> the tensor map.
        self.maps: dict[int, TensorMap] = {}
        self.values: dict = {}
        self.arguments = self.allocate(8 * len(arguments))
        for i, argument in enumerate(arguments):
            self.store(self.arguments + 8 * i, argument, 8)

    def allocate(self, size: int) -> int:
        """Allocates stack memory, aligned to 64 bytes; returns its address."""
        address = self.next_address
        self.next_address += -(-size // 64) * 64
        return address

    def store(self, address: int, value, size: int) -> None:
        """Stores a number of `size` bytes, or bytes."""
        content = value if isinstance(value, bytes) else int(value).to_bytes(size, "little")
        for i, byte in enumerate(content):
            self.memory[address + i] = byte

    def load(self, address: int, size: int) -> bytes:
        """Returns the bytes at an address. Bytes that were never stored are 0."""
        return bytes(self.memory.get(address + i, 0) for i in range(size))

    def words(self, address: int, count: int) -> list[int]:
        """Returns the 64-bit numbers at an address."""
        return [int.from_bytes(self.load(address + 8 * i, 8), "little") for i in range(count)]

    def run(self, function) -> None:
        """Executes an MLIR function whose last argument is the address of the arguments."""
        block = function.regions[0].blocks[0]
        pointers = list(block.arguments)
        self.values[pointers[-1]] = self.arguments
        for argument in pointers[:-1]:
            self.values[argument] = 0
        for operation in block.operations:
            self._execute(operation.operation)

    def _execute(self, op) -> None:
        """Executes an operation. A memref is a dict of position in its descriptor -> value."""
        name, operands = op.name, [self.values.get(x) for x in op.operands]
        attributes = op.attributes
        result = None
        if name in IDENTITIES:
            result = operands[0]
            if name == "memref.reinterpret_cast" and any(attributes["static_offsets"]):
                raise UnsupportedError(str(op))
        elif name == "llvm.mlir.constant":
            result = ir.IntegerAttr(attributes["value"]).value
        elif name in ("llvm.mlir.undef", "llvm.mlir.poison"):
            result = {}
        elif name == "llvm.insertvalue":
            position = tuple(ir.DenseI64ArrayAttr(attributes["position"]))
            result = {**operands[0], position: operands[1]}
        elif name == "llvm.extractvalue":
            result = operands[0][tuple(ir.DenseI64ArrayAttr(attributes["position"]))]
        elif name == "memref.extract_aligned_pointer_as_index":
            result = operands[0][ALIGNED_POINTER]
        elif name in ("llvm.mul", "llvm.add"):
            result = operator.mul(*operands) if name == "llvm.mul" else operator.add(*operands)
        elif name == "memref.alloca":
            mlir_type = ir.MemRefType(op.results[0].type)
            pointer = self.allocate(math.prod(mlir_type.shape) * sizeof(mlir_type.element_type))
            result = {(0,): pointer, ALIGNED_POINTER: pointer, (2,): 0}
        elif name == "memref.store":
            value, target, *indices = operands
            mlir_type = ir.MemRefType(op.operands[1].type)
            if len(indices) > 1:
                raise UnsupportedError(f"{op} in the host function is not supported")
            size = sizeof(mlir_type.element_type)
            self.store(target[ALIGNED_POINTER] + size * sum(indices), value, size)
        elif name == "llvm.alloca":
            mlir_type = ir.TypeAttr(attributes["elem_type"]).value
            result = self.allocate(operands[0] * sizeof(mlir_type))
        elif name == "llvm.getelementptr":
            result = operands[0] + self._byte_offset(op)
        elif name == "llvm.store":
            self.store(operands[1], operands[0], sizeof(op.operands[0].type))
        elif name == "llvm.load":
            found = self.load(operands[0], sizeof(op.results[0].type))
            is_number = sizeof(op.results[0].type) <= 8
            result = int.from_bytes(found, "little") if is_number else found
        elif name in ("func.call", "llvm.call"):
            result = self._call(ir.FlatSymbolRefAttr(attributes["callee"]).value, operands)
        elif name not in ("func.return", "llvm.return"):
            raise UnsupportedError(f"{op} in the host function is not supported")
        if len(op.results):
            self.values[op.results[0]] = result

    def _byte_offset(self, op) -> int:
        """Returns the offset in bytes of an llvm.getelementptr."""
        indices = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
        mlir_type = ir.TypeAttr(op.attributes["elem_type"]).value
        if len(indices) == 1:
            return indices[0] * sizeof(mlir_type)
        if indices[0] != 0 or len(indices) > 2:
            raise UnsupportedError(f"{op} in the host function is not supported")
        return _struct_layout(str(mlir_type))[0][indices[1]]

    def _call(self, callee: str, operands: list):
        if callee == "mosaic_gpu_init_tma_desc":
            address, base, code, rank, sizes, strides, swizzle, box = operands
            # Mosaic lists the outermost dimension first, and gives strides in elements.
            itemsize = ITEMSIZES[code]
            dimensions, steps, sides = (self.words(x, rank)[::-1] for x in (sizes, strides, box))
            self.maps[address] = TensorMap(
                base=base,
                itemsize=itemsize,
                dimensions=tuple(dimensions),
                strides=tuple(itemsize * step for step in steps),
                box=tuple(sides),
                # A swizzle of 16 bytes, the smallest unit, changes nothing.
                swizzle=0 if swizzle == 16 else swizzle,
                name=f"tensor {len(self.maps)}",
            )
            # The first 8 bytes identify the tensor map in every copy of its bytes.
            content = address.to_bytes(8, "little") + bytes(TENSOR_MAP_BYTES - 8)
            self.store(address, content, TENSOR_MAP_BYTES)
            return None
        if callee in LAUNCHES:
            self.launch(self, operands)
            return 0
        raise UnsupportedError(f"the host function calls {callee}")


def prepare(stem: Path, inputs, outputs, **options) -> tuple[Machine, list[int]]:
    """Prepares a machine to launch a kernel that Mosaic compiled.

    Args:
      stem: path of the files that `offline_compile.dump_kernel` wrote, without their suffixes.
      inputs: arrays, in the order of the kernel's operands.
      outputs: (shape, dtype) of each result.
      options: keyword arguments of `Machine`.

    Returns:
      The machine, and the addresses of the results, which are filled with POISON.
    """
    kernel = parse(stem.with_suffix(".ptx").read_text())
    memory, machines = GlobalMemory(), []
    addresses = [memory.allocate(x, f"operand {i}") for i, x in enumerate(inputs)]
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in outputs]
    results = [
        memory.allocate(np.full(size, POISON, np.uint8), f"result {i}")
        for i, size in enumerate(sizes)
    ]

    def launch(host, operands):
        grid, cluster, block = (operands[i : i + 3] for i in (1, 4, 7))
        shape = dict(grid=grid, cluster=[max(1, c) for c in cluster], block=block)
        shared = operands[SHARED_MEMORY_OPERAND]
        machine = Machine(kernel, **shape, dynamic_shared=shared, memory=memory, **options)
        pointers = host.words(operands[PARAMETERS_OPERAND], len(kernel.parameters))
        for i, (pointer, parameter) in enumerate(zip(pointers, kernel.parameters)):
            content = host.load(pointer, parameter.size)
            machine.set_parameter(i, content)
            for offset in range(0, parameter.size - 7, TENSOR_MAP_BYTES):
                host_address = int.from_bytes(content[offset : offset + 8], "little")
                if host_address in host.maps:
                    address = machine.parameter_address(i) + offset
                    machine.tensor_maps[address] = host.maps[host_address]
        machines.append(machine)

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(stem.with_suffix(".mlir").read_text())
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        function = next(f for f in functions if len(f.operation.regions[0].blocks))
        Host([*addresses, *results], launch).run(function.operation)
    (machine,) = machines
    return machine, results
