"""The comparison from uint8 images: no wrong result is timed, and no measurement is lost."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_patch_embed as ppe
from benchmarks import images, results
from pallas_patch_embed.base.problem import NamedShape
from pallas_patch_embed.commands.tune import timing

SMALL = NamedShape("small", 8, 32, 32)
EMBED_IMAGES = ppe.embed_images


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: False)
    monkeypatch.setattr(images, "named_shape", lambda name: SMALL)
    monkeypatch.setattr(images, "FRESH", 2)


def let_xla_cut(monkeypatch, embed=EMBED_IMAGES):
    """Lets the XLA backend pretend to cut images itself."""
    monkeypatch.setattr(images, "cuts_images", lambda *_: True)
    monkeypatch.setattr(
        ppe, "embed_images", lambda *operands, cut=None, **more: embed(*operands, **more)
    )


def run(monkeypatch, folder, *more):
    command = "benchmarks.images --images 1 3 --pixels random --backends xla --rounds 1 --rest 0"
    arguments = [*command.split(), "--seconds", "0.02", "--out", str(folder), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    images.main()


@pytest.mark.slow("compiles every method")
def test_every_way_is_measured_and_recorded(monkeypatch, tmp_path):
    let_xla_cut(monkeypatch)
    run(monkeypatch, tmp_path, "--shapes", "B/16 224", "B/16 256")
    records = results.read(tmp_path / "images.jsonl")
    found = [results.result_of(r) for r in records if r["kind"] == "time"]
    methods = {("xla, cut by the kernel", "int8"), ("patchify + jnp.dot + positions", "bfloat16")}
    methods |= {("patchify + xla", dtype) for dtype in images.DTYPES}
    methods |= {(images.CONVOLUTION, "bfloat16")}
    for number, regimes in ((1, {"burst"}), (3, {"burst", "sustained"})):
        own = [r for r in found if r.images == number]
        assert {(r.contender, r.dtype) for r in own} == methods
        assert {r.regime for r in own} == regimes
        assert all(r.milliseconds > 0 and r.source == "images" for r in own)


def test_a_kernel_that_gives_other_bits_is_not_timed(monkeypatch, tmp_path, capsys):
    def one_bit(*operands, **more):
        y = EMBED_IMAGES(*operands, **more)
        return y.at[0, 0, 0].multiply(1 + 2**-7) if y.dtype == jnp.bfloat16 else y

    let_xla_cut(monkeypatch, one_bit)
    with pytest.raises(SystemExit, match="2 methods gave wrong results"):
        run(monkeypatch, tmp_path, "--shapes", "B/16 224")
    records = [json.loads(line) for line in (tmp_path / "images.jsonl").open()]
    timed = {r["contender"] for r in records if r["kind"] == "time"}
    assert "patchify + xla" in timed and "xla, cut by the kernel" not in timed
    reasons = [r["reason"] for r in records if r["kind"] == "left out"]
    assert reasons == [
        f"wrong: in run 0, 1 of {n * 512} elements differ from patches" for n in (1, 3)
    ]
    printed = capsys.readouterr().out
    assert all(reason in printed for reason in reasons)


def test_an_inaccurate_way_is_not_timed(monkeypatch, tmp_path):
    right = images.convolution
    monkeypatch.setattr(images, "convolution", lambda *operands: 1.02 * right(*operands))
    with pytest.raises(SystemExit, match="wrong results"):
        run(monkeypatch, tmp_path, "--shapes", "B/16 224")
    records = results.read(tmp_path / "images.jsonl")
    timed = {r["contender"] for r in records if r["kind"] == "time"}
    assert "patchify + xla" in timed and images.CONVOLUTION not in timed


def test_a_way_that_does_not_compile_is_left_out_with_the_reason(monkeypatch, tmp_path):
    def fails(*operands):
        raise NotImplementedError("there is none")

    monkeypatch.setattr(images, "convolution", fails)
    run(monkeypatch, tmp_path, "--shapes", "B/16 224")
    records = results.read(tmp_path / "images.jsonl")
    reasons = {r["what"]: r["reason"] for r in records if r["kind"] == "left out"}
    assert reasons == {images.CONVOLUTION: "NotImplementedError: there is none"}


def test_without_time_nothing_is_measured(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, "--shapes", "B/16 224", "--minutes", "0")
    assert "out of time" in capsys.readouterr().out
    assert [r["kind"] for r in results.read(tmp_path / "images.jsonl")] == ["run"]


def test_a_poisoned_output_is_the_memory_that_is_written():
    poison = jnp.full((4, 16, 32), jnp.nan, jnp.bfloat16)
    place = poison.unsafe_buffer_pointer()
    function = jax.jit(images.into, static_argnums=1, donate_argnums=0, keep_unused=True)
    y = function(poison, lambda x: x + 1, jnp.zeros((4, 16, 32), jnp.bfloat16))
    assert poison.is_deleted() and y.unsafe_buffer_pointer() == place
    assert (y == 1).all()


def test_the_first_shape_is_measured_completely_and_many_images_of_others_last():
    found = images.groups(["a", "b"], [1, 512, 4736])
    assert found == [("a", [1, 512]), ("a", [4736]), ("b", [1, 512]), ("b", [4736])]


def test_shapes_to_cut_have_patches_of_16_pixels(monkeypatch):
    monkeypatch.undo()
    found = images.shapes_to_cut()
    assert len(found) == 12 and "g-opt/16 384" in found
    assert not {"B/32 256", "So400m/14 384"} & set(found)
