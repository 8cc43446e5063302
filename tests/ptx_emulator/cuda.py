"""Launches a hand-written kernel, whose one parameter is a struct."""

from ptx_emulator.machine import Machine
from ptx_emulator.parser import parse
from ptx_emulator.tma import TensorMap

# sizeof and alignof of a CUtensorMap.
MAP_BYTES = 128


def prepare(ptx: str, name: str, fields: list, **options) -> Machine:
    """A machine that is ready to launch a kernel.

    Args:
      ptx: of a module.
      name: of the kernel.
      fields: of its parameter: numpy scalars, and tensor maps.
      options: of `Machine`.
    """
    machine = Machine(parse(ptx, name), **options)
    content = bytearray()
    for field in fields:
        is_map = isinstance(field, TensorMap)
        size = MAP_BYTES if is_map else field.nbytes
        content += bytes(-len(content) % size)
        if is_map:
            machine.tensor_maps[machine.parameter_address(0) + len(content)] = field
        content += bytes(MAP_BYTES) if is_map else field.tobytes()
    (parameter,) = machine.kernel.parameters
    machine.set_parameter(0, bytes(content).ljust(parameter.size, b"\0"))
    return machine
