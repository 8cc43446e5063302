"""PTX modules of one kernel for the emulator's tests, launched; numbers and swizzles in them."""

import dataclasses

import numpy as np
import pytest

from ptx_emulator.machine import Machine
from ptx_emulator.parser import parse


def ptx(body, parameters=(), prelude="", *, target="sm_100a", threads=32):
    """A module of one kernel."""
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


def prepared(
    body, parameters=(), values=(), *, grid=1, cluster=1, threads=32, target="sm_100a", **options
):
    """A machine that is ready to run a kernel; arrays among the values get a place in memory."""
    kernel = parse(ptx(body, parameters, target=target, threads=threads))
    machine = Machine(kernel, (grid, 1, 1), cluster=(cluster, 1, 1), **options)
    for i, value in enumerate(values):
        machine.set_parameter(i, machine.memory.place(value) if hasattr(value, "dtype") else value)
    return machine


def launched(body, parameters=(), values=(), **launch):
    """Runs a kernel; the machine."""
    machine = prepared(body, parameters, values, **launch)
    machine.launch()
    return machine


def told(error):
    """All that an error says."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# What marks the line that an error has to name.
HERE = "/* here */"


@dataclasses.dataclass
class Run:
    """What a kernel left: each thread's registers, and the arrays."""

    results: list[list[int]]
    arrays: list[bytes]


def program(body, inputs, results, arrays, constants, maps, grid, threads):
    """Text, parameters and values of the kernel of `run`."""
    parameters = [f".param .u64 p{i}" for i in range(len(inputs) + len(results) + len(arrays))]
    values = [np.array(values, f"u{max(bits, 8) // 8}") for bits, values in inputs]
    values += [np.zeros(threads * grid, f"u{max(bits, 8) // 8}") for bits in results]
    values += [np.frombuffer(array, np.uint8) for array in arrays]
    if constants:
        parameters.append(f".param .align 32 .b8 constants[{len(constants)}]")
        values.append(constants)
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(len(maps))]
    text = [
        ".reg .b32 %thread, %lane, %block, %warp, %me; .reg .b64 %base, %at; .reg .b16 %byte;",
        f".reg .b64 %m<{len(arrays) + 1}>, %t<{len(maps) + 1}>;",
        "mov.u32 %me, %tid.x; mov.u32 %block, %ctaid.x;",
        "and.b32 %lane, %me, 31; shr.u32 %warp, %me, 5;",
        f"mad.lo.u32 %thread, %block, {threads}, %me;",
    ]

    def place(i, size):
        text.append(f"ld.param.u64 %base, [p{i}]; mad.wide.u32 %at, %thread, {size}, %base;")

    for i, (bits, _) in enumerate(inputs):
        place(i, max(bits, 8) // 8)
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
        place(len(inputs) + i, max(bits, 8) // 8)
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
    **launch,
):
    """Executes statements by all threads of every block.

    Args:
      body: uses %a0, %a1, ... (inputs), %m0, ... (addresses of the arrays), %t0, ... (of the tensor
        maps), %thread, %me (in the block), %warp, %lane, and sets %d0, %d1, ...
      inputs: (bits of the register, values of all threads) for each.
      results: bits of the registers; 1 is a predicate.
      constants: what the kernel's parameter of this name holds.
      maps: functions that make a tensor map of the addresses of the arrays.
      launch: of `prepared`.
    """
    text, parameters, values = program(
        body, inputs, results, arrays, constants, maps, grid, threads
    )
    padded = [*values, *[bytes(128)] * len(maps)]
    machine = prepared(text, parameters, padded, grid=grid, threads=threads, **launch)
    placed = [value for value in values if hasattr(value, "dtype")]
    where = addresses(machine)[: len(placed)]
    for i, made in enumerate(maps):
        at = machine.parameter_address(len(values) + i)
        machine.tensor_maps[at] = made(*where[len(inputs) + len(results) :])
    machine.launch()
    left = [
        machine.memory.read(address, value.shape, value.dtype)
        for address, value in zip(where, placed)
    ]
    found = left[len(inputs) :]
    return Run(
        [array.tolist() for array in found[: len(results)]],
        [array.tobytes() for array in found[len(results) :]],
    )


def fails(error, message, body, *, arrays=(), maps=(), grid=1, threads=32, **launch):
    """`run` is an error with this message, which names the line of HERE, if the body has it."""
    with pytest.raises(error, match=f"(?s){message}") as caught:
        run(body, arrays=arrays, maps=maps, grid=grid, threads=threads, **launch)
    if HERE in body:
        text, parameters, _ = program(body, (), (), arrays, b"", maps, grid, threads)
        line = ptx(text, parameters).split(HERE)[0].count("\n") + 1
        assert f"line {line}: " in told(caught.value), told(caught.value)


def addresses(machine):
    """Where the arrays are that the machine's parameters point to."""
    return machine.parameters[: len(machine.parameters) // 8 * 8].view(np.uint64).tolist()
