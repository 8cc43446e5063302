"""Pictures that devices resize have the images and embeddings of those that Pillow resizes."""

import dataclasses
import io
import json
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from pallas_patch_embed.base.center_crop import CenterCrop
from pallas_patch_embed.embed import Embedder, Preprocessing, command, decoders, jpeg, resizing
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.preprocessing import Whole
from pallas_patch_embed.embed.resizing import MEMORY, Resizer, largest_whole, refusal
from pallas_patch_embed.embed.units import Content
from pallas_patch_embed.layers.resize import FILTERS, MOST_SIDE
from tests.commands.shard_folders import MODEL, assert_same, by_id, run
from tests.commands.test_pixels import photograph
from tests.commands.test_resuming import about
from tests.encoder.goldens import checkpoint
from tests.short_suite import keep

NAFLEX = "hf_siglip2_naflex_p16"
BICUBIC = Image.Resampling.BICUBIC

# How images of 48 x 40 pixels are made.
SIZE = (48, 40)
CROPS = {
    "whole": None,
    "shortest": CenterCrop("shortest", (57, 57)),
    "shortest, torchvision": CenterCrop("shortest", (52, 52), torchvision=True),
    "shortest, padded": CenterCrop("shortest", (41, 41), (9, 80, 200)),
    "squash": CenterCrop("squash", (60, 39)),
    "longest": CenterCrop("longest", (48, 40), (1, 2, 250), torchvision=True),
}


def how(crop=None, resample=BICUBIC, size=SIZE, **options):
    return Preprocessing(int(resample), size, 8, 30, crop=crop, **options)


