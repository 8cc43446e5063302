"""Timing: interleaved turns, medians and spread, and samples of clock and power."""

import itertools
import time
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import ceilings
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender, Sample, Samples, Timing
from tests.clock import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Replaces the wall clock by a clock that the test controls."""
    clock = Clock()
    monkeypatch.setattr(timing, "on_gpu", lambda: False)
    fake = types.SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep)
    monkeypatch.setattr(timing, "time", fake)
    return clock


@pytest.fixture
def sleeper(clock):
    """Returns a function that makes contenders, which take `seconds` and record their turns."""

    def make(seconds, turns, name):
        def contender():
            turns.append(name)
            clock.sleep(seconds)
            return jnp.zeros(())

        return Contender(contender)

    return make


def test_the_profiler_does_not_jit_a_contender():
    """Under jit, gigabytes of operands would become constants, and XLA would fold the result."""
    contender = Contender(lambda x: x, (jnp.zeros(()),))
    assert isinstance(timing._Profiled(contender), jax.stages.Wrapped)


def test_a_compiled_contender_is_not_compiled_again():
    compiled = []

    def function(x):
        compiled.append(x)
        return x + 1

    def refused(x):
        raise NotImplementedError

    contenders = [Contender(jax.jit(f), (jnp.zeros(()),)) for f in (function, refused)]
    timing.compile_all([*contenders, Contender(function, (1,))])
    assert contenders[0]() == 1 and len(compiled) == 1
    with pytest.raises(NotImplementedError):
        contenders[1]()


def test_burst_takes_turns_after_a_rest_that_is_not_counted(sleeper, clock):
    turns = []
    contenders = {name: sleeper(s, turns, name) for name, s in (("slow", 0.02), ("fast", 0.002))}
    found = timing.burst(contenders, rounds=3, calls=2, rest=10.0)
    assert turns == ["slow", "fast"] + ["slow", "slow", "fast", "fast"] * 3
    assert clock.seconds == pytest.approx(0.022 + 3 * (2 * 10 + 2 * 0.022))
    for name, milliseconds in (("slow", 20), ("fast", 2)):
        assert found[name].calls == 6
        times = found[name].low, found[name].milliseconds, found[name].high
        assert times == pytest.approx((milliseconds,) * 3)


def test_sustained_leaves_out_the_first_half(clock):
    calls = []

    def contender():
        """Takes 1 s in the first half of its turn, which begins after one call, and then 2 s."""
        calls.append(2 if clock.seconds >= 1 + 50 else 1)
        clock.sleep(calls[-1])
        return jnp.zeros(())

    found = timing.sustained({"a": Contender(contender)}, seconds=100, rounds=1, calls=5)
    times = found["a"].low, found["a"].milliseconds, found["a"].high
    assert times == pytest.approx((2000,) * 3)
    # No call in the first half of the turn is counted, and every call in the second half is.
    assert (found["a"].calls, calls) == (5, [1] * 51 + [2] * 25)


def test_latency_takes_turns_whose_order_varies(sleeper):
    turns = []
    found = timing.latency({name: sleeper(0.003, turns, name) for name in "abc"}, rounds=30)
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(rounds) == 31
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert set(itertools.pairwise(turns)) >= set(itertools.permutations("abc", 2))
    assert [found[name].milliseconds for name in "abc"] == pytest.approx([3, 3, 3])


def test_a_timing_has_the_median_and_the_spread_of_what_was_measured():
    samples = Samples(
        Sample(*x) for x in ((0.0, 100, 90), (1.0, 1500, 600), (2.0, 1600, 700), (3.0, 1700, 650))
    )
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0], samples.between(0.5, 3.0))
    assert (found.milliseconds, found.calls, found.clock, found.power) == (3.0, 5, 1600, 650)
    assert (found.low, found.high) == (1.4, 4.6)
    pair = Timing.of([1.0, 100.0])
    assert 1 <= pair.low < pair.milliseconds < pair.high <= 100
    alone = Timing.of([2.0])
    assert (alone.low, alone.milliseconds, alone.high, alone.power) == (2.0, 2.0, 2.0, None)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Installs an nvidia-smi that records its arguments, prints samples, and then makes a file."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\necho $@ > {tmp_path}/asked\n"
        f"for i in 1 2 3 4; do echo '1410, 690.5'; done\n: > {tmp_path}/said\nexec sleep 1000\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_there_are_no_samples_without_a_GPU(nvidia_smi):
    with timing.sampled() as samples:
        pass
    assert samples.median("clock") is None and not (nvidia_smi / "asked").exists()


def test_there_are_no_samples_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setenv("PATH", "")
    with timing.sampled() as samples:
        pass
    assert samples.median("power") is None


@pytest.mark.parametrize("visible, asked", [(None, "0"), ("3,1", "3"), ("GPU-1a2b", "GPU-1a2b")])
def test_samples_are_of_the_GPU_that_JAX_uses(nvidia_smi, monkeypatch, visible, asked):
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with timing.sampled() as samples:
        while not (nvidia_smi / "said").exists():
            time.sleep(0.01)
    assert len(samples) == 4
    assert (samples.median("clock"), samples.median("power")) == (1410, 690.5)
    assert f"--id={asked} " in (nvidia_smi / "asked").read_text()


def test_calls_cycle_through_all_operands():
    taken = []
    contender = Contender(lambda x: taken.append(x) or jnp.zeros(()), (0,), ((1,), (2,)))
    timing.burst({"a": contender}, rounds=1, calls=5, rest=0.0)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_the_ceilings_move_the_stated_bytes():
    for name, ceiling in ceilings.memory_ceilings(1e-6).items():
        assert ceiling.bytes == 1000 + ceiling.contender().nbytes, name
