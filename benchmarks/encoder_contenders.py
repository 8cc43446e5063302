"""The encoders that `benchmarks.encoder_peers` compares.

JAX and torch cannot share a process, so each has an object whose methods a process of its own
serves: `python -m benchmarks.encoder_contenders jax`.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.flax_tower import flax_tower
from benchmarks.turns import burst, first_line, serve, sustained

# The only GELU that cuBLAS applies in its matrix products.
TANH_GELU = "gelu_pytorch_tanh"


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


class Torch:
    """Hugging Face's model in torch, which runs in its own process."""

    def __init__(self):
        self.contenders: dict[str, Contender] = {}

    def prepare(
        self, folder: str, images: int, modes: list[str], dtypes: list[str]
    ) -> dict[str, Any]:
        """Compiles the model in each mode, and in 8 bits; what fails is left out with the reason.

        In 8 bits it is compiled in mode reduce-overhead if that is among the modes, and otherwise
        in the default mode.
        """
        self.contenders, left_out = {}, {}
        # torch.compile compiles a function at most eight times, and then runs it uncompiled. For it
        # all `embed` of `_compile` are one function.
        with contextlib.suppress(ImportError):
            import torch

            torch._dynamo.reset()
        quantised = "reduce-overhead" if "reduce-overhead" in modes else "default"
        for mode, dtype in [(mode, "") for mode in modes] + [(quantised, d) for d in dtypes]:
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
        # The contenders before this one keep their weights, and their graphs' pools.
        held = torch.cuda.memory_allocated() if gpu else 0
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
            peak = torch.cuda.max_memory_allocated() - held
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
    """Replaces the dense layers of a model's blocks by layers in 8 bits, with dynamic scales.

    This encoder has the same layers in 8 bits. The pooling head has one row for each image, and on
    a GPU torch's product of int8 refuses 16 rows and fewer. A failure while a CUDA graph is
    recorded would break the graphs of the other contenders.

    torchao's own settings of the compiler are left out: with them B/16 in int8 takes 202 s to
    compile on an H200, and So400m/14 384 more than 500 s.
    """
    import torch
    from torchao import quantization

    by_row = quantization.PerRow()
    config = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig,
        "float8_e4m3fn": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[dtype](granularity=by_row, set_inductor_config=False)

    def in_block(module: Any, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and "encoder.layer" in name

    quantization.quantize_(model, config, filter_fn=in_block)


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


# The contenders by framework.
FRAMEWORKS: dict[str, Callable[[], Any]] = {"jax": Jax, "torch": Torch}


def main() -> None:
    """Serves the contenders of a framework."""
    serve(FRAMEWORKS[sys.argv[1]]())


if __name__ == "__main__":
    main()
