"""Launches what Mosaic GPU compiled: its host function is executed, too.

Mosaic dumps its passes (MOSAIC_GPU_DUMP_TO). Before it is lowered to LLVM, the host function is
straight-line MLIR: it stores numbers into stack memory, calls mosaic_gpu_init_tma_desc for each
tensor map, and one of LAUNCHES. Here it runs with real bytes in a memory of its own.
"""

import math
import operator
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from ptx_emulator.errors import UnsupportedError
from ptx_emulator.machine import Machine
from ptx_emulator.memory import POISON, GlobalMemory
from ptx_emulator.parser import parse
from ptx_emulator.tma import TensorMap

LAST_PASS = "IR Dump Before ConvertToLLVMPass"

# mosaic_gpu_init_tma_desc's codes of element types: their bytes.
ITEMSIZE = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}

# A tensor map that the host makes is known by these bytes until the kernel gets it.
MAP_BYTES = 128

# How a kernel is launched, by jax 0.11 and 0.12: after a pointer come grid (in blocks), cluster and
# block, and at these places the dynamic shared memory and the addresses of the parameters.
LAUNCHES = ("mosaic_gpu_launch_kernel", "mosaic_gpu_build_kernel_spec")
SHARED_MEMORY, PARAMETERS = 10, 13

# Where a memref's descriptor has its pointer.
ALIGNED_POINTER = (1,)

