"""Calls the FFI handlers as XLA does, with `fake_driver.cc` in place of the driver.

    LD_LIBRARY_PATH=<folder of libcuda> python -m tests.kernels.fake_cuda <library> < calls.json

For each call, prints its error, if any, and the calls of the driver that fake_driver.cc recorded.
"""

import ctypes
import json
import sys
import threading
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p

# Enumerators of xla/ffi/api/c_api.h.
TYPES = {"float8_e4m3fn": 20, "int8": 2, "uint8": 6, "bfloat16": 16, "float32": 11, "int32": 4}
STAGES = {"initialize": 2, "execute": 3}
BUFFER, STRING = 1, 4


def struct(name, *fields):
    """Defines a struct of XLA's C API; all of these structs begin with the same two fields."""
    head = [("struct_size", c_size_t), ("extension_start", c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


Buffer = struct(
    "Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p)
)
ErrorCreate = struct("ErrorCreate", ("message", c_char_p), ("code", c_int))
StreamGet = struct("StreamGet", ("ctx", c_void_p), ("stream", c_void_p))
Arguments = struct("Arguments", ("size", c_int64), ("types", c_void_p), ("values", c_void_p))
Attributes = struct(
    "Attributes", ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("values", c_void_p)
)
Version = struct("Version", ("major", c_int), ("minor", c_int))
Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
Api = struct(
    "Api",
    ("version", Version),
    ("internal", c_void_p),
    ("error_create", Function),
    ("error_get_message", Function),
    ("error_destroy", Function),
    ("handler_register", Function),
    ("stream_get", Function),
)
Frame = struct(
    "Frame",
    ("api", c_void_p),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("arguments", Arguments),
    ("results", Arguments),
    ("attributes", Attributes),
    ("future", c_void_p),
)


class Span(ctypes.Structure):
    _fields_ = [("text", c_char_p), ("size", c_size_t)]


def sized(kind, *values):
    return kind(ctypes.sizeof(kind), None, *values)


def pointers(objects):
    return (c_void_p * len(objects))(*map(ctypes.addressof, objects))


def call(library, stage, operands, attributes, stream):
    """Calls a handler; returns None, or its error as (code, message).

    Args:
      library: the loaded library.
      stage: a key of STAGES.
      operands: (dtype, shape, address) of each operand; the last one is the result.
      attributes: name -> text.
      stream: number of the stream; None if the platform has no streams.
    """
    errors = []

    def error_create(at):
        found = ErrorCreate.from_address(at)
        errors.append((found.code, found.message.decode()))
        return len(errors)

    def stream_get(at):
        if stream is None:
            errors.append(None)
            return len(errors)
        StreamGet.from_address(at).stream = stream

    def error_destroy(at):
        errors.pop()

    def forbidden(at):
        raise AssertionError("a newer runtime would write beyond the end of these arguments")

    functions = (error_create, forbidden, error_destroy, forbidden, stream_get)
    api = sized(Api, sized(Version, 0, 1), None, *map(Function, functions))
    shapes = [(c_int64 * len(shape))(*shape) for _, shape, _ in operands]
    buffers = [
        sized(Buffer, TYPES[dtype], address, len(shape), ctypes.addressof(shape))
        for (dtype, _, address), shape in zip(operands, shapes)
    ]
    texts = [text.encode() for pair in sorted(attributes.items()) for text in pair]
    spans = [Span(text, len(text)) for text in texts]
    lists = [pointers(x) for x in (buffers[:-1], buffers[-1:], spans[::2], spans[1::2])]
    kinds = (c_int * len(operands))(*[BUFFER] * len(operands))
    strings = (c_int * len(spans))(*[STRING] * len(spans))
    at = ctypes.addressof
    frame = sized(
        Frame,
        at(api),
        None,
        STAGES[stage],
        sized(Arguments, len(operands) - 1, at(kinds), at(lists[0])),
        sized(Arguments, 1, at(kinds), at(lists[1])),
        sized(Attributes, len(attributes), at(strings), at(lists[2]), at(lists[3])),
        None,
    )
    frame.struct_size = Frame.future.offset  # The size that XLA passes.
    handler = getattr(library, f"patch_embed_{stage}")
    handler.restype = c_void_p
    handler.argtypes = [c_void_p]
    error = handler(at(frame))
    assert (error is not None) == (len(errors) == 1), errors
    return errors[0] if errors else None


def main():
    library = ctypes.CDLL(sys.argv[1])
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_written.restype = c_char_p
    answers = []
    for one in json.load(sys.stdin):
        threads, capability, fail = (one.pop(key) for key in ("threads", "capability", "fail"))
        memory = c_uint64(one.pop("memory", 2**40))
        driver.fake_begin(*capability, fail.encode(), memory)
        errors = [None] * threads

        def work(i, one=one, errors=errors):
            errors[i] = call(library, **one)

        started = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        assert driver.fake_leaks() == 0, "memory was not freed in its stream"
        answers.append((errors, driver.fake_written().decode().splitlines()))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
