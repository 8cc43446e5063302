"""Compiles programs of sliced.py for an H200, without a GPU, and reads XLA's HLO.

  python tests/kernels/sliced_hlo.py

Prints, for each kernel and program, the number of the kernel's calls, how many slices and updates
XLA has folded into them, and the other operations on arrays. "whole" has the same for embed_images,
and the number of slices of float32 rows in an encoder. It is a separate program because the
compilers read their settings when JAX is imported.
"""

import functools
import json
import re

from benchmarks import offline_compile

# The programs that are compiled; the others differ from them in dtype, operand or loop.
NAMES = (
    "all operands are slices",
    "operand 0 is a part of a batch",
    "operand 0 is a part in scan",
    "operand 2 begins at element 1",
    "the result begins at an odd element",
    "the result replaces operand 0",
)
CALL = re.compile(r'custom_call_target="(?:mosaic_gpu|triton_kernel|pallas_patch_embed)')
OPERATION = re.compile(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z][a-z-]*)\(", re.M)
FOLDED = {"slice", "dynamic-slice", "dynamic-update-slice"}
# Lines of operations that launch nothing, that change the counter of a loop, or that are counted as
# calls.
UNCOUNTED = re.compile(
    r"\s+(?:ROOT )?(?:%dynamic_slice_fusion|\S+ = (?:s32|pred)\[\]|.*? "
    r"(?:parameter|constant|bitcast|tuple|get-tuple-element|while|custom-call|fusion-done)\()"
)


def described(hlo: str) -> dict[str, object]:
    """Describes a program from the computations of its HLO, which empty lines separate."""
    calls, folded, others = 0, 0, []
    for computation in map(str.strip, hlo.split("\n\n")):
        operations, found = OPERATION.findall(computation), len(CALL.findall(computation))
        calls += found
        if computation.startswith("%dynamic-slice-fusion") and found:
            folded += sum(operation in FOLDED for operation in operations)
        elif re.match(r"ENTRY|%region", computation):
            lines = filter(OPERATION.match, computation.splitlines())
            others += [OPERATION.match(line)[1] for line in lines if not UNCOUNTED.match(line)]
    return {"calls": calls, "folded": folded, "others": sorted(others)}


def main() -> None:
    with offline_compile.compiler():
        import jax

        import pallas_patch_embed as ppe
        from benchmarks import encoder
        from pallas_patch_embed.base.chips import H200
        from pallas_patch_embed.base.problem import PatchGeometry, named_shape
        from pallas_patch_embed.layers import norm
        from pallas_patch_embed.patch_embedding.primitive import patch_embed
        from tests.kernels.sliced import programs

        def operator(backend, geometry=None):
            options = dict(backend=backend, out_dtype="bfloat16", geometry=geometry)
            return functools.partial(patch_embed, **options)

        struct, shape = jax.ShapeDtypeStruct, named_shape("B/16 224")
        patches = offline_compile.operands(shape, 2, "bfloat16")
        rest = offline_compile.operands(shape, 2, "int8")[1:]
        row = struct((shape.N,), "float32")
        kernels = {
            **{name: (operator(name), patches) for name in ("mosaic_sm90", "triton", "cuda")},
            "cuda from images": (
                operator("cuda", PatchGeometry(16)),
                (struct((2, 224, 224, 3), "uint8"), *rest),
            ),
            "layer norm": (
                functools.partial(norm.layer_norm, eps=1e-6),
                (struct((8, shape.S, shape.N), "bfloat16"), row, row),
            ),
        }
        answers: dict[str, dict[str, object]] = {}
        for kernel, (function, operands) in kernels.items():
            y = jax.eval_shape(function, *operands)
            named = programs(operands, y)
            for name in NAMES:
                if name not in named:
                    continue
                made = []

                def arguments(*operands, program=named[name], function=function, made=made):
                    called, given = program(function, operands)
                    made.append(called)
                    return given

                given = jax.eval_shape(arguments, *operands)
                hlo = offline_compile.optimized_hlo(made[0], given, H200)
                answers.setdefault(kernel, {})[name] = described(hlo)
        tower, _ = encoder.draw("B/16 224", "int8", "bfloat16")
        tower = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tower)
        images = struct((8, 224, 224, 3), "uint8")
        hlo = offline_compile.optimized_hlo(
            lambda images, params: ppe.embed_images(images, params, backend="cuda"),
            (images, tower.patch_embed),
            H200,
        )
        answers["whole"] = {"embed_images": described(hlo)}
        hlo = offline_compile.optimized_hlo(
            lambda images, tower: tower(images), (images, tower), H200
        )
        answers["whole"]["encoder"] = len(re.findall(r"= f32\[\d+,768\]\S* dynamic-slice", hlo))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
