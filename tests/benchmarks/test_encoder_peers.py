"""Encoders in all frameworks give the same embeddings for the same weights."""

import argparse
import dataclasses
import importlib.util
import json
import sys
import types
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import pallas_patch_embed as ppe
from benchmarks import checkpoints, encoder, encoder_contenders, encoder_peers, turns
from benchmarks.encoder_contenders import TANH_GELU
from benchmarks.encoder_peers import EncoderCase
from pallas_patch_embed.encoders.config import Config
from tests.encoder.goldens import DATA

SMALL = dict(width=32, depth=2, heads=2, mlp=64, patch=8, grid=(4, 4), image_size=(32, 32))
TINY = {
    config.family: dataclasses.replace(config, **SMALL) for config in checkpoints.ENCODERS.values()
}
CHOSEN = argparse.Namespace(turns=2, rest=0, seconds=0.02)

# The largest relative errors of bfloat16 and int8, as Frobenius norms. A rounding to int8 changes
# a number of deviation 30 levels by 0.29 on average, 1%; a block rounds four inputs and weights.
BFLOAT16, INT8 = 0.03, 0.05


class InThisProcess:
    """Replaces `turns.Process` by an object in this process."""

    def __init__(self, served):
        self.served = served

    def tell(self, method, **arguments):
        self.told = self.call(method, **arguments)

    def answer(self):
        return self.told

    def call(self, method, **arguments):
        return getattr(self.served, method)(**arguments)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a function from a family to the folder of its tiny checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, config in TINY.items():
        checkpoints.write(config, folder / family)
    return lambda family: folder / family


def exact_embeddings(checkpoint, **changes):
    """Computes the embeddings in float32, after changes of the config."""
    encoder = ppe.load_encoder(checkpoint, patch_dtype="float32", dtype="float32")
    config = dataclasses.replace(encoder.config, **changes)
    encoder = dataclasses.replace(encoder, config=config)
    output = encoder(encoder_contenders.images_of(32, 3))
    return np.asarray(encoder_contenders.embeddings_of(output))


