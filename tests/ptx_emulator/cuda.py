"""Launches a CUDA kernel that has one parameter, a struct."""

from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.tma import TENSOR_MAP_BYTES, TensorMap


def prepare(ptx: str, name: str, fields: list, **options) -> Machine:
    """Prepares a machine to launch a kernel.

    Args:
      ptx: text of the PTX module.
      name: name of the kernel.
      fields: members of the struct, numpy scalars and tensor maps; each is aligned to its size.
      options: keyword arguments of `Machine`.
    """
    machine = Machine(parse(ptx, name), **options)
    content = bytearray()
    for field in fields:
        is_tensor_map = isinstance(field, TensorMap)
        size = TENSOR_MAP_BYTES if is_tensor_map else field.nbytes
        content += bytes(-len(content) % size)
        if is_tensor_map:
            machine.tensor_maps[machine.parameter_address(0) + len(content)] = field
        content += bytes(TENSOR_MAP_BYTES) if is_tensor_map else field.tobytes()
    (parameter,) = machine.kernel.parameters
    machine.set_parameter(0, bytes(content).ljust(parameter.size, b"\0"))
    return machine
