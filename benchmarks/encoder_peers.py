"""Compares whole encoders with Hugging Face's under torch.compile, and with one in flax.

  python -m benchmarks.encoder_peers --minutes 8 --out bench

The contenders have the same random weights, from a checkpoint in Hugging Face's layout, and compute
embeddings of the same uint8 images on the device in bfloat16. An encoder whose activation is not
the tanh GELU is also measured with it: the difference is the activation's cost. With --dtypes the
encoder is also measured in 8 bits, as `load_encoder` loads it, and transformers' model with
torchao's layers, which compute a scale for each token; the name of the encoder says which layers
stay in bfloat16. JAX and torch each run in their own process, and the contenders take turns. Times
are wall times. A burst times single calls, each until its result is ready; in the sustained turns
calls follow one another, and the GPU's energy is measured. Peak memory includes weights, images and
all intermediate results. Each case is written to encoder_peers.jsonl as soon as it is measured.
Peers that are not installed, or have no encoder of the family, are left out.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns import Process, burst, first_line, serve, sustained

# The only GELU that cuBLAS applies in its matrix products.
TANH_GELU = "gelu_pytorch_tanh"

HERE = Path(__file__).resolve().parents[1]

FRAMEWORKS = ("jax", "torch")

# Modes of torch.compile, and up to and from how many images a call which of them are measured.
MODES = ("default", "reduce-overhead", "max-autotune")
FEW_IMAGES, MANY_IMAGES = 16, 512

# Calls of a burst of few images, whose times vary more.
BURST, BURST_OF_FEW = 5, 50


@dataclasses.dataclass(frozen=True)
class EncoderCase:
    """An encoder, a number of images, modes of torch.compile, and dtypes of 8 bits."""

    encoder: str
    images: int
    modes: tuple[str, ...]
    dtypes: tuple[str, ...] = ()


def images_of(side: int, images: int) -> np.ndarray:
    """Draws random images, which are the same in every process."""
    return np.random.default_rng(1).integers(0, 256, (images, side, side, 3), np.uint8)


def embeddings_of(output: Any) -> Any:
    """Returns the embeddings in the output of an encoder of either framework.

    They are the projected vectors if the checkpoint has a projection, and otherwise the pooled
    ones.
    """
    projected = getattr(output, "image_embeds", None)
    return output.pooler_output if projected is None else projected


@dataclasses.dataclass
class Contender:
    """A compiled encoder.

    Attributes:
      call: function that computes embeddings.
      compile_seconds: duration of the compilation; for torch, of the first two calls.
      peak_bytes: peak memory of a call; None if it is unknown.
    """

    call: Callable[[], Any]
    compile_seconds: float
    peak_bytes: int | None


class Jax:
    """The contenders in JAX, which run in their own process."""

    wait: Callable[[Any], Any]

    def __init__(self):
        self.contenders: dict[str, Contender] = {}
        self.wait = _block_until_ready

    def prepare(
        self, folder: str, images: int, modes: list[str], dtypes: list[str]
    ) -> dict[str, Any]:
        """Compiles all contenders; one that fails is left out with the reason."""
        import jax

        import pallas_patch_embed as ppe
        from pallas_patch_embed.encoders.encoder import described_layers
        from pallas_patch_embed.encoders.program import BY_CUBLAS

        encoder = ppe.load_encoder(folder)
        pixels = jax.device_put(images_of(encoder.config.image_size[0], images))
        gpu = jax.devices()[0].platform == "gpu"
        options = BY_CUBLAS if gpu else None
        unpacked = _unpacked(encoder.patch_embed)
        ways = {
            "this encoder, epilogues by cuBLAS": (_ours, (encoder,), options),
            "this encoder": (_ours, (encoder,), None),
            "this encoder with the convolution": (_with_convolution, (encoder, *unpacked), options),
        }
        if encoder.config.activation != TANH_GELU:
            config = dataclasses.replace(encoder.config, activation=TANH_GELU)
            tanh = dataclasses.replace(encoder, config=config)
            ways["this encoder with the tanh GELU"] = _ours, (tanh,), options
        for dtype in dtypes:
            rounded = _in_8_bits(folder, dtype, encoder.config.image_size[0])
            ways[f"this encoder, {described_layers(rounded.blocks)}"] = _ours, (rounded,), options
        left_out = {}
        self.contenders = {}
        for name, (function, operands, chosen) in ways.items():
            self._compile(name, jax.jit(function, compiler_options=chosen), (*operands, pixels))
        call = functools.partial(_ours, encoder, pixels)
        start = time.perf_counter()
        self.wait(call())
        seconds = time.perf_counter() - start
        self.contenders["this encoder, called outside of jit"] = Contender(call, seconds, None)
        try:
            function, operands = flax_tower(Path(folder), encoder.config)
            jitted = jax.jit(function, compiler_options=options)
            self._compile("flax, as big_vision has it", jitted, (*operands, pixels))
        except Exception as reason:
            left_out["flax, as big_vision has it"] = first_line(reason)
        return describe(self.contenders, left_out)

    def _compile(self, name: str, jitted: Any, operands: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        compiled = jitted.lower(*operands).compile()
        seconds = time.perf_counter() - start
        used = compiled.memory_analysis()
        peak = used and (
            used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        )
        self.contenders[name] = Contender(functools.partial(compiled, *operands), seconds, peak)
        say(name, "compiled", seconds)

    def embeddings(self, name: str) -> list[list[float]]:
        return np.asarray(self.contenders[name].call(), np.float32).tolist()

    def turn(self, name: str, **options: Any) -> dict[str, Any]:
        return turn_of(self.contenders[name].call, self.wait, **options)


def _block_until_ready(x: Any) -> Any:
    import jax

    return jax.block_until_ready(x)


@functools.cache
def _in_8_bits(folder: str, dtype: str, side: int) -> Any:
    """Loads an encoder in 8 bits once for all numbers of images."""
    from benchmarks.encoder import in_8_bits

    start = time.perf_counter()
    rounded = in_8_bits(folder, images_of(side, 4), dtype)
    say(dtype, "calibrated and rounded", time.perf_counter() - start)
    return rounded


def say(what: str, done: str, seconds: float) -> None:
    """Prints a step that takes long to standard error, to which `serve` redirects."""
    print(f"  {what}: {done} in {seconds:.0f} s", flush=True)


def _ours(encoder, images):
    return embeddings_of(encoder(images))


def _with_convolution(encoder, kernel, prefix, table, images):
    import jax.numpy as jnp

    from benchmarks.contenders import convolution
    from pallas_patch_embed.encoders.encoder import transform

    x = convolution(images, kernel, table)
    prefix = jnp.broadcast_to(prefix, (len(x), *prefix.shape)).astype(x.dtype)
    return embeddings_of(transform(encoder, jnp.concatenate([prefix, x], 1)))


def _unpacked(params: Any) -> tuple[Any, Any, Any]:
    """Returns the kernel [p, p, 3, D], the tokens in front [R, D], and bias + positions [S, D].

    They are those of a floating-point `PatchEmbedParams`, so they apply to pixels in [-1, 1].
    """
    p = params.patch_size
    kernel = params.weight[:, : params.K].T.reshape(p, p, params.channels, params.N)
    return kernel, params.table[: params.prefix], params.table[params.prefix :]


def flax_tower(folder: Path, config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Builds the ViT of big_vision's vit.py from flax's modules; returns it and its weights.

    Attention is flax's MultiHeadDotProductAttention. Blocks are scanned. Kernels and the residual
    stream are bfloat16.

    Raises:
      ImportError: flax is not installed.
      ValueError: the checkpoint is not a SigLIP, the only family of which big_vision has encoders.
    """
    if config.family != "siglip":
        raise ValueError(f"big_vision has SigLIP encoders, but this is {config.family!r}.")
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    dtype = jnp.bfloat16

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(config.mlp, dtype=dtype, name="fc1")(x))
            return nn.Dense(config.width, dtype=dtype, name="fc2")(x)

    def attention(name):
        return nn.MultiHeadDotProductAttention(num_heads=config.heads, dtype=dtype, name=name)

    def norm(name):
        return nn.LayerNorm(epsilon=config.eps, name=name)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = norm("norm1")(x).astype(dtype)
            x = x + attention("attention")(y, y)
            return x + Mlp(name="mlp")(norm("norm2")(x).astype(dtype))

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            probe = self.param("probe", nn.initializers.zeros, (1, 1, config.width))
            query = jnp.tile(probe.astype(dtype), (len(x), 1, 1))
            x = attention("attention")(query, x)
            return (x + Mlp(name="mlp")(norm("norm")(x).astype(dtype)))[:, 0]

    class Embedding(nn.Module):
        @nn.compact
        def __call__(self, images):
            sides, p = images.shape[1:3], config.patch
            x = (images.astype(jnp.float32) / 127.5 - 1).astype(dtype)
            x = nn.Conv(config.width, (p, p), (p, p), "VALID", dtype=dtype, name="conv")(x)
            x = x.reshape(len(x), (sides[0] // p) * (sides[1] // p), config.width)
            shape = (1, x.shape[1], config.width)
            return x + self.param("positions", nn.initializers.zeros, shape).astype(dtype)

    def whole(params, images):
        x = Embedding().apply({"params": params["embedding"]}, images)

        def step(x, p):
            return Block().apply({"params": p}, x), None

        x, _ = jax.lax.scan(step, x, params["blocks"])
        x = norm(None).apply({"params": params["norm"]}, x).astype(dtype)
        return Head().apply({"params": params["head"]}, x)

    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")
    arrays = {name.removeprefix("vision_model."): array for name, array in stored.items()}
    return whole, (jax.device_put(_flax_params(arrays, config, dtype)),)


def _flax_params(arrays: dict[str, np.ndarray], config: Any, dtype: Any) -> dict[str, Any]:
    """Renames and reshapes the arrays of a `SiglipVisionModel` for flax's modules."""
    D, heads = config.width, config.heads
    inner = (heads, D // heads)

    def kernel(weight, shape):
        return {"kernel": weight.T.reshape(shape).astype(dtype)}

    def dense(name):
        weight = arrays[f"{name}.weight"]
        return kernel(weight, weight.T.shape) | {"bias": arrays[f"{name}.bias"].astype(dtype)}

    def norm(name):
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def projection(weight, bias):
        return kernel(weight, (D, *inner)) | {"bias": bias.reshape(inner).astype(dtype)}

    def out(name):
        own = dense(name)
        return own | {"kernel": own["kernel"].reshape(*inner, D)}

    def block(i):
        layer = f"encoder.layers.{i}"
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        attention = {
            name: projection(
                arrays[f"{layer}.self_attn.{own}.weight"], arrays[f"{layer}.self_attn.{own}.bias"]
            )
            for name, own in names.items()
        }
        return dict(
            norm1=norm(f"{layer}.layer_norm1"),
            attention=attention | {"out": out(f"{layer}.self_attn.out_proj")},
            norm2=norm(f"{layer}.layer_norm2"),
            mlp={name: dense(f"{layer}.mlp.{name}") for name in ("fc1", "fc2")},
        )

    import jax

    weights = np.split(arrays["head.attention.in_proj_weight"], 3)
    biases = np.split(arrays["head.attention.in_proj_bias"], 3)
    attention = {
        name: projection(*own) for name, own in zip(("query", "key", "value"), zip(weights, biases))
    }
    blocks = [block(i) for i in range(config.depth)]
    conv = arrays["embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    return dict(
        embedding=dict(
            conv=dict(
                kernel=conv.astype(dtype),
                bias=arrays["embeddings.patch_embedding.bias"].astype(dtype),
            ),
            positions=arrays["embeddings.position_embedding.weight"][None],
        ),
        blocks=jax.tree.map(lambda *x: np.stack(x), *blocks),
        norm=norm("post_layernorm"),
        head=dict(
            probe=arrays["head.probe"],
            attention=attention | {"out": out("head.attention.out_proj")},
            norm=norm("head.layernorm"),
            mlp={name: dense(f"head.mlp.{name}") for name in ("fc1", "fc2")},
        ),
    )


class Torch:
    """Hugging Face's model in torch, which runs in its own process."""

    def __init__(self):
        self.contenders: dict[str, Contender] = {}

    def prepare(
        self, folder: str, images: int, modes: list[str], dtypes: list[str]
    ) -> dict[str, Any]:
        """Compiles the model in each mode, and in 8 bits in the first one.

        What fails is left out with the reason.
        """
        self.contenders, left_out = {}, {}
        for mode, dtype in [(mode, "") for mode in modes] + [(modes[0], d) for d in dtypes]:
            name = f"transformers, torch.compile{'' if mode == 'default' else f', {mode}'}"
            if dtype:
                name = f"{name}, torchao's {dtype}"
            try:
                self.contenders[name] = self._compile(folder, images, mode, dtype)
                say(name, "compiled", self.contenders[name].compile_seconds)
            except Exception as reason:
                left_out[name] = first_line(reason)
        return describe(self.contenders, left_out)

    def _compile(self, folder: str, images: int, mode: str, dtype: str) -> Contender:
        import torch
        import transformers

        gpu = torch.cuda.is_available()
        device = "cuda" if gpu else "cpu"
        gc.collect()
        architecture = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
        model, loaded = getattr(transformers, architecture).from_pretrained(
            folder, attn_implementation="sdpa", output_loading_info=True
        )
        wrong = {kind: sorted(names) for kind, names in loaded.items() if names}
        if wrong:
            raise ValueError(f"{architecture} does not accept the checkpoint: {wrong}")
        model = model.eval().to(device, torch.bfloat16)
        if dtype:
            _quantise_by_torchao(model, dtype)
        pixels = torch.from_numpy(images_of(model.config.image_size, images)).to(device)
        processor = json.loads(Path(folder, "preprocessor_config.json").read_text())
        mean, std = (
            torch.tensor(processor[f"image_{name}"], device=device)[:, None, None]
            for name in ("mean", "std")
        )

        def embed(images):
            x = (images.permute(0, 3, 1, 2).to(torch.float32) / 255 - mean) / std
            return embeddings_of(model(pixel_values=x.to(torch.bfloat16)))

        compiled = torch.compile(embed, mode=mode if gpu else "default", dynamic=False)

        def call():
            with torch.inference_mode():
                return compiled(pixels)

        start = time.perf_counter()
        # CUDA graphs are recorded in the second call.
        for _ in range(2):
            call()
            self.wait(None)
        seconds = time.perf_counter() - start
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            call()
            self.wait(None)
        peak = None
        if gpu and mode == "default":
            peak = torch.cuda.max_memory_allocated()
        elif gpu and not self.contenders:
            # CUDA graphs keep their memory in a pool, which counts as reserved, as does another
            # mode's pool.
            peak = torch.cuda.memory_reserved()
        return Contender(call, seconds, peak)

    def wait(self, x: Any) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def embeddings(self, name: str) -> list[list[float]]:
        return self.contenders[name].call().float().cpu().tolist()

    def turn(self, name: str, **options: Any) -> dict[str, Any]:
        return turn_of(self.contenders[name].call, self.wait, **options)


def _quantise_by_torchao(model: Any, dtype: str) -> None:
    """Replaces the linear layers of a model in torch by layers in 8 bits, with dynamic scales.

    torchao's own settings of the compiler are left out: with them B/16 in int8 takes 202 s to
    compile on an H200, and So400m/14 384 more than 500 s.
    """
    from torchao import quantization

    by_row = quantization.PerRow()
    config = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig,
        "float8_e4m3fn": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[dtype](granularity=by_row, set_inductor_config=False)
    quantization.quantize_(model, config)


def turn_of(
    call: Any, wait: Any, regime: str, calls: int, rest: float, seconds: float
) -> dict[str, Any]:
    """Times one turn in a regime: "burst", of this number of calls, or "sustained"."""
    turn = burst(call, wait, calls, rest) if regime == "burst" else sustained(call, wait, seconds)
    return dataclasses.asdict(turn)


def describe(contenders: dict[str, Contender], left_out: dict[str, str]) -> dict[str, Any]:
    """Describes the compiled contenders, and those that are left out."""
    compiled = {
        name: {"compile_seconds": c.compile_seconds, "peak_bytes": c.peak_bytes}
        for name, c in contenders.items()
    }
    return {"compiled": compiled, "left_out": left_out}


@dataclasses.dataclass(frozen=True)
class EncoderMeasurement:
    """The measurements of one contender in one case.

    Attributes:
      encoder, images: the case.
      contender: name of the contender.
      burst, sustained: milliseconds per call in each regime, median over all turns.
      joules: energy per image in the sustained regime; None if it is unknown.
      compile_seconds, peak_bytes: as in `Contender`.
      difference: relative difference between its embeddings and those of the first contender.
    """

    encoder: str
    images: int
    contender: str
    burst: float
    sustained: float
    joules: float | None
    compile_seconds: float
    peak_bytes: int | None
    difference: float


def measure(
    case: EncoderCase, folder: Path, processes: dict[str, Process], chosen: argparse.Namespace
) -> tuple[list[EncoderMeasurement], dict[str, str]]:
    """Measures all contenders of a case; returns the results, and why contenders were left out."""
    arguments = dict(folder=str(folder), images=case.images, modes=case.modes, dtypes=case.dtypes)
    found: dict[str, dict[str, Any]] = {}
    if "max-autotune" in case.modes:
        # Both frameworks autotune by timing, and would disturb each other if they did at once.
        found = {name: p.call("prepare", **arguments) for name, p in processes.items()}
    else:
        for process in processes.values():
            process.tell("prepare", **arguments)
        found = {name: process.answer() for name, process in processes.items()}
    left_out = {k: v for answer in found.values() for k, v in answer["left_out"].items()}
    compiled = {
        (framework, name): facts
        for framework, answer in found.items()
        for name, facts in answer["compiled"].items()
    }
    outputs = {
        key: np.asarray(processes[key[0]].call("embeddings", name=key[1])) for key in compiled
    }
    turns = collections.defaultdict(list)
    for regime, rounds in (("burst", chosen.turns), ("sustained", max(1, chosen.turns - 1))):
        for _, key in ((i, key) for i in range(rounds) for key in compiled):
            options = dict(regime=regime, rest=chosen.rest, seconds=chosen.seconds)
            options["calls"] = BURST_OF_FEW if case.images <= FEW_IMAGES else BURST
            turns[key, regime].append(processes[key[0]].call("turn", name=key[1], **options))

    def median(key, regime, what):
        values = [turn[what] for turn in turns[key, regime]]
        return None if None in values else statistics.median(values)

    expected = next(iter(outputs.values()))
    results = []
    for key, facts in compiled.items():
        joules = median(key, "sustained", "joules")
        off = np.linalg.norm(outputs[key] - expected) / np.linalg.norm(expected)
        results.append(
            EncoderMeasurement(
                case.encoder,
                case.images,
                key[1],
                median(key, "burst", "milliseconds"),
                median(key, "sustained", "milliseconds"),
                joules and joules / case.images,
                facts["compile_seconds"],
                facts["peak_bytes"],
                float(off),
            )
        )
    return results, left_out


def table(found: list[EncoderMeasurement]) -> str:
    """Tabulates the contenders of one case, the fastest first."""
    head = f"{'':45}{'burst ms':>10}{'sustained':>11}{'images/s':>11}{'J/image':>9}"
    lines = [f"{head}{'GB':>7}{'compile s':>11}{'difference':>12}"]
    for r in sorted(found, key=lambda r: r.sustained):
        joules = "" if r.joules is None else f"{r.joules:.4f}"
        peak = "" if r.peak_bytes is None else f"{r.peak_bytes / 1e9:.2f}"
        rate = 1e3 * r.images / r.sustained
        lines.append(
            f"{r.contender:45}{r.burst:10.2f}{r.sustained:11.2f}{rate:11,.0f}{joules:>9}"
            f"{peak:>7}{r.compile_seconds:11.1f}{r.difference:12.3%}"
        )
    return "\n".join(lines)


def modes_for(images: int) -> tuple[str, ...]:
    """Returns the modes of torch.compile that are measured for a number of images per call.

    With few images they are those that record CUDA graphs.
    """
    if images <= FEW_IMAGES:
        return ("reduce-overhead", "max-autotune")
    return ("max-autotune",) if images >= MANY_IMAGES else ("default",)


def run(
    chosen: argparse.Namespace, configs: dict[str, Any], pythons: dict[str, str]
) -> Iterator[tuple[list[EncoderMeasurement], dict[str, str]]]:
    """Measures cases until the time limit is reached.

    Args:
      chosen: the command line.
      configs: encoders by name.
      pythons: the interpreter of each framework.
    """
    from benchmarks import checkpoints

    end = time.monotonic() + 60 * chosen.minutes
    cases = [
        EncoderCase(name, n, tuple(chosen.modes or modes_for(n)), tuple(chosen.dtypes))
        for n in sorted(chosen.images, reverse=True)
        for name in chosen.encoders
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
        processes = {
            name: Process(
                name, [pythons[name], "-m", __spec__.name, "--serve", name], environment, HERE
            )
            for name in chosen.frameworks
        }
        try:
            for case in cases:
                if time.monotonic() > end:
                    print(
                        f"{case.encoder}, {case.images} images: skipped, out of time.", flush=True
                    )
                    continue
                own = Path(folder, str(list(configs).index(case.encoder)))
                if not own.exists():
                    checkpoints.write(configs[case.encoder], own)
                yield measure(case, own, processes, chosen)
        finally:
            for process in processes.values():
                process.end()


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    from benchmarks.checkpoints import ENCODERS
    from pallas_patch_embed.base.dtypes import EIGHT_BITS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoder_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument(
        "--images",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 64, 512],
        help="images per call; default: %(default)s",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        help="modes of torch.compile; by default both that record CUDA graphs for at most "
        f"{FEW_IMAGES} images, max-autotune for at least {MANY_IMAGES}, and otherwise its default",
    )
    parser.add_argument(
        "--dtypes", nargs="*", choices=EIGHT_BITS, default=[], help="also in 8 bits"
    )
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--torch-python", default=sys.executable, help="Python with torch")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--turns", type=int, default=3, help="number of turns of each contender")
    parser.add_argument("--rest", type=float, default=0.5, help="idle seconds before each burst")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="duration of a sustained turn in seconds"
    )
    parser.add_argument("--out", type=Path, help="folder for encoder_peers.jsonl")
    return parser.parse_args()


def main() -> None:
    """Prints and records every case."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Jax() if sys.argv[2] == "jax" else Torch())
        return
    chosen = arguments()
    from benchmarks.checkpoints import ENCODERS

    path = chosen.out and chosen.out / "encoder_peers.jsonl"
    if path:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    pythons = {"jax": sys.executable, "torch": chosen.torch_python}
    for found, left_out in run(chosen, ENCODERS, pythons):
        for name, reason in left_out.items():
            print(f"without {name}: {reason}")
        if found:
            print(f"\n{found[0].encoder}, {found[0].images} images\n{table(found)}", flush=True)
        records = [{"kind": "encoder peer"} | dataclasses.asdict(r) for r in found]
        records += [{"kind": "left out", "what": k, "reason": v} for k, v in left_out.items()]
        if path:
            with path.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