def relative_error(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("family", TINY)
def test_a_written_checkpoint_has_its_config_and_embeddings_that_depend_on_the_image(
    written, family
):
    config = TINY[family]
    loaded = ppe.load_encoder(written(family)).config
    assert loaded == dataclasses.replace(config, pooling=config.pooling or "attention")
    found = exact_embeddings(written(family))
    assert found.shape == (3, checkpoints.PROJECTION if family == "clip" else 32)
    assert 0.1 < found.std() < 10
    for other in found[1:]:
        assert relative_error(other, found[0]) > 10 * BFLOAT16


@pytest.mark.parametrize(
    "family, folder",
    [("siglip", "hf_siglip_p16_224"), ("clip", "families/clip"), ("dinov2", "families/dinov2")],
)
def test_a_written_checkpoint_has_the_arrays_that_transformers_writes(family, folder):
    golden = DATA / folder
    # transformers 5 writes a SigLIP's arrays without this prefix, and reads both.
    added = checkpoints.LAYOUTS[family].prefix if family == "siglip" else ""
    with safe_open(golden / "model.safetensors", "numpy") as file:
        wanted = {added + name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    config = json.loads((golden / "config.json").read_text())
    found = dict(checkpoints.shapes(Config.from_hugging_face(config)))
    # DINOv2's mask token is for its training, and `write` sets use_mask_token to false.
    wanted.pop("embeddings.mask_token", None)
    if family == "clip":
        assert wanted["visual_projection.weight"] == (config["projection_dim"], 32)
        wanted["visual_projection.weight"] = (checkpoints.PROJECTION, 32)
    assert found == wanted


@pytest.mark.parametrize(
    "family, mode", [("siglip", "max-autotune"), ("clip", "default"), ("dinov2", "default")]
)
def test_all_contenders_in_jax_agree_with_float32(written, family, mode):
    checkpoint = written(family)
    served = encoder_contenders.Jax()
    processes = {"jax": InThisProcess(served)}
    found, left_out = encoder_peers.measure(
        EncoderCase("tiny", 3, (mode,), ("int8",)), checkpoint, processes, CHOSEN
    )
    names = ["this encoder, epilogues by cuBLAS", "this encoder"]
    names += ["this encoder with the convolution"]
    alone = "this encoder, called outside of jit"
    # The name says which layers stay in bfloat16.
    (int8,) = (r.contender for r in found if r.contender.startswith("this encoder, blocks in int8"))
    tanh, flax = "this encoder with the tanh GELU", "flax, as big_vision has it"
    names += [tanh] * (family != "siglip") + [int8, alone]
    serves = family == "siglip" and importlib.util.find_spec("flax") is not None
    assert [result.contender for result in found] == names + [flax] * serves
    assert list(left_out) == [flax] * (not serves)
    if family != "siglip":
        assert f"big_vision has SigLIP encoders, but this is '{family}'" in left_out[flax]
    for result in found:
        most = INT8 if "int8" in result.contender else BFLOAT16
        assert result.difference < most, result
        assert min(result.burst, result.sustained, result.compile_seconds) > 0
        assert (
            (result.peak_bytes is None) if result.contender == alone else result.peak_bytes > 9216
        )
        assert result.contender in encoder_peers.table(found)
        changes = {"activation": TANH_GELU} if result.contender == tanh else {}
        embeddings = np.asarray(processes["jax"].call("embeddings", name=result.contender))
        expected = exact_embeddings(checkpoint, **changes)
        assert relative_error(embeddings, expected) < most, result
        if result.contender == alone:
            continue
        # In bfloat16 the activations' results are too close to tell them apart.
        call: Any = served.contenders[result.contender].call
        assert (" tanh(" in call.func.as_text()) == (family == "siglip" or result.contender == tanh)


def test_a_framework_that_is_not_installed_is_left_out(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    processes = {"torch": InThisProcess(encoder_contenders.Torch())}
    told = processes["torch"].call(
        "prepare", folder=str(written("siglip")), images=1, modes=["default"], dtypes=[]
    )
    assert told["compiled"] == {}
    assert "ModuleNotFoundError" in told["left_out"]["transformers, torch.compile"]


@pytest.mark.parametrize(
    "family, architecture",
    [
        ("siglip", "SiglipVisionModel"),
        ("clip", "CLIPVisionModelWithProjection"),
        ("dinov2", "Dinov2Model"),
    ],
)
def test_a_checkpoint_that_transformers_would_not_load_whole_is_left_out(
    written, monkeypatch, family, architecture
):
    class Model:
        @staticmethod
        def from_pretrained(folder, **options):
            assert folder == str(written(family)) and options["output_loading_info"]
            return None, {"missing_keys": {"b", "a"}, "unexpected_keys": set()}

    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: False),
        _dynamo=types.SimpleNamespace(reset=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(**{architecture: Model}))
    told = encoder_contenders.Torch().prepare(str(written(family)), 1, ["reduce-overhead"], [])
    assert told["left_out"] == {
        "transformers, torch.compile, reduce-overhead": f"ValueError: {architecture} does not "
        "accept the checkpoint: {'missing_keys': ['a', 'b']}"
    }


def test_the_number_of_images_decides_the_modes_of_torch(monkeypatch):
    both = ("reduce-overhead", "max-autotune")
    found = [encoder_peers.modes_for(n) for n in (1, 16, 17, 511, 512)]
    assert found == [both] * 2 + [("default",)] * 2 + [("max-autotune",)]
    monkeypatch.setattr(sys, "argv", ["encoder_peers", "--modes", "default"])
    assert encoder_peers.arguments().modes == ["default"]


def test_each_mode_of_torch_is_a_contender_or_is_left_out_with_its_reason(monkeypatch):
    def compile(self, folder, images, mode, dtype):
        if mode == "max-autotune":
            raise RuntimeError("no graphs")
        return encoder_contenders.Contender(lambda: None, 1.0, None)

    monkeypatch.setattr(encoder_contenders.Torch, "_compile", compile)
    modes = ["reduce-overhead", "max-autotune"]
    told = encoder_contenders.Torch().prepare("folder", 1, modes, ["int8"])
    first = "transformers, torch.compile, reduce-overhead"
    assert list(told["compiled"]) == [first, f"{first}, torchao's int8"]
    left = {"transformers, torch.compile, max-autotune": "RuntimeError: no graphs"}
    assert told["left_out"] == left
    told = encoder_contenders.Torch().prepare("folder", 64, ["default"], ["int8"])
    first = "transformers, torch.compile"
    assert list(told["compiled"]) == [first, f"{first}, torchao's int8"]


def test_a_contender_that_fails_after_it_was_compiled_is_left_out_with_its_reason():
    class Served:
        def prepare(self, **arguments):
            facts = {"compile_seconds": 1.0, "peak_bytes": None}
            return {"compiled": {"good": facts, "bad": facts}, "left_out": {}}

        def embeddings(self, name):
            if name == "bad":
                raise RuntimeError("torch: no graphs")
            return [[1.0, 2.0]]

        def turn(self, name, **options):
            assert name == "good"
            return {"milliseconds": 2.0, "joules": None}

    processes = {"torch": InThisProcess(Served())}
    case = EncoderCase("tiny", 1, ("default",))
    found, left_out = encoder_peers.measure(case, "folder", processes, CHOSEN)
    assert [(result.contender, result.burst) for result in found] == [("good", 2.0)]
    assert left_out == {"bad": "torch: no graphs"}


@pytest.mark.slow("starts a process")
def test_further_runs_use_the_checkpoint_and_the_calibration_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoints.ENCODERS, "tiny/8", TINY["siglip"])
    options = "--encoders tiny/8 --images 2 --dtypes int8 --frameworks jax --turns 1 --rest 0"
    options += f" --seconds 0.02 --checkpoints {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["encoder_peers", *options.split()])
    ((found, _),) = encoder_peers.run(encoder_peers.arguments())
    assert any(result.contender.startswith("this encoder, blocks in int8") for result in found)
    assert max(result.difference for result in found) < INT8
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-8"]

    def needless(*arguments, **options):
        raise AssertionError("It is there already.")

    monkeypatch.setattr(checkpoints, "write", needless)
    monkeypatch.setattr(ppe, "calibrate", needless)
    kept = checkpoints.kept("tiny/8", tmp_path)
    assert encoder.in_8_bits(kept, encoder_contenders.images_of(32, 4), "int8").dtype == "bfloat16"


def test_a_turn_takes_the_time_of_its_calls():
    done = []
    found = turns.burst(lambda: done.append(0), lambda x: None, 3, 0)
    assert len(done) == 4 and found.milliseconds < 100
    found = turns.sustained(lambda: done.append(0), lambda x: None, 0.01)
    assert len(done) > 100 and 0 < found.milliseconds < 10


SERVED = """
import sys
from benchmarks.turns import serve

class Served:
    def double(self, x):
        print("not an answer")
        return 2 * x
    def fail(self):
        raise ValueError("a reason")
    def leave(self):
        sys.exit(1)

serve(Served())
"""


def test_a_process_answers_tells_its_errors_and_may_end(pytestconfig):
    command = [sys.executable, "-c", SERVED]
    process = turns.Process("served", command, {}, pytestconfig.rootpath)
    assert process.call("double", x=[1, 2]) == [1, 2, 1, 2]
    with pytest.raises(RuntimeError, match="served: ValueError: a reason"):
        process.call("fail")
    assert process.call("double", x=2) == 4 and not process.ended
    with pytest.raises(RuntimeError, match="'served' ended"):
        process.call("leave")
    process.end()
    assert process.ended
