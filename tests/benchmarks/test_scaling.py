"""The benchmark of several GPUs compares their results, and refuses programs that communicate."""

import io
import pickle

import jax
import pytest
from jax import lax

import pallas_patch_embed as ppe
from benchmarks import scaling


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "case"
    path.write_bytes(pickle.dumps(scaling.prepare("operator", "int8", 2, tmp_path)))
    return path


def serve(monkeypatch, case):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    scaling.serve(case, 0, 1, "", 0.02)


def test_several_devices_of_a_process_agree(monkeypatch, capsys, case):
    assert jax.device_count() > 1
    serve(monkeypatch, case)
    ready, *rates = capsys.readouterr().out.splitlines()
    assert ready.startswith("ready cpu x ")
    assert [float(rate.removeprefix("rate ")) > 0 for rate in rates] == [True, True]


def test_a_program_that_communicates_and_a_wrong_result_are_refused(monkeypatch, case):
    embed = ppe.embed_images

    def communicating(images, params):
        y = embed(images, params)
        return y + 0 * lax.psum(y, "batch")

    monkeypatch.setattr(ppe, "embed_images", communicating)
    with pytest.raises(RuntimeError, match="contains all-reduce"):
        serve(monkeypatch, case)

    def another(images, params):
        y = embed(images, params)
        return y + (lax.axis_index("batch") == 1).astype(y.dtype)

    monkeypatch.setattr(ppe, "embed_images", another)
    with pytest.raises(RuntimeError, match="differs from one GPU"):
        serve(monkeypatch, case)


@pytest.mark.slow("starts three processes")
def test_the_rates_of_two_processes_are_added(monkeypatch, case):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = []
    for way, devices in zip(scaling.WAYS, (2, 1)):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
        found.append(scaling.measure(case, 2, way, ["0", "1"], 0.1))
    for rates in found:
        assert rates["environment"].startswith("cpu x 2, ")
        assert rates["burst"] > 0 and rates["sustained"] > 0
