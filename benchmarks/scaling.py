"""Measures how the operator and whole encoders scale over the GPUs of a machine.

  python -m benchmarks.scaling --out bench

A batch is sharded over 1, 2 and 4 GPUs, with as many images on each: with one process for all GPUs,
and with one for each, which jax.distributed connects. Weights and images are random, and each GPU
has the images in another order. The program of one GPU embeds them first: each GPU's result must be
equal to it bit for bit, and no program may contain a collective. Images a second are the sum over
the processes, which begin together; efficiency is this rate, divided by that of one GPU times the
number of GPUs. The records are written to scaling.jsonl.
"""

import argparse
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from benchmarks import checkpoints
from benchmarks import encoder as encoders
from benchmarks.contenders import draw_images
from benchmarks.embed_runs import gpus
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.embed.embedder import embedding_on
from pallas_patch_embed.encoders.encoder import Encoder
from pallas_patch_embed.encoders.program import BY_CUBLAS

COUNTS = (1, 2, 4)
WAYS = ("one process", "a process for each GPU")

# Images on each GPU.
IMAGES = {"operator": 4736, "B/16 224": 512, "So400m/14 384": 128}

# What is measured: the operator in int8, and encoders by their dtypes.
CASES = (
    ("operator", "int8"),
    ("B/16 224", "bfloat16"),
    ("B/16 224", "int8"),
    ("So400m/14 384", "bfloat16"),
)

# HLO operations that move data between devices.
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
)

# Seconds of calls without a pause in a burst, after an idle time.
BURST, REST = 0.1, 0.3

# Number of calls that are started before the last one's result is waited for.
CALLS = 4


def prepare(name: str, dtype: str, images: int, folder: Path) -> tuple[Any, np.ndarray]:
    """Returns the encoder, or for the operator its parameters, and the images of a GPU.

    `folder` is that of checkpoints.
    """
    model = "B/16 224" if name == "operator" else name
    drawn = draw_images(named_shape(model), images, "random")
    if dtype == "int8" and name != "operator":
        checkpoint = checkpoints.kept(name, folder)
        found = encoders.in_8_bits(checkpoint, drawn[:4], dtype, patch_dtype="int8")
    else:
        found, _ = encoders.draw(model, "int8", "bfloat16")
    return jax.device_get(found.patch_embed if name == "operator" else found), np.asarray(drawn)


