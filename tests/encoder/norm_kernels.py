"""Compiles the kernel of the layer norm, and whole encoders, for H200s, without a GPU.

  python tests/encoder/norm_kernels.py WIDTH ...

Prints a JSON object: "kernels" has [registers, bytes of spills and stack] for each width, "levels"
the same for results in 8 bits, and "programs" has [calls of the kernel, of that for attention,
collectives] for whole encoders on one and two devices. It is a separate program because the
compilers read their settings when JAX is imported.
"""

import functools
import json
import re
import sys
from unittest import mock

from benchmarks import offline_compile

NORM = re.compile(r'custom_call_target="mosaic_gpu_v2".*op_name="[^"]*layer_norm')
ATTENTION = re.compile(r'custom_call_target="mosaic_gpu_v2".*op_name="[^"]*attention')
COLLECTIVE = re.compile(r" (?:all-gather|all-reduce|all-to-all|collective-permute)[a-z-]*\(")


def kernels(widths: list[int], *, levels: str = "") -> dict[int, tuple[int, int]]:
    """Compiles the kernel for arrays of these widths."""
    import jax

    from pallas_patch_embed.base.chips import H200
    from pallas_patch_embed.layers import norm

    found = {}
    for D in widths:
        x = jax.ShapeDtypeStruct((8, 196, D), "bfloat16")
        rows, layer = jax.ShapeDtypeStruct((12, D), "float32"), jax.ShapeDtypeStruct((), "int32")
        function = functools.partial(norm.kernel, eps=1e-6, levels=levels)
        operands = (x, rows, rows, layer)
        kernel = offline_compile.compile_offline(function, operands, H200, sass=False).kernel
        found[D] = kernel.registers, kernel.spill_bytes + kernel.stack_bytes
    return found


def programs() -> dict[str, list[int]]:
    """Compiles B/16 224 for 512 images on each device, as `embed` does and with a plain jit."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.encoder import draw
    from pallas_patch_embed.base import lowering
    from pallas_patch_embed.base.chips import H200, Target
    from pallas_patch_embed.embed.embedder import embedding_on

    encoder, _ = draw("B/16 224", "bfloat16", "bfloat16")
    found = {}
    for devices in (1, 2):
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{devices}",
            target_config=offline_compile.describe(H200),
        )
        mesh = Mesh(np.array(topology.devices), ("batch",))

        def on_mesh(x, *spec, mesh=mesh):
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        images = jax.ShapeDtypeStruct((512 * devices, 224, 224, 3), "uint8")
        arguments = jax.tree.map(on_mesh, encoder), on_mesh(images, "batch")
        ways = {"embed": embedding_on(mesh), "jit": lambda encoder, x: encoder(x)}
        for name, function in ways.items():
            with (
                mock.patch.object(lowering, "target_of", lambda *_: Target("cuda", H200)),
                jax.default_device(topology.devices[0]),
            ):
                traced = jax.jit(function).trace(*arguments)
                lowered = traced.lower(lowering_platforms=("cuda",))
            hlo = lowered.compile().as_text()
            sought = (NORM, ATTENTION, COLLECTIVE)
            found[f"{name}, {devices}"] = [len(pattern.findall(hlo)) for pattern in sought]
    return found


def main(widths: list[int]) -> None:
    with offline_compile.compiler():
        from pallas_patch_embed.base.dtypes import EIGHT_BITS

        found = {
            "kernels": kernels(widths),
            "levels": [kernels(widths, levels=dtype) for dtype in EIGHT_BITS],
            "programs": programs(),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
