"""Measures weak scaling: a batch is sharded over several GPUs with the same number of images each.

Efficiency is the time of one GPU with its images, divided by the time of several GPUs.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp

import pallas_patch_embed as ppe
from benchmarks.contenders import LARGEST_ERROR, BenchmarkProblem, Data, draw, error
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender

# HLO operations that move data between devices.
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The time of the operator on several devices.

    Attributes:
      shape, dtype, backend: the problem and the backend.
      devices: number of devices that the batch is sharded over.
      images: number of images on all devices together.
      regime: "short" for 0.1 seconds of calls without a pause, "sustained" for longer.
      milliseconds: wall time of a call.
      efficiency: time of one device, with as many images as each device has here, divided by
        `milliseconds`.
    """

    shape: str
    dtype: str
    backend: str
    devices: int
    images: int
    regime: str
    milliseconds: float
    efficiency: float


def sharded(data: Data, count: int) -> Contender:
    """Returns the operator with this batch, reordered for each device, on `count` devices.

    Raises:
      RuntimeError: the program moves data between devices, or its result differs from one device's.
    """
    mesh = jax.make_mesh((count,), ("b",), devices=jax.devices()[:count])
    along, everywhere = (jax.NamedSharding(mesh, jax.P(*names)) for names in (("b",), ()))
    images, *rest = data.patches.shape
    # Each device has the images in a different order, so that another device's result is wrong.
    moved = {device: i for i, device in enumerate(mesh.devices.flat)}
    parts = [jax.device_put(jnp.roll(data.patches, i, 0), device) for device, i in moved.items()]
    patches = jax.make_array_from_single_device_arrays((count * images, *rest), along, parts)
    params = jax.device_put(data.params, everywhere)
    embed = jax.jit(ppe.patch_embed)
    program = embed.lower(patches, params).compile()
    if found := COLLECTIVE.search(program.as_text()):
        raise RuntimeError(f"The program for {count} devices contains {found[0]}.")
    alone = embed(data.patches, data.params)
    if not (off := error(alone, data, "embedding")) <= LARGEST_ERROR:
        raise RuntimeError(f"The relative error on one device is {off:.4f}.")
    for shard in program(patches, params).addressable_shards:
        expected = jnp.roll(alone, moved[shard.device], 0)
        if not bool((shard.data == jax.device_put(expected, shard.device)).all()):
            raise RuntimeError(f"{shard.device} of {count} differs from one device alone.")
    return Contender(program, (patches, params))


def scaling(
    counts: list[int],
    images_a_device: int,
    shape_name: str,
    dtype: str,
    *,
    seconds: float,
    **timed,
) -> list[Scaling]:
    """Measures weak scaling, for a short time and sustained.

    Args:
      counts: numbers of devices; 1 is added.
      images_a_device: number of images on each device.
      shape_name, dtype: the problem.
      seconds: duration of a sustained turn.
      **timed: further arguments of `timing.sustained`.
    """
    data = draw(BenchmarkProblem(named_shape(shape_name), images_a_device, dtype))
    backend = ppe.explain(data.patches, data.params).chosen
    compared = {n: sharded(data, n) for n in sorted({1, *counts})}
    found = []
    for regime, length in (("short", min(0.1, seconds)), ("sustained", seconds)):
        times = timing.sustained(compared, seconds=length, **timed)
        for n in compared:
            ms = times[n].milliseconds
            efficiency = times[1].milliseconds / ms
            images = n * images_a_device
            found.append(Scaling(shape_name, dtype, backend, n, images, regime, ms, efficiency))
    return found


def table(found: list[Scaling]) -> str:
    """Formats an aligned table."""
    lines = [f"{'devices':>8}{'images':>9}  {'regime':10}{'ms':>9}{'efficiency':>12}"]
    for s in found:
        lines.append(
            f"{s.devices:8}{s.images:9}  {s.regime:10}{s.milliseconds:9.4f}{s.efficiency:12.3f}"
        )
    return "\n".join(lines)