def program(model: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns the jitted function of (model, images), sharded along the batch."""
    options = BY_CUBLAS if timing.on_gpu() else None
    if isinstance(model, Encoder):
        return jax.jit(embedding_on(mesh), compiler_options=options)
    embed = jax.shard_map(
        lambda params, images: ppe.embed_images(images, params),
        **dict(mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch")),
    )
    return jax.jit(embed)


def serve(case: Path, index: int, processes: int, address: str, seconds: float) -> None:
    """Measures a process's devices: prints a line when it is ready, and one after each turn.

    It begins a turn when it reads a line, so that all processes begin together.
    """
    if processes > 1:
        jax.distributed.initialize(address, processes, index, local_device_ids=[0])
    model, drawn = pickle.loads(case.read_bytes())
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    order = {device: i for i, device in enumerate(mesh.devices.flat)}
    here = [device for device in mesh.devices.flat if device in jax.local_devices()]
    parts = [jax.device_put(np.roll(drawn, order[device], 0), device) for device in here]
    shape = (len(drawn) * jax.device_count(), *drawn.shape[1:])
    images = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P("batch")), parts)
    params = jax.device_put(model, NamedSharding(mesh, P()))
    compiled = program(model, mesh).lower(params, images).compile()
    if found := COLLECTIVE.search(compiled.as_text()):
        raise RuntimeError(f"The program for {jax.device_count()} GPUs contains {found[0]}.")
    alone = jax.sharding.Mesh(np.array(here[:1]), ("batch",))
    expected = np.asarray(program(model, alone)(*jax.device_put((model, drawn), here[0])))
    if not np.isfinite(expected.astype(np.float32)).all() or not expected.any():
        raise RuntimeError("The embeddings of one GPU are not finite, or zero.")
    for shard in compiled(params, images).addressable_shards:
        wanted = np.roll(expected, order[shard.device], 0)
        if not (np.asarray(shard.data) == wanted).all():
            raise RuntimeError(f"{shard.device} of {jax.device_count()} differs from one GPU.")

    def call_several():
        for _ in range(CALLS):
            y = compiled(params, images)
        jax.block_until_ready(y)

    # Allocates the memory of their results, so that no turn does.
    call_several()
    print("ready", timing.environment(), flush=True)
    for length in (BURST, seconds):
        sys.stdin.readline()
        calls, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < length:
            call_several()
            calls += CALLS
        print("rate", calls * len(drawn) * len(here) / elapsed, flush=True)


def answer(process: Any, word: str) -> str:
    """Returns what follows this word on a line of the process; other lines are of libraries."""
    while line := process.stdout.readline():
        if line.startswith(word + " "):
            return line.removeprefix(word).strip()
    raise EOFError


def measure(case: Path, count: int, way: str, visible: list[str], seconds: float) -> dict[str, Any]:
    """Runs the processes of one way with `count` GPUs, and returns images a second."""
    processes = count if way == WAYS[1] else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(processes):
        own = visible[index : index + 1] if processes > 1 else visible[:count]
        command = [sys.executable, "-m", "benchmarks.scaling", "--serve", str(case), str(index)]
        command += [str(processes), address, "--seconds", str(seconds)]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if visible else {})
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        said = [answer(process, "ready") for process in started]
        rates = {}
        for regime in ("burst", "sustained"):
            time.sleep(REST)
            for process in started:
                process.stdin.write("\n")
                process.stdin.flush()
            rates[regime] = sum(float(answer(process, "rate")) for process in started)
        for process in started:
            process.communicate(timeout=60)
    except (OSError, EOFError) as error:
        raise RuntimeError("A process ended; it says why above.") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {"environment": said[0], **rates}


def records(chosen: argparse.Namespace, visible: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the record of each case, way and number of GPUs."""
    for name, dtype in CASES:
        if chosen.models and name not in chosen.models:
            continue
        images = chosen.images or IMAGES[name]
        with tempfile.TemporaryDirectory() as folder:
            # A process of its own, on the CPU, leaves the GPUs' memory to the others.
            case = Path(folder, "case")
            command = [sys.executable, "-m", "benchmarks.scaling", "--prepare", name, dtype]
            command += [str(images), str(case), str(chosen.checkpoints or folder)]
            subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
            first: dict[str, float] = {}
            for count in (n for n in COUNTS if n <= max(1, len(visible))):
                for way in WAYS if count > 1 else WAYS[:1]:
                    found = measure(case, count, way, visible, chosen.seconds)
                    first = first or found
                    efficiency = {
                        f"efficiency, {regime}": found[regime] / (count * first[regime])
                        for regime in ("burst", "sustained")
                    }
                    about = {"kind": "scaling", "model": name, "dtype": dtype, "images": images}
                    yield about | {"gpus": count, "way": way} | found | efficiency


def main() -> None:
    """Prints and records every measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=IMAGES)
    parser.add_argument("--images", type=int, help="on each GPU, instead of those of the models")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a sustained turn")
    checkpoints.add_folder(parser)
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.add_argument("--prepare", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.prepare:
        name, dtype, images, case, folder = chosen.prepare
        found = prepare(name, dtype, int(images), Path(folder))
        Path(case).write_bytes(pickle.dumps(found))
        return
    if chosen.serve:
        case, index, processes, address = chosen.serve
        serve(Path(case), int(index), int(processes), address, chosen.seconds)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "scaling.jsonl"
    path.unlink(missing_ok=True)
    for record in records(chosen, gpus()):
        line = "{model:14} {dtype:9} {gpus} GPUs, {way:23}: burst {burst:9.1f} images/s, "
        line += "{efficiency, burst:.3f}; sustained {sustained:9.1f}, {efficiency, sustained:.3f}"
        print(line.format_map(record), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