def split(devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    return NamedSharding(mesh, PartitionSpec("batch"))


def encoded(pixels, format="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def noise(i, height=None, width=None):
    rng = np.random.default_rng(i)
    size = height or int(rng.integers(1, 128)), width or int(rng.integers(1, 128))
    return rng.integers(0, 256, (*size, 3), np.uint8)


def decoded(contents, preprocessing):
    return [preprocessing.decode(Content(content)) for content in contents]


def images_of(contents, preprocessing, limit, devices=1):
    """Returns the host's images, the devices' images, and which pictures came whole."""
    wanted = [each.image for each in decoded(contents, preprocessing)]
    whole = dataclasses.replace(preprocessing, whole=limit)
    found = decoded(contents, whole)
    resizer = Resizer(preprocessing, split(devices))
    images = resizer.copy([each.image for each in found], [each.whole for each in found])()
    assert images.sharding == split(devices)
    return wanted, np.asarray(images), [each.whole for each in found]


@pytest.mark.parametrize("name", keep(CROPS, {"whole", "longest"}.__contains__, "compiles"))
def test_images_are_those_of_the_host(name):
    contents = [encoded(noise(i)) for i in range(18)]
    contents += [encoded(noise(0, *size)) for size in ((48, 40), (1, 1), (52, 100), (100, 52))]
    wanted, found, whole = images_of(contents, how(CROPS[name]), Whole(10**6, 128))
    np.testing.assert_array_equal(found, wanted)
    assert all(whole)


@pytest.mark.slow("compiles programs for each filter")
@pytest.mark.parametrize("name", FILTERS)
def test_images_by_every_filter_are_those_of_the_host(name):
    contents = [encoded(noise(i)) for i in range(40)]
    crop = CenterCrop("shortest", (57, 57))
    resample = Image.Resampling[name.upper()]
    wanted, found, _ = images_of(contents, how(crop, resample), Whole(10**6, 128))
    np.testing.assert_array_equal(found, wanted)


def test_several_devices_resize_their_parts():
    """Pictures that are too large are resized by the host, and stay as they are."""
    contents = [encoded(noise(i)) for i in range(12)]
    wanted, found, whole = images_of(contents, how(), Whole(3 * 60 * 60, 100), devices=2)
    np.testing.assert_array_equal(found, wanted)
    assert len(set(whole)) == 2


def test_pictures_of_many_sizes_need_few_programs(monkeypatch):
    """A program serves smaller pictures unless that would be more than twice the work."""
    monkeypatch.setattr(resizing, "_coefficients", lambda *_: None)
    preprocessing = how(CenterCrop("shortest", (224, 224)), size=(224, 224))
    resizer, rng = Resizer(preprocessing, split()), np.random.default_rng(0)
    chosen = []

    def program(needed, choose=resizer._program):
        chosen.append((needed, choose(needed)))
        return chosen[-1][1]

    monkeypatch.setattr(resizer, "_program", program)
    for _ in range(40):
        shapes = [
            (*np.exp(rng.uniform(3.5, np.log(MOST_SIDE), 2)).astype(int), 3) for _ in range(64)
        ]
        steps = [resizer._step(height, width, True) for height, width, _ in shapes]
        resizer._calls(shapes, np.zeros(64, np.int32), steps, jax.devices()[0])
    assert len({needed for needed, _ in chosen}) > 20 and len(resizer._programs) <= 16
    for needed, found in chosen:
        assert found.serves(needed) and found.side >= needed.side
        assert found.work((224, 224)) <= resizing.MOST_WORK * needed.work((224, 224))


def test_a_program_for_larger_pictures_gives_the_same_images():
    """The pictures of later batches are smaller, or have fewer coefficients, or fewer bytes."""
    resizer = Resizer(how(CROPS["shortest"]), split())
    sizes = [[(256, 256), (200, 190)], [(250, 160), (180, 170)], [(190, 180), (150, 240)]]
    for number, batch in enumerate(sizes):
        pictures = [noise(10 * number + i, *size) for i, size in enumerate(batch)]
        wanted = [how(CROPS["shortest"]).image(Content(encoded(picture))) for picture in pictures]
        found = resizer.copy(pictures, [True] * len(pictures))()
        np.testing.assert_array_equal(found, wanted)
        if number == 0:
            programs = list(resizer._programs)
    assert resizer._programs == programs


def test_batches_that_were_started_before_keep_their_pictures():
    """Pictures that were copied may be resized after those of later batches were copied."""
    sides = (20, 90, 40, 90, 30, 60)
    batches = [[noise(10 * side + i, side, side) for i in range(3)] for side in sides]
    resizer = Resizer(how(), split())
    started = [resizer.copy(pictures, [True] * 3) for pictures in batches]
    for pictures, images in zip(batches, started, strict=True):
        wanted = [how().decode(Content(encoded(picture))).image for picture in pictures]
        np.testing.assert_array_equal(images(), wanted)


@pytest.mark.parametrize("piece", [64, 1000, 2**20])
def test_pictures_in_shared_memory_are_copied_from_there(monkeypatch, piece):
    """They follow each other, or not, or share the memory's end; others have their own memory."""
    monkeypatch.setattr(resizing, "MOST_PIECE", piece)
    pictures = [noise(i) for i in range(12)]
    places = [picture.size for picture in pictures[:9]]
    begins = np.cumsum([5, *places[:2], places[2] + 700, *places[3:8]])
    memory = np.zeros(begins[-1] + places[-1], np.uint8)
    for i, begin in enumerate(begins):
        view = memory[begin : begin + places[i]].reshape(pictures[i].shape)
        view[:] = pictures[i]
        pictures[i] = view
    pictures[10] = np.asfortranarray(pictures[10])
    order = [3, 4, 5, 10, 0, 1, 2, 8, 7, 6, 9, 11]
    resizer = Resizer(how(), split())
    found = resizer.copy([pictures[i] for i in order], [True] * len(order))()
    wanted = [how().image(Content(encoded(np.ascontiguousarray(pictures[i])))) for i in order]
    np.testing.assert_array_equal(found, wanted)


def test_the_memory_of_a_batch_is_free_two_batches_later():
    resizer, memory = Resizer(how(), split()), np.zeros((resizing.HELD + 1, 3, 90, 90, 3), np.uint8)
    flat, results, wanted = memory.reshape(-1), [], []
    for number in range(8):
        place = flat[number % len(memory) * memory[0].size :][: memory[0].size]
        pictures = place.reshape(memory[0].shape)
        pictures[:] = [noise(3 * number + i, 90, 90) for i in range(3)]
        wanted += [how().image(Content(encoded(picture))) for picture in pictures]
        results.append(resizer.copy(list(pictures), [True] * 3)())
        resizer.copied()
    np.testing.assert_array_equal(np.concatenate(results), wanted)


@pytest.mark.slow("compiles programs for photographs")
@pytest.mark.parametrize("side", [224, 384])
def test_photographs_become_the_images_of_the_host(side):
    pictures = [photograph(name) for name in ("astronaut", "chelsea", "coffee")]
    contents = [encoded(np.asarray(picture), "JPEG") for picture in pictures]
    preprocessing = how(CenterCrop("shortest", (side + 32, side + 32)), size=(side, side))
    wanted, found, whole = images_of(contents, preprocessing, Whole(10**7, MOST_SIDE))
    np.testing.assert_array_equal(found, wanted)
    assert all(whole)


def test_pictures_on_their_way_are_bounded():
    limit = largest_whole(512)
    assert limit.size * 512 <= MEMORY and limit.holds(500, 375)
    side = int((limit.size // 3) ** 0.5)
    assert limit.holds(side, side) and not limit.holds(side + 1, side + 1)
    assert limit.holds(1, MOST_SIDE) and not limit.holds(1, MOST_SIDE + 1)
    preprocessing = how(whole=limit)
    assert preprocessing.most_bytes == limit.size and how().most_bytes == 3 * 48 * 40
    small = encoded(noise(0, 20, 20))
    assert how(whole=Whole(1200, 20)).decode(Content(small)).whole
    assert not how(whole=Whole(1199, 20)).decode(Content(small)).whole
    assert not how(whole=Whole(1200, 19)).decode(Content(small)).whole


def other_pixels(monkeypatch):
    """Makes Pillow round differently, as Pillow-SIMD does."""
    resize = Image.Image.resize

    def different(picture, *arguments, **options):
        return resize(picture, *arguments, **options).point(lambda level: level ^ 1)

    monkeypatch.setattr(Image.Image, "resize", different)
    monkeypatch.setattr(resizing, "_order_of_pillow", resizing._order_of_pillow.__wrapped__)


def test_what_a_device_cannot_do_is_refused_with_the_reason(monkeypatch):
    assert refusal(how(), 4) == ""
    assert "NaFlex" in refusal(how(size=None), 4)
    assert "nearest" in refusal(how(resample=Image.Resampling.NEAREST), 4)
    assert "too large" in refusal(how(size=(8, MOST_SIDE + 8)), 4)
    assert "too large" in refusal(how(size=(MOST_SIDE, MOST_SIDE)), 100)
    other_pixels(monkeypatch)
    assert "Pillow" in refusal(how(), 4)
    with pytest.raises(ValueError, match=r"--resize is device, but .*Pillow.*Use --resize host"):
        Embedder(checkpoint(MODEL), batch=4, resize="device")
    assert Embedder(checkpoint(MODEL), batch=4, resize="auto").resizer is None


def test_a_cluster_resizes_on_its_nodes(tmp_path, pictures):
    with pytest.raises(ValueError, match="--resize is device, but with --ray"):
        run([pictures], tmp_path / "out", ray="local", resize="device")


@pytest.fixture
def pictures(tmp_path):
    """Makes a folder of pictures, of which one is damaged and one is large."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(9):
        format = "JPEG" if i % 2 else "PNG"
        content = encoded(noise(i), format)
        (folder / f"{i}.{format.lower()}").write_bytes(content)
    (folder / "bad.png").write_text("no picture")
    (folder / "large.png").write_bytes(encoded(noise(9, 150, 300)))
    return folder


@pytest.mark.slow("runs the command four times")
@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
def test_the_embeddings_are_equal_whoever_resizes(tmp_path, monkeypatch, pictures, here):
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    # The large picture does not fit, so the host resizes it.
    monkeypatch.setattr(resizing, "MEMORY", 130000 * 28)
    assert run([pictures], tmp_path / "host", resize="host") == 1
    resized = []
    copy = Resizer.copy

    def counting(self, pictures, whole):
        resized.extend(whole)
        return copy(self, pictures, whole)

    monkeypatch.setattr(Resizer, "copy", counting)
    assert run([pictures], tmp_path / "device", resize="device") == 1
    assert_same(by_id(tmp_path / "device"), by_id(tmp_path / "host"))
    assert len(by_id(tmp_path / "host")) == 10 and set(resized) == {True, False}


@pytest.mark.slow("runs the command three times")
def test_a_folder_of_the_host_is_resumed_by_a_device(tmp_path, pictures, capsys):
    out = tmp_path / "out"
    assert run([pictures / "0.png", pictures / "1.jpeg"], out, resize="host") == 0
    assert run([pictures], out, resize="device") == 1
    assert run([pictures], tmp_path / "host") == 1
    assert_same(by_id(out), by_id(tmp_path / "host"))
    said = capsys.readouterr().err
    host, device = (json.dumps(each) for each in about(out).values())
    assert '"resize": "host"' in host and '"resize": "device"' in device
    if jpeg.version() is not None:
        assert "simplejpeg" not in host and f'"simplejpeg": "{jpeg.version()}"' in device
        assert f"simplejpeg was None and is now '{jpeg.version()}'" in said


def test_the_encoder_is_compiled_while_the_first_pictures_are_resized(monkeypatch):
    resized, compile = threading.Event(), jax.stages.Lowered.compile
    compiled, copy = [], Resizer.copy
    images = [noise(i) for i in range(2)]
    wanted = Embedder(checkpoint(MODEL), batch=2, resize="device").start(images, [True] * 2)()

    def compiling(lowered, *arguments, **options):
        assert resized.wait(60)
        compiled.append(compile(lowered, *arguments, **options))
        return compiled[-1]

    def copying(resizer, *arguments):
        resize = copy(resizer, *arguments)

        def resizing():
            found = resize()
            resized.set()
            return found

        return resizing

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(Resizer, "copy", copying)
    embedder = Embedder(checkpoint(MODEL), batch=2, resize="device")
    for _ in range(2):  # The program is compiled once.
        np.testing.assert_array_equal(embedder.start(images, [True] * 2)(), wanted)
    assert len(compiled) == 1


def test_the_command_line_takes_the_option(command_line, tmp_path, pictures):
    arguments = ["--checkpoint", checkpoint(NAFLEX), pictures, "--out", tmp_path / "out"]
    code, said = command_line("embed", *arguments, "--resize", "device")
    assert code == 2 and "--resize is device, but the images of a NaFlex encoder" in said
    code, said = command_line("embed", *arguments, "--resize", "elsewhere")
    assert code == 2 and "invalid choice" in said


def test_on_a_CPU_the_host_resizes_by_default():
    assert Options().resize == "auto"
    embedder = Embedder(checkpoint(MODEL), batch=4, resize=Options().resize)
    assert embedder.resizer is None and embedder.not_resized == ""


@pytest.mark.slow("runs the command")
def test_the_command_says_why_a_GPU_does_not_resize(tmp_path, monkeypatch, pictures, capsys):
    class OfGPU(Embedder):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.not_resized = "of a reason"

    monkeypatch.setattr(command, "Embedder", OfGPU)
    assert run([pictures / "0.png"], tmp_path / "out") == 0
    assert "Pictures are resized on the host: of a reason." in capsys.readouterr().err
