"""Runs PTX statements in the emulator for its tests: builds, launches and reads back a kernel."""

import dataclasses

import numpy as np
import pytest

from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.parser import parse


def module_text(body, parameters=(), prelude="", *, target="sm_100a", threads=32):
    """Returns a PTX module with one kernel that has this body."""
    return f"""
.version 8.7
.target {target}
.address_size 64
{prelude}
.visible .entry kernel({", ".join(parameters)})
.maxntid {threads}, 1, 1
{{
{body}
}}
"""


def prepare(
    body, parameters=(), values=(), *, grid=1, cluster=1, threads=32, target="sm_100a", **options
):
    """Prepares a machine to launch a kernel with this body.

    Args:
      body: the kernel's statements.
      parameters: declarations of the kernel's parameters.
      values: values of the parameters. An array is copied to global memory and passed by address.
      grid, cluster, threads: blocks, blocks per cluster, threads per block.
      target: the module's .target.
      options: keyword arguments of `Machine`.
    """
    kernel = parse(module_text(body, parameters, target=target, threads=threads))
    machine = Machine(kernel, (grid, 1, 1), cluster=(cluster, 1, 1), **options)
    for i, value in enumerate(values):
        is_array = hasattr(value, "dtype")
        machine.set_parameter(i, machine.memory.allocate(value) if is_array else value)
    return machine


def launch(body, parameters=(), values=(), **options):
    """Prepares a machine, launches its kernel, and returns the machine."""
    machine = prepare(body, parameters, values, **options)
    machine.launch()
    return machine


def full_message(error):
    """Returns the message of an error, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# Marks the statement that an error must name.
HERE = "/* here */"


@dataclasses.dataclass
class Outcome:
    """The values of %d0, %d1, ... of all threads, and the bytes of the arrays, after a launch."""

    results: list[list[int]]
    arrays: list[bytes]


def kernel_parts(body, inputs, results, arrays, constants, maps, grid, threads):
    """Returns the body, the parameters and their values of the kernel that `run` launches."""
    parameters = [f".param .u64 p{i}" for i in range(len(inputs) + len(results) + len(arrays))]
    values = [np.array(values, f"u{max(bits, 8) // 8}") for bits, values in inputs]
    values += [np.zeros(threads * grid, f"u{max(bits, 8) // 8}") for bits in results]
    values += [np.frombuffer(array, np.uint8) for array in arrays]
    if constants:
        parameters.append(f".param .align 32 .b8 constants[{len(constants)}]")
        values.append(constants)
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(len(maps))]
    text = [
        ".reg .b32 %thread, %lane, %warp, %block, %global_thread;",
        ".reg .b64 %base, %at; .reg .b16 %byte;",
        f".reg .b64 %m<{len(arrays) + 1}>, %t<{len(maps) + 1}>;",
        "mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x;",
        "and.b32 %lane, %thread, 31; shr.u32 %warp, %thread, 5;",
        f"mad.lo.u32 %global_thread, %block, {threads}, %thread;",
    ]

    def address_element(i, size):
        """Sets %at to the address of this thread's element of an array."""
        text.append(f"ld.param.u64 %base, [p{i}]; mad.wide.u32 %at, %global_thread, {size}, %base;")

    for i, (bits, _) in enumerate(inputs):
        address_element(i, max(bits, 8) // 8)
        text.append(f".reg .{'pred' if bits == 1 else f'b{bits}'} %a{i};")
        if bits == 1:
            text.append(f"ld.global.u8 %byte, [%at]; setp.ne.u16 %a{i}, %byte, 0;")
        else:
            text.append(f"ld.global.b{bits} %a{i}, [%at];")
    for i in range(len(arrays)):
        text.append(f"ld.param.u64 %m{i}, [p{len(inputs) + len(results) + i}];")
    for i in range(len(maps)):
        text.append(f"mov.b64 %t{i}, map{i}; cvta.param.u64 %t{i}, %t{i};")
    text += [
        f".reg .{'pred' if bits == 1 else f'b{bits}'} %d{i};" for i, bits in enumerate(results)
    ]
    text.append(body)
    for i, bits in enumerate(results):
        address_element(len(inputs) + i, max(bits, 8) // 8)
        if bits == 1:
            text.append(f"selp.u16 %byte, 1, 0, %d{i}; st.global.u8 [%at], %byte;")
        else:
            text.append(f"st.global.b{bits} [%at], %d{i};")
    text.append("ret;")
    return "\n".join(text), parameters, values


def run(
    body,
    inputs=(),
    results=(),
    *,
    arrays=(),
    constants=b"",
    maps=(),
    grid=1,
    threads=32,
    **options,
):
    """Executes statements in all threads of all blocks.

    The statements may read

      %a0, %a1, ...  the inputs of this thread
      %m0, %m1, ...  the global addresses of the arrays
      %t0, %t1, ...  the generic addresses of the tensor maps
      %thread        the number of the thread in its block
      %lane, %warp, %block
                     the numbers of its lane, warp and block
      %global_thread the number of the thread in the grid

    and set %d0, %d1, ..., the results.

    Args:
      body: the statements.
      inputs: for each input, the bits of its register (1 for a predicate) and the values of all
        threads.
      results: for each result, the bits of its register.
      arrays: bytes in global memory.
      constants: bytes of the kernel parameter `constants`.
      maps: functions that make a tensor map, given the addresses of all arrays.
      grid, threads: blocks, threads per block.
      options: keyword arguments of `prepare`.
    """
    text, parameters, values = kernel_parts(
        body, inputs, results, arrays, constants, maps, grid, threads
    )
    map_parameters = [bytes(128)] * len(maps)
    machine = prepare(
        text, parameters, [*values, *map_parameters], grid=grid, threads=threads, **options
    )
    in_memory = [value for value in values if hasattr(value, "dtype")]
    addresses = array_addresses(machine)[: len(in_memory)]
    for i, make_map in enumerate(maps):
        map_address = machine.parameter_address(len(values) + i)
        machine.tensor_maps[map_address] = make_map(*addresses[len(inputs) + len(results) :])
    machine.launch()
    contents = [
        machine.memory.read(address, value.shape, value.dtype)
        for address, value in zip(addresses, in_memory)
    ]
    outputs = contents[len(inputs) :]
    return Outcome(
        [array.tolist() for array in outputs[: len(results)]],
        [array.tobytes() for array in outputs[len(results) :]],
    )


def assert_fails(error, message, body, *, arrays=(), maps=(), grid=1, threads=32, **options):
    """Asserts that `run` raises this error, whose message names the line of HERE in the body."""
    with pytest.raises(error, match=f"(?s){message}") as caught:
        run(body, arrays=arrays, maps=maps, grid=grid, threads=threads, **options)
    if HERE in body:
        text, parameters, _ = kernel_parts(body, (), (), arrays, b"", maps, grid, threads)
        line = module_text(text, parameters).split(HERE)[0].count("\n") + 1
        assert f"line {line}: " in full_message(caught.value), full_message(caught.value)


def array_addresses(machine):
    """Returns the 64-bit words of the kernel's parameters, which begin with array addresses."""
    return machine.parameters[: len(machine.parameters) // 8 * 8].view(np.uint64).tolist()
