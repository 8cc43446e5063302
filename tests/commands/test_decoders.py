"""Pictures are decoded in separate processes."""

import functools
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds
from PIL import Image

from pallas_patch_embed.base.files import open_regular
from pallas_patch_embed.embed import Decoder, Preprocessing, command, decoders
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.pictures import PARTS, PIXEL, Budget
from pallas_patch_embed.embed.preprocessing import Whole
from pallas_patch_embed.embed.units import Content, Picture, unreadable
from tests.commands import opened_pictures
from tests.commands.shard_folders import COMMAND
from tests.encoder.goldens import checkpoint
from tests.repository import environment

pytestmark = pytest.mark.usefixtures("time_limit")

FIXED, NAFLEX = "hf_siglip_p14_224", "hf_siglip2_naflex_p16"


@pytest.fixture
def in_processes(monkeypatch):
    """Makes every picture be decoded in a separate process."""
    monkeypatch.setattr(decoders, "DECODED_HERE", 0)


def encoded(width, height, format="PNG"):
    rng = np.random.default_rng(width)
    file = io.BytesIO()
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def preprocessing(name=FIXED):
    return Decoder.of(checkpoint(name)).preprocessing


def opened_file(path, reserved):
    return open_regular(path)


def decoded(opened, workers=2, budget=None, how=None, rows=8):
    """Returns each picture's image, or the reason why it has none."""
    pictures = [Picture("", open_) for open_ in opened]
    pool = decoders.Decoders(how or preprocessing(), workers, budget or Budget(), rows)
    images = []
    with pool:
        for _, decoded in pool.decode(pictures):
            # The images' memory is reused for a later batch.
            images += [r if isinstance(r, str) else r.image.copy() for r in decoded]
    return images


@pytest.mark.parametrize("name", [FIXED, NAFLEX])
def test_a_process_makes_the_image_or_the_reason_that_this_one_makes(tmp_path, monkeypatch, name):
    (tmp_path / "a.png").write_bytes(encoded(40, 30))
    os.mkfifo(tmp_path / "fifo.png")
    contents = [encoded(90, 40, "JPEG"), b"no picture", encoded(31, 77)[:3000], encoded(20, 20)]
    opened = [Content(content) for content in contents]
    files = ("a.png", "absent.png", "fifo.png")
    opened += [functools.partial(opened_file, tmp_path / file) for file in files]
    opened += [unreadable("b", "its cell is empty").open]
    here = decoded(opened, how=preprocessing(name))
    monkeypatch.setattr(decoders, "DECODED_HERE", 0)
    for wanted, found in zip(here, decoded(opened, how=preprocessing(name)), strict=True):
        assert type(found) is type(wanted)
        np.testing.assert_array_equal(found, wanted)
    assert [isinstance(image, str) for image in here] == [
        False,
        *[True] * 2,
        *[False] * 2,
        *[True] * 3,
    ]
    assert here[-1] == "its cell is empty" and "not a regular file" in here[-2]


class RecordingBudget(Budget):
    """Records each reservation of a decoder, and the sum of all reservations at that time."""

    def __init__(self, limit):
        super().__init__(limit)
        self.asked = []

    def reserve(self, size):
        reserved = super().reserve(size)
        if reserved:
            self.asked.append((size, self.reserved))
        return reserved


