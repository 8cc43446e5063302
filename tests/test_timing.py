"""Timing: interleaved turns, medians, spread, and what the samples belong to."""

import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import timing
from benchmarks.timing import Contender, Samples, Timing


def sleeper(seconds, turns, name):
    def contender():
        turns.append(name)
        time.sleep(seconds)
        return jnp.zeros(())

    return Contender(contender)


@pytest.fixture(autouse=True)
def wall_time(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: False)


def test_the_profiler_calls_a_contender_as_it_is():
    """It would jit what is not jitted: with gigabytes of constants, and nothing left to run."""
    contender = Contender(lambda x: x, (jnp.zeros(()),))
    assert isinstance(timing._Profiled(contender), jax.stages.Wrapped)


def test_what_is_compiled_before_is_not_compiled_again():
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


def test_burst_takes_turns_and_finds_who_is_faster():
    turns = []
    contenders = {name: sleeper(s, turns, name) for name, s in (("slow", 0.02), ("fast", 0.002))}
    found = timing.burst(contenders, rounds=3, calls=2, rest=0.0)
    assert turns == ["slow", "fast"] + ["slow", "slow", "fast", "fast"] * 3
    assert found["slow"].calls == found["fast"].calls == 6
    assert 20 <= found["slow"].low <= found["slow"].milliseconds <= found["slow"].high
    assert 2 <= found["fast"].milliseconds < found["slow"].milliseconds


def test_sustained_leaves_out_the_first_half():
    turns = []
    found = timing.sustained({"a": sleeper(0.001, turns, "a")}, seconds=0.1, rounds=2, calls=5)
    assert 1 <= found["a"].milliseconds
    assert found["a"].calls * 5 < len(turns) * 0.75


def test_latency_takes_turns():
    turns = []
    timing.latency({name: sleeper(0, turns, name) for name in "ab"}, rounds=3)
    assert "".join(turns) == "ab" * 4


def test_a_timing_has_the_median_the_spread_and_the_energy():
    samples = Samples([0.0, 1.0, 2.0, 3.0], [100, 1500, 1600, 1700], [90, 600, 700, 650])
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0], samples.between(0.5, 3.0))
    assert (found.milliseconds, found.calls, found.clock, found.power) == (3.0, 5, 1600, 650)
    assert found.low <= 1.0 and found.high >= 5.0
    assert found.joules == pytest.approx(1.95)
    assert "1600 MHz" in str(found) and "650 W" in str(found)
    alone = Timing.of([2.0])
    assert (alone.low, alone.milliseconds, alone.high, alone.joules) == (2.0, 2.0, 2.0, None)
    assert "W" not in str(alone)


def test_samples_are_empty_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with timing.sampled() as samples:
        pass
    assert samples.median("clock") is None


def test_samples_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nwhile true; do echo '1410, 690.5'; sleep 0.01; done\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with timing.sampled() as samples:
        time.sleep(0.3)
    assert len(samples.seconds) > 3
    assert (samples.median("clock"), samples.median("power")) == (1410, 690.5)


def test_calls_take_all_operands_in_turns():
    taken = []
    contender = Contender(lambda x: taken.append(x) or jnp.zeros(()), (0,), ((1,), (2,)))
    timing.burst({"a": contender}, rounds=1, calls=5, rest=0.0)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_the_ceilings_move_the_bytes_that_they_say():
    for name, ceiling in timing.memory_ceilings(1e-6).items():
        assert ceiling.bytes == 1000 + ceiling.contender().nbytes, name