# Operations whose result is their operand, as far as addresses go.
SAME = (
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


def sizeof(kind: ir.Type | str) -> int:
    """Bytes of an LLVM type, as it stands alone or in another one."""
    text = str(kind).removeprefix("!llvm.")
    if text in ("ptr", "index"):
        return 8
    if match := re.fullmatch(r"i(\d+)", text):
        return int(match[1]) // 8
    if match := re.fullmatch(r"array<(\d+) x (.*)>", text):
        return int(match[1]) * sizeof(match[2])
    if text.startswith("struct<("):
        (*_, end), alignment = _struct_layout(text)
        return -(-end // alignment) * alignment
    raise UnsupportedError(f"the host's type {text}")


def _struct_layout(text: str) -> tuple[list[int], int]:
    """Offsets of a struct's fields, then its end; and its alignment."""
    fields = re.split(r", (?![^<]*>)", re.fullmatch(r"(?:!llvm\.)?struct<\((.*)\)>", text)[1])
    offsets, end, most = [], 0, 1
    for field in fields:
        size = sizeof(field)
        alignment = 1 if field.startswith("array") and field.endswith("i8>") else min(8, size)
        end = -(-end // alignment) * alignment
        offsets.append(end)
        end, most = end + size, max(most, alignment)
    return [*offsets, end], most


class Host:
    """Executes the host function."""

    def __init__(self, arguments: list[int], launch: Callable):
        self.memory, self.top = {}, 0x1000
        self.launch = launch
        # Address -> tensor map, for those that were made.
        self.maps: dict[int, TensorMap] = {}
        self.values: dict = {}
        self.arguments = self.allocate(8 * len(arguments))
        for i, argument in enumerate(arguments):
            self.store(self.arguments + 8 * i, argument, 8)

    def allocate(self, size: int) -> int:
        """Stack memory."""
        address = self.top
        self.top += -(-size // 64) * 64
        return address

    def store(self, address: int, value, size: int) -> None:
        """Stores a number, or bytes."""
        content = value if isinstance(value, bytes) else int(value).to_bytes(size, "little")
        for i, byte in enumerate(content):
            self.memory[address + i] = byte

    def load(self, address: int, size: int) -> bytes:
        """The bytes of memory; what was never written is 0."""
        return bytes(self.memory.get(address + i, 0) for i in range(size))

    def words(self, address: int, count: int) -> list[int]:
        """Numbers of 64 bits."""
        return [int.from_bytes(self.load(address + 8 * i, 8), "little") for i in range(count)]

    def run(self, function) -> None:
        """Executes an MLIR function (context, arguments)."""
        block = function.regions[0].blocks[0]
        pointers = list(block.arguments)
        self.values[pointers[-1]] = self.arguments
        for argument in pointers[:-1]:
            self.values[argument] = 0
        for operation in block.operations:
            self._execute(operation.operation)

    def _execute(self, op) -> None:
        name, operands = op.name, [self.values.get(x) for x in op.operands]
        attributes = op.attributes
        result = None
        if name in SAME:
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
            kind = ir.MemRefType(op.results[0].type)
            pointer = self.allocate(math.prod(kind.shape) * sizeof(kind.element_type))
            result = {(0,): pointer, ALIGNED_POINTER: pointer, (2,): 0}
        elif name == "memref.store":
            value, target, *indices = operands
            kind = ir.MemRefType(op.operands[1].type)
            if len(indices) > 1:
                raise UnsupportedError(f"the host's {op}")
            size = sizeof(kind.element_type)
            self.store(target[ALIGNED_POINTER] + size * sum(indices), value, size)
        elif name == "llvm.alloca":
            kind = ir.TypeAttr(attributes["elem_type"]).value
            result = self.allocate(operands[0] * sizeof(kind))
        elif name == "llvm.getelementptr":
            result = operands[0] + self._offset(op)
        elif name == "llvm.store":
            self.store(operands[1], operands[0], sizeof(op.operands[0].type))
        elif name == "llvm.load":
            found = self.load(operands[0], sizeof(op.results[0].type))
            is_number = sizeof(op.results[0].type) <= 8
            result = int.from_bytes(found, "little") if is_number else found
        elif name in ("func.call", "llvm.call"):
            result = self._call(ir.FlatSymbolRefAttr(attributes["callee"]).value, operands)
        elif name not in ("func.return", "llvm.return"):
            raise UnsupportedError(f"the host's {op}")
        if len(op.results):
            self.values[op.results[0]] = result

    def _offset(self, op) -> int:
        indices = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
        kind = ir.TypeAttr(op.attributes["elem_type"]).value
        if len(indices) == 1:
            return indices[0] * sizeof(kind)
        if indices[0] != 0 or len(indices) > 2:
            raise UnsupportedError(f"the host's {op}")
        return _struct_layout(str(kind))[0][indices[1]]

    def _call(self, callee: str, operands: list):
        if callee == "mosaic_gpu_init_tma_desc":
            at, base, code, rank, sizes, strides, swizzle, box = operands
            # Outermost first, strides in elements.
            itemsize = ITEMSIZE[code]
            dimensions, steps, sides = (self.words(x, rank)[::-1] for x in (sizes, strides, box))
            self.maps[at] = TensorMap(
                base=base,
                itemsize=itemsize,
                dimensions=tuple(dimensions),
                strides=tuple(itemsize * step for step in steps),
                box=tuple(sides),
                # 16 bytes are the smallest unit: nothing is exchanged.
                swizzle=0 if swizzle == 16 else swizzle,
                name=f"tensor {len(self.maps)}",
            )
            # The bytes say which it is, wherever they are copied.
            self.store(at, at.to_bytes(8, "little") + bytes(MAP_BYTES - 8), MAP_BYTES)
            return None
        if callee in LAUNCHES:
            self.launch(self, operands)
            return 0
        raise UnsupportedError(f"the host calls {callee}")


def host_function(log: Path):
    """The text of the module with the host function, from Mosaic's log of passes."""
    text = log.read_text()
    begin = text.rindex(LAST_PASS)
    begin = text.index("\n", begin)
    end = text.find("// -----//", begin)
    return text[begin : end if end >= 0 else len(text)]


def prepare(stem: Path, inputs, outputs, **options) -> tuple[Machine, list[int]]:
    """A machine that is ready to launch a kernel that Mosaic dumped.

    Args:
      stem: path of the dump, without its suffixes: `.ptx`, and `.log` for the passes.
      inputs: arrays, in the order of the kernel's operands.
      outputs: (shape, dtype) of the results.
      options: of `Machine`.

    Returns:
      The machine, and the addresses of the results, which are poisoned.
    """
    kernel = parse(stem.with_suffix(".ptx").read_text())
    memory, machines = GlobalMemory(), []
    addresses = [memory.place(x, f"operand {i}") for i, x in enumerate(inputs)]
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in outputs]
    results = [
        memory.place(np.full(size, POISON, np.uint8), f"result {i}") for i, size in enumerate(sizes)
    ]

    def launch(host, operands):
        grid, cluster, block = (operands[i : i + 3] for i in (1, 4, 7))
        shape = dict(grid=grid, cluster=[max(1, c) for c in cluster], block=block)
        shared = operands[SHARED_MEMORY]
        machine = Machine(kernel, **shape, dynamic_shared=shared, memory=memory, **options)
        pointers = host.words(operands[PARAMETERS], len(kernel.parameters))
        for i, (pointer, parameter) in enumerate(zip(pointers, kernel.parameters)):
            content = host.load(pointer, parameter.size)
            machine.set_parameter(i, content)
            for offset in range(0, parameter.size - 7, MAP_BYTES):
                made = int.from_bytes(content[offset : offset + 8], "little")
                if made in host.maps:
                    at = machine.parameter_address(i) + offset
                    machine.tensor_maps[at] = host.maps[made]
        machines.append(machine)

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(host_function(stem.with_suffix(".log")))
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        function = next(f for f in functions if len(f.operation.regions[0].blocks))
        Host([*addresses, *results], launch).run(function.operation)
    (machine,) = machines
    return machine, results