@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
def test_no_more_memory_is_used_at_a_time_than_the_budget_has(tmp_path, monkeypatch, here):
    """Pictures above a decoder's share reserve more; pictures above the budget run alone."""
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    sides = [40, 60, 100, 40, 62, 30, 101, 40]
    needed, opened = [], []
    for i, side in enumerate(sides):
        path = tmp_path / f"{i}.bmp"
        path.write_bytes(encoded(side, side, "BMP"))
        needed.append(path.stat().st_size + PIXEL * side**2)
        opened.append(functools.partial(opened_file, path))
    budget = RecordingBudget(2 * needed[0] * PARTS // (PARTS - 1) + PARTS)
    share = budget.share(2)
    assert needed[0] <= share < needed[1]
    images = decoded(opened, budget=budget, rows=4)
    assert not any(isinstance(image, str) for image in images)
    larger = [size for size in needed if size > share]
    # With the pixels of a picture the size of its file is reserved, which is known first.
    assert {asked for asked, _ in budget.asked} >= {share, *larger}
    assert all(held <= budget.limit or held == asked for asked, held in budget.asked)
    assert budget.reserved == budget.ahead == 0


# Two processes need more than 9000 bytes for some pictures.
@pytest.mark.parametrize(
    "kind, rows, limit",
    [
        ("contents", 1, 9000),
        ("contents", 16, 10**6),
        ("files", 3, 9000),
        ("files", 16, 10**6),
        ("both", 3, 10**6),
        ("both", 16, 9000),
        ("long names", 1, 10**6),
    ],
)
def test_only_a_picture_that_crashes_its_process_has_no_embedding(
    in_processes, tmp_path, monkeypatch, limit, rows, kind
):
    """This holds for all pictures of the same request, and for a request that waits behind it."""
    contents = [Content(encoded(20 + i, 20)) for i in range(30)]
    long = ["."] * (2000 if kind == "long names" else 0)
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.png").write_bytes(content.content)
    names = ["/".join([str(tmp_path), *long, f"{i}.png"]) for i in range(30)]
    opened = [functools.partial(opened_file, name) for name in names]
    if kind in ("contents", "both"):
        opened = [
            c if kind == "contents" or i % 6 < 3 else opened[i] for i, c in enumerate(contents)
        ]
    wanted = decoded(opened, workers=1)
    budget = Budget(limit)
    for i in (0, 11, 12, 13, 29):
        opened[i], wanted[i] = opened_pictures.crash, "decoding it ended its process, by SIGKILL"
    sent, send = [], decoders._Process.send

    def recorded(process, request):
        if not send(process, request):
            return False
        sent.append(process.requests.copy())
        if len(process.requests) > 1:
            files = [open_ for open_ in request.opens if not isinstance(open_, Content)]
            assert len(pickle.dumps(files)) <= decoders.SMALL
        return True

    monkeypatch.setattr(decoders._Process, "send", recorded)
    found = decoded(opened, budget=budget, rows=rows)
    assert [isinstance(image, str) for image in found] == [isinstance(w, str) for w in wanted]
    for image, right in zip(found, wanted):
        np.testing.assert_array_equal(image, right)
    assert budget.reserved == 0
    # The contents of both requests fit into the memory of one.
    for requests in (requests for requests in sent if len(requests) > 1):
        assert max(each.in_memory for each in requests) <= min(each.spare for each in requests)
    assert max(map(len, sent)) <= decoders.SENT


@pytest.mark.parametrize("here", [0, 8, 512], ids=["processes", "both", "threads"])
def test_images_are_kept_by_nobody_when_all_are_decoded(monkeypatch, here):
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    pictures = [Picture("", Content(encoded(20 + i, 20))) for i in range(40)]
    with decoders.Decoders(preprocessing(), 2, Budget(), 4) as pool:
        images = [
            weakref.ref(result.image)
            for _, results in pool.decode(pictures)
            for result in results
            if not isinstance(result, str)
        ]
    # The threads have ended, each of which may keep its last answer for a moment.
    gc.collect()
    assert len(images) == 40 and [image for image in images if image() is not None] == []
    assert pool is not None  # It is still referenced, and could keep images.


@pytest.mark.parametrize("name", [FIXED, NAFLEX])
@pytest.mark.parametrize("workers, rows", [(1, 4), (2, 1), (2, 5), (3, 40)])
def test_images_are_in_order_and_stay_until_the_next_batch(in_processes, name, workers, rows):
    """There are more batches than fit in memory at once, and with NaFlex image sizes differ."""
    how = preprocessing(name)
    contents = [encoded(16 + 7 * i % 45, 60 - i) for i in range(45)]
    wanted = [how.image(Content(content)) for content in contents]
    assert len({image.shape for image in wanted}) == (1 if name == FIXED else 16)
    opened = [Content(content) for content in contents]
    for image, right in zip(decoded(opened, workers, how=how, rows=rows), wanted, strict=True):
        np.testing.assert_array_equal(image, right)


def test_an_image_that_is_larger_than_its_slot_is_refused(in_processes):
    """The slot of its neighbour is not changed."""
    how = opened_pictures.Larger(2, (9, 9), 3, 9)
    good = Content(encoded(9, 9))
    large = Content(encoded(10, 9))
    (right,) = decoded([good], workers=1, how=how)
    first, refused, last = decoded([good, large, good], how=how)
    np.testing.assert_array_equal(first, right)
    assert refused == "its image has 270 bytes, expected at most 243"
    np.testing.assert_array_equal(last, right)


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_pictures_may_be_smaller_or_larger_than_the_slots_of_their_images(in_processes, rows):
    """A slot has 243 bytes. Formats ignore what follows a picture."""
    how = Preprocessing(2, (9, 9), 3, 9)
    picture = encoded(3, 3)
    contents = [picture.ljust(n, b"?") for n in (0, 241, 242, 243, 244, 245, 486, 10**6)]
    contents += [b"", bytes(243), bytes(244)]
    opened = [Content(content) for content in contents]
    images = decoded(opened, how=how, rows=rows)
    for image in images[:8]:
        np.testing.assert_array_equal(image, images[0])
    assert images[8:] == ["it is not a picture in a format that Pillow reads"] * 3
    for found, wanted in zip(images, decoded(opened, workers=1, how=how), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_images_of_a_request_follow_each_other_and_stay_as_long_as_they_are_held(
    in_processes, held
):
    """A picture that needs more memory than was reserved is decoded again, into its own slot."""
    how = Preprocessing(2, (9, 9), 3, 9, whole=Whole(3000, 50))
    contents = [encoded(3 + i % 7, 5 + i % 3) for i in range(60)]
    contents[2] += bytes(10**6)
    wanted = decoded([Content(content) for content in contents], workers=1, how=how)
    kept, begins = [], []
    with decoders.Decoders(how, 2, Budget(4 * 10**6), 4, held) as pool:
        for _, batch in pool.decode([Picture("", Content(content)) for content in contents]):
            images = [each.image for each in batch]
            kept += images
            begins += [[byte_bounds(image)[0] - byte_bounds(images[0])[0] for image in images]]
            valid = slice(max(len(kept) - 4 * (held + 1), 0), len(kept))
            for image, right in zip(kept[valid], wanted[valid], strict=True):
                np.testing.assert_array_equal(image, right)
    sizes = np.reshape([image.size for image in wanted], (15, 4))
    following = np.cumsum(np.pad(sizes, ((0, 0), (1, 0))), 1)[:, :4].tolist()
    following[0][2:] = [2 * 3000, 3 * 3000]
    assert begins == following


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_contents_can_be_pickled(protocol):
    content = pickle.loads(pickle.dumps(Content(b"content"), protocol))
    with content() as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    "preprocessing, why",
    [
        (opened_pictures.NoProcess, "ended its process, with exit code 7"),
        (opened_pictures.NotStarted, r"could not be started \(Too many open files\)"),
    ],
)
def test_where_no_process_runs_the_command_ends_and_says_what_to_do(
    in_processes, preprocessing, why
):
    how = preprocessing(2, (9, 9), 3, 9)
    with pytest.raises(UnfinishedError, match=f"{why}, .*--workers 1"):
        decoded([Content(b"")] * 40, how=how)


def test_a_process_does_not_import_jax(in_processes):
    assert decoded([opened_pictures.say_whether_jax_is_there]) == ["jax: False"]


def test_signals_to_the_group_are_left_to_the_parent(in_processes):
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    assert decoded([functools.partial(opened_pictures.send_itself, numbers)]) == ["still running"]


@pytest.mark.parametrize("workers, pictures", [(1, 8), (2, 5)])
def test_few_pictures_or_one_worker_start_no_process(monkeypatch, workers, pictures):
    monkeypatch.setattr(decoders, "DECODED_HERE", 5)
    monkeypatch.setattr(decoders, "Child", lambda *_: pytest.fail("started"))
    opened = [Content(encoded(20, 20))] * pictures
    assert len(np.stack(decoded(opened, workers=workers))) == pictures


KILLED_PARENT = """
from tests.commands import opened_pictures
from pallas_patch_embed.embed import decoders, pictures, preprocessing, units

decoders.DECODED_HERE = 0
how = preprocessing.Preprocessing(2, (9, 9), 3, 9)
with decoders.Decoders(how, 2, pictures.Budget(), 4) as pool:
    list(pool.decode([units.Picture("", opened_pictures.wait)]))
"""


def shared_memory(process):
    """Lists the names of a process's writable shared mappings."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.split()[1] == "rw-s"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parent")
def test_processes_and_their_memory_end_with_a_parent_that_is_killed(tmp_path):
    command, env = [sys.executable, "-c", KILLED_PARENT], environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout.readline() == "waits\n"
        # The memory has no name in a file system, so it is freed when the last process ends.
        assert shared_memory(parent) == {"/memfd:images (deleted)"}
        parent.kill()
        # Parent and child share standard output, so this returns when both have ended.
        assert parent.stdout.read() == ""
    assert list(tmp_path.iterdir()) == []


def embeddings(out):
    with np.load(out) as file:
        return list(file["paths"]), file["embeddings"], list(file["failed"]), list(file["reasons"])


def test_the_command_writes_the_same_whoever_decodes(tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    for i in range(7):
        path = tmp_path / "pictures" / f"{i}.png"
        path.write_bytes(encoded(20 + i, 30) if i % 3 else b"no picture")
    written = []
    for here in (512, 0):
        monkeypatch.setattr(decoders, "DECODED_HERE", here)
        out = tmp_path / f"{here}.npz"
        failed = command.run(
            checkpoint(FIXED),
            [tmp_path / "pictures"],
            out,
            options=Options(batch=2, workers=2, quiet=True),
        )
        assert failed == 3
        written.append(embeddings(out))
    for wanted, found in zip(*written):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow("starts two processes")
@pytest.mark.parametrize(
    "start", [COMMAND, [str(Path(sys.executable).with_name("pallas-patch-embed")), "embed"]]
)
def test_the_command_line_can_start_processes(tmp_path, start):
    if not Path(start[0]).exists():
        pytest.skip("the package is not installed")
    (tmp_path / "pictures").mkdir()
    for i in range(decoders.DECODED_HERE + 10):
        (tmp_path / "pictures" / f"{i:04}.png").write_bytes(encoded(1 + i % 30, 5))
    arguments = ["--checkpoint", checkpoint(FIXED), tmp_path / "pictures", "--workers"]
    for workers in (1, 2):
        out = tmp_path / f"{workers}.npz"
        result = subprocess.run(
            [*start, *arguments, str(workers), "--out", out], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
    for wanted, found in zip(embeddings(tmp_path / "1.npz"), embeddings(tmp_path / "2.npz")):
        np.testing.assert_array_equal(found, wanted)
