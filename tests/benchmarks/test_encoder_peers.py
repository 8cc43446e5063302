"""Encoders in all frameworks give the same embeddings for the same weights."""

import argparse
import importlib.util
import sys

import numpy as np
import pytest

from benchmarks import checkpoints, encoder_peers, turns
from benchmarks.encoder_peers import Case
from pallas_patch_embed.siglip2 import Config, load_encoder

TINY = Config(32, 2, 2, 64, 8, (4, 4), image_size=(32, 32))
CHOSEN = argparse.Namespace(turns=2, rest=0, seconds=0.02)


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
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoints.write(TINY, folder)
    return folder


def test_a_written_checkpoint_is_loaded_and_has_numbers_of_ordinary_size(checkpoint):
    encoder = load_encoder(checkpoint, patch_dtype="float32", dtype="float32")
    assert encoder.config == Config(**(vars(TINY) | {"pooling_head": True}))
    pooled = np.asarray(encoder(encoder_peers.images_of(32, 3)).pooler_output)
    assert 0.1 < pooled.std() < 10
    assert np.abs(pooled[0] - pooled[1]).max() > 1e-3


@pytest.mark.parametrize("tuned", [True, False])
def test_all_contenders_in_jax_give_the_same_embeddings(checkpoint, tuned):
    processes = {"jax": InThisProcess(encoder_peers.Jax())}
    found, left_out = encoder_peers.measure(Case("tiny", 3, tuned), checkpoint, processes, CHOSEN)
    flax = importlib.util.find_spec("flax") is not None
    assert len(found) == 3 + flax
    assert len(left_out) == (not flax)
    for result in found:
        assert result.difference < 0.03, result
        assert min(result.burst, result.sustained, result.compile_seconds) > 0
        assert result.peak_bytes > 3 * 32 * 32 * 3
        assert result.contender in encoder_peers.table(found)
    exact = load_encoder(checkpoint, patch_dtype="float32", dtype="float32")
    expected = np.asarray(exact(encoder_peers.images_of(32, 3)).pooler_output)
    pooled = np.asarray(processes["jax"].call("embeddings", name=found[0].contender))
    assert np.linalg.norm(pooled - expected) < 0.03 * np.linalg.norm(expected)


def test_a_framework_that_is_not_installed_is_left_out(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    processes = {"torch": InThisProcess(encoder_peers.Torch())}
    told = processes["torch"].call("prepare", folder=str(checkpoint), images=1, tuned=False)
    assert told["compiled"] == {}
    assert "ModuleNotFoundError" in told["left_out"]["transformers, torch.compile"]


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
