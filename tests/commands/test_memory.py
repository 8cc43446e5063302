"""What pictures may take in memory: the budget, the limits, and the peak for each source."""

import dataclasses
import functools
import gzip
import http.server
import io
import itertools
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import threading

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFile
from PIL import Image

from pallas_patch_embed.base.center_crop import CenterCrop
from pallas_patch_embed.embed import (
    Preprocessing,
    decoders,
    on_ray,
    parquet,
    parquet_pages,
    units,
)
from pallas_patch_embed.embed.changes import Changes
from pallas_patch_embed.embed.pictures import PARTS, PIXEL, Budget, LargerError, LimitError
from pallas_patch_embed.embed.units import Content, Picture
from tests.commands.shard_folders import (
    COMMAND,
    MODEL,
    assert_same,
    by_id,
    encoded,
    expected,
    run,
    shards,
    write_tar,
)
from tests.encoder.goldens import checkpoint

pytestmark = pytest.mark.usefixtures("time_limit")

SMALL = Preprocessing(2, (9, 9), 3, 9)


# The budget.


class Watched(Budget):
    """Records the largest sum of reservations that were not of a single picture."""

    def __init__(self, limit):
        super().__init__(limit)
        self.most_ahead = self.most = 0

    def read_ahead(self, size):
        super().read_ahead(size)
        if self.ahead > size:
            self.most_ahead = max(self.most_ahead, self.ahead)


def streamed(contents, read):
    """Yields pictures that can be opened only until the next one is requested, as from a stream."""
    current = []

    def open_(i, reserved):
        assert current == [i]
        read.append(i)
        return io.BytesIO(contents[i])

    for i, content in enumerate(contents):
        current[:] = [i]
        yield Picture(str(i), functools.partial(open_, i), len(content))


@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
@pytest.mark.parametrize("workers, rows", [(1, 64), (2, 1), (2, 7), (4, 64)])
def test_streams_are_read_no_further_than_the_budget_allows(monkeypatch, here, workers, rows):
    """Batches may have more contents than the budget, and contents may be larger than it."""
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    random.seed(rows)
    contents = [encoded(i).ljust(random.choice((100, 3000, 9000))) for i in range(90)]
    contents[40] = encoded(40).ljust(10**6)
    budget, read = Watched(60_000), []
    with decoders.Decoders(SMALL, workers, budget, rows) as pool:
        decoded = [
            (entry.id, *result.image[0, 0])
            for entries, results in pool.decode(streamed(contents, read))
            for entry, result in zip(entries, results, strict=True)
        ]
    assert decoded == [(str(i), i, 0, 77) for i in range(90)]
    assert read == list(range(90))
    assert 9000 < budget.most_ahead <= 60_000 // PARTS
    assert budget.ahead == budget.reserved == 0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_content_that_ends_early_frees_its_memory_and_takes_no_row(rows):
    def pictures():
        for i in range(20):
            picture = Picture(str(i), Content(encoded(i)))
            yield picture if i % 3 else Picture(str(i), ends_early, 10**6)

    def ends_early(reserved):
        raise units.SourceEndsError("its end is missing")

    budget = Budget(10**5)
    with decoders.Decoders(SMALL, 2, budget, rows) as pool:
        batches = [[e.id for e in entries] for entries, _ in pool.decode(pictures())]
    wanted = [str(i) for i in range(20) if i % 3]
    assert batches == list(map(list, itertools.batched(wanted, rows)))
    assert budget.ahead == budget.reserved == 0


def test_an_error_while_a_stream_waits_for_memory_ends_the_run(monkeypatch):
    class Broken(Preprocessing):
        def decode(self, *arguments, **options):
            raise KeyboardInterrupt

    contents = [bytes(1000)] * 50
    with pytest.raises(KeyboardInterrupt):
        with decoders.Decoders(Broken(2, (9, 9), 3, 9), 2, Budget(5000), 4) as pool:
            list(pool.decode(streamed(contents, [])))


def test_a_picture_says_how_much_memory_it_needs():
    """First for its encoded form, which some formats read as a whole, and then for its pixels.

    Pillow resizes its rows from 8 to 9 pixels and then its columns from 6 to 9.
    """
    content = encoded(0)
    decoding = len(content) + PIXEL * 8 * 6
    resizing = len(content) + PIXEL // 2 * (8 * 6 + 9 * 6 + 9 * 9)
    for reserved, needed in (
        (0, len(content)),
        (len(content) - 1, len(content)),
        (len(content), decoding),
        (decoding, resizing),
        (resizing - 1, resizing),
    ):
        with pytest.raises(LargerError) as error:
            SMALL.image(Content(content), reserved)
        assert error.value.needed == needed
    assert SMALL.image(Content(content), needed).shape == (9, 9, 3)


SHORTEST = dataclasses.replace(SMALL, crop=CenterCrop("shortest", (10, 10)), max_pixels=10**5)


@pytest.mark.parametrize(
    "how, width, height, largest",
    [
        (SHORTEST, 1000, 1, 10**5),  # 10000 x 10 pixels
        (SHORTEST, 1, 1000, 10**5),
        (dataclasses.replace(SMALL, max_pixels=9 * 5000), 1, 5000, 9 * 5000),  # 9 x 5000 pixels
    ],
)
def test_a_picture_with_a_short_side_is_refused_if_it_becomes_too_large(
    how, width, height, largest
):
    """The limit holds for what Pillow makes in between, too, and the image is not computed."""
    sizes = ((width, height), (width + width // 100, height + height // 100))
    images = [np.full((h, w, 3), 7, np.uint8) for w, h in sizes]
    fits, too_large = (Content(as_png(image)) for image in images)
    assert how.max_pixels == largest
    np.testing.assert_array_equal(how.image(fits), np.full((9, 9, 3), 7))
    with pytest.raises(LimitError, match=f"while it is resized, more than --max-pixels {largest}"):
        how.image(too_large)


def as_png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_a_member_of_a_tar_is_read_only_into_reserved_memory(tmp_path):
    write_tar(tmp_path / "t.tar", {"a.png": bytes(1000)})
    (picture,) = units.Tar(str(tmp_path / "t.tar")).pictures()
    with pytest.raises(LargerError) as error:
        picture.open(999)
    assert error.value.needed == 1000
    assert picture.open(1000).read() == bytes(1000)


# The limit of a picture's encoded form, for each source.


MOST = 5000
SIZES = {"a": MOST - 1, "b": MOST, "c": MOST + 1, "d": 10**6, "e": 200}
TOO_LARGE = {id: f"it has {size} bytes, more than --max-bytes {MOST}" for id, size in SIZES.items()}


def bmps():
    """Returns pictures of these sizes by id; what follows a picture does not matter."""
    return {id: encoded(i, "BMP").ljust(size, b"?") for i, (id, size) in enumerate(SIZES.items())}


def as_folder(folder):
    (folder / "bmps").mkdir()
    for id, content in bmps().items():
        (folder / "bmps" / f"{id}.bmp").write_bytes(content)
    return folder / "bmps"


def as_url(folder):
    return f"file://{as_folder(folder)}"


def as_memory(folder):
    fs = fsspec.filesystem("memory")
    for id, content in bmps().items():
        fs.pipe_file(f"/limit/{id}.bmp", content)
    return "memory://limit"


def as_tar(folder):
    write_tar(folder / "t.tar", {f"{id}.bmp": content for id, content in bmps().items()})
    return folder / "t.tar"


def as_compressed_tar(folder):
    write_tar(folder / "t.tar.gz", {f"{id}.bmp": content for id, content in bmps().items()})
    return folder / "t.tar.gz"


def as_remote_tar(folder):
    return f"file://{as_tar(folder)}"


def as_parquet(folder):
    table = pyarrow.table({"id": list(bmps()), "image": list(bmps().values())})
    pyarrow.parquet.write_table(table, folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


def as_struct(folder):
    column = [{"bytes": content, "path": id} for id, content in bmps().items()]
    pyarrow.parquet.write_table(
        pyarrow.table({"id": list(bmps()), "image": column}), folder / "t.parquet"
    )
    return f"file://{folder}/t.parquet"


SOURCES = [
    as_folder,
    as_url,
    as_memory,
    as_tar,
    as_compressed_tar,
    as_remote_tar,
    as_parquet,
    as_struct,
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_picture_of_more_than_max_bytes_is_an_error_and_others_are_embedded(tmp_path, source):
    out = tmp_path / "out"
    assert run([source(tmp_path)], out, max_bytes=MOST) == 2

    def name(id):
        return id.rpartition("/")[2].removesuffix(".bmp")

    errors = shards(out, "__errors")
    reasons = dict(zip(map(name, errors["id"]), errors["reason"]))
    assert reasons == {id: TOO_LARGE[id] for id in "cd"}
    found = {name(id): embedding for id, embedding in by_id(out).items()}
    assert_same(found, expected([(id, bmps()[id]) for id in "abe"]))


def test_max_bytes_is_an_option_of_the_command(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(0))
    command = [*COMMAND, "--checkpoint", checkpoint(MODEL), tmp_path / "a.png"]
    command += ["--out", tmp_path / "out.npz", "--max-bytes", "50"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    size = len(encoded(0))
    assert f"a.png: it has {size} bytes, more than --max-bytes 50.\n" in result.stderr
    assert result.returncode != 0 and "Traceback" not in result.stderr


class Endless(http.server.BaseHTTPRequestHandler):
    """Serves a small picture, and one that has no end, whatever part of it is requested."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(encoded(1).ljust(10**5 if self.path == "/large.png" else 0))
        try:
            while self.path == "/endless.png":
                self.wfile.write(bytes(2**16))
        except OSError:
            pass  # The client has closed the connection.

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_a_web_server_that_sends_without_end_is_an_error(tmp_path, server):
    out = tmp_path / "out"
    urls = [f"{server}/{name}.png" for name in ("endless", "small")]
    assert run(urls, out, max_bytes=2**20) == 1
    assert_same(by_id(out), expected([(urls[1], encoded(1))]))
    errors = shards(out, "__errors")
    assert errors["id"] == urls[:1]
    assert errors["reason"] == [f"it has {2**20 + 1} bytes, more than --max-bytes {2**20}"]


@pytest.mark.parametrize("place", ["memory", "web"])
def test_a_picture_at_a_URL_is_read_again_if_it_needs_more_memory(monkeypatch, server, place):
    """At first a fifth of a budget of 10000 bytes is left out. A web server tells no size."""
    fsspec.filesystem("memory").pipe_file("/large.png", encoded(1).ljust(10**5))
    url = f"{server}/large.png" if place == "web" else "memory://large.png"
    asked = []
    fetch = units._fetch

    def recording(url, most, reserved):
        asked.append(reserved)
        return fetch(url, most, reserved)

    monkeypatch.setattr(units, "_fetch", recording)
    budget = Budget(10_000)
    with decoders.Decoders(SMALL, 1, budget, 4) as pool:
        unit = units.Files((units.File(url, units.remote_origin(url)),))
        ((_, (result,)),) = pool.decode(unit.pictures())
    assert tuple(result.image[0, 0]) == (1, 0, 77)
    if place == "web":
        assert asked == [8000, 16002, 32006, 64014, 128030]
    else:
        # The encoded picture, its 8 x 6 pixels, and those while it is resized to 9 x 9.
        resized = PIXEL // 2 * (8 * 6 + 9 * 6 + 9 * 9)
        assert asked == [8000, 10**5, 10**5 + PIXEL * 8 * 6, 10**5 + resized]


def test_an_id_that_is_too_long_is_an_error(tmp_path):
    path = tmp_path / "t.parquet"
    table = pyarrow.table({"id": ["x" * 10**6, "a"], "image": [encoded(0), encoded(1)]})
    pyarrow.parquet.write_table(table, path)
    assert run([path], tmp_path / "out") == 1
    errors = shards(tmp_path / "out", "__errors")
    assert errors["id"] == ["x" * 200 + "..."]
    assert errors["reason"] == ["its id has 1000000 characters, expected at most 16384"]
    assert list(by_id(tmp_path / "out")) == ["a"]


def test_a_block_of_ray_has_a_limited_size(monkeypatch):
    """Pictures for which there is no room are decoded where they are read."""
    monkeypatch.setattr(on_ray, "BLOCK_BYTES", 10_000)
    contents = {str(i): encoded(i).ljust(4000) for i in range(8)} | {"bad": bytes(4000)}
    contents["large"] = encoded(9).ljust(10**6)

    def ends_early(reserved):
        raise units.SourceEndsError("its end is missing")

    def pictures():
        yield units.unreadable("gone", "its cell is empty")
        yield Picture("cut", ends_early, 10**6)
        yield from (Picture(id, Content(content)) for id, content in contents.items())

    read, rest = on_ray.Read(None, Changes(False, False), {}, 8, SMALL), pictures()
    blocks = list(iter(lambda: read._block(rest), []))
    ids = [pickle.loads(entry).id for block in blocks for entry, *_ in block]
    assert ids == ["gone", *contents]
    assert list(map(len, blocks)) == [8, 3]
    for block in blocks:
        assert sum(len(content) for _, content, *_ in block) < 10_000 + 8 * SMALL.most_bytes
    decode = on_ray.Decode(SMALL)
    results = [decode(on_ray._columns(block)) for block in blocks]
    whys = [why for result in results for why in result["reason"]]
    reasons = dict(zip(ids, whys, strict=True))
    assert {id: why for id, why in reasons.items() if why} == {
        "gone": "its cell is empty",
        "bad": "it is not a picture in a format that Pillow reads",
    }
    images = dict(zip(ids, (image for result in results for image in result["image"])))
    for id in contents.keys() - {"bad"}:
        np.testing.assert_array_equal(images[id], SMALL.image(Content(contents[id])))


# Pages of parquet files.


def pages(path):
    """Returns the size of the largest page of pictures in each row group."""
    with open(path, "rb") as file:

        def read(position, size):
            file.seek(position)
            return file.read(size)

        groups = parquet_pages.largest_pages(read, path.stat().st_size)
        return [largest(["image"], [], 2**30) for largest in groups]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_the_largest_page_is_found(tmp_path, version, compression):
    path = tmp_path / "t.parquet"
    rng = np.random.default_rng(0)
    images = [rng.bytes(int(rng.integers(5000))) for _ in range(300)]
    table = pyarrow.table({"other": [bytes(10**5)] * 300, "image": images})
    options = dict(data_page_version=version, compression=compression, write_batch_size=1)
    for page in (1, 10**5):
        pyarrow.parquet.write_table(
            table, path, data_page_size=page, use_dictionary=False, **options
        )
        (largest,) = pages(path)
        assert 4 + max(map(len, images)) <= largest <= page + 5100
    pyarrow.parquet.write_table(table, path, row_group_size=100, write_statistics=False)
    for i, largest in enumerate(pages(path)):
        size = sum(map(len, images[100 * i : 100 * i + 100]))
        assert size < largest <= size + 1000
    assert [image for image in images] == [
        p.open(float("inf")).read() for p in parquet.Parquet(str(path), "image").pictures()
    ]


def test_a_dictionary_value_of_many_rows_is_in_memory_for_few_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_BYTES", 4 * 10**5)
    path, batches = tmp_path / "t.parquet", []
    iterate = pyarrow.parquet.ParquetFile.iter_batches

    def recording(self, *arguments, **options):
        for batch in iterate(self, *arguments, **options):
            batches.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", recording)
    content = encoded(3).ljust(10**5)
    pyarrow.parquet.write_table(pyarrow.table({"image": [content] * 64}), path)
    assert path.stat().st_size < 2 * 10**5
    found = [picture.open(float("inf")).read() for picture in parquet.Parquet(str(path)).pictures()]
    assert found == [content] * 64
    assert 10**5 < max(batches) <= 4 * 10**5


@pytest.mark.parametrize("place", ["{tmp}/t.parquet", "memory://held/t.parquet"])
def test_a_row_group_is_read_a_few_pages_at_a_time(tmp_path, monkeypatch, place):
    """By default pyarrow reads all of its pages before the first row."""
    url, number, size = place.format(tmp=tmp_path), 200, 10**5
    contents = [encoded(i).ljust(size) for i in range(number)]
    with fsspec.open(url, "wb") as file:
        table = pyarrow.table({"image": contents})
        options = dict(use_dictionary=False, write_batch_size=1, compression="none")
        pyarrow.parquet.write_table(table, file, **options)
    reads, read = [], MemoryFile.read

    def recording(self, size=-1):
        reads.append(size)
        return read(self, size)

    monkeypatch.setattr(MemoryFile, "read", recording)
    before, most = pyarrow.total_allocated_bytes(), 0
    for i, picture in enumerate(parquet.Parquet(url).pictures()):
        assert picture.open(float("inf")).read() == contents[i]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert i == number - 1 and most < number * size * 3 / 4
    assert all(0 <= size <= 2**21 for size in reads)
    assert len(reads) > 10 or not url.startswith("memory")


def test_a_page_that_expands_is_an_error(tmp_path, monkeypatch):
    """What was read before is kept."""
    monkeypatch.setattr(parquet_pages, "MOST_PAGE", 2**20)
    path = tmp_path / "t.parquet"
    table = pyarrow.table({"image": [encoded(0), encoded(1), bytes(2**24), encoded(2)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=1)
    found: dict[str, bytes | str] = {}
    for picture in parquet.Parquet(str(path), most=2**20).pictures():
        try:
            found[picture.id.removeprefix(str(path))] = picture.open(float("inf")).read()
        except OSError as error:
            found["error"] = str(error)
    assert found == {
        "#0": encoded(0),
        "#1": encoded(1),
        "error": "the table cannot be read beyond row 2: a page of column 'image' has "
        f"{2**24 + 4} bytes, more than --max-bytes {2**20}",
    }


@pytest.mark.parametrize("content", [None, b"", encoded(0)], ids=["null", "empty", "equal"])
def test_a_billion_rows_in_a_small_table_are_an_error(tmp_path, monkeypatch, content):
    """Ten thousand stand for them."""
    monkeypatch.setattr(parquet, "MOST_ROWS", 1000)
    monkeypatch.setattr(parquet, "ROWS_A_BYTE", 1)
    path = tmp_path / "t.parquet"
    table = pyarrow.table({"image": pyarrow.array([content] * 10_000, pyarrow.binary())})
    pyarrow.parquet.write_table(table, path)
    *first, last = parquet.Parquet(str(path)).pictures()
    assert 1000 < len(first) < 1000 + path.stat().st_size + 2 * parquet.ROWS
    with pytest.raises(OSError, match="it has more than 1 rows in each byte"):
        last.open(float("inf"))


def test_whatever_byte_of_a_parquet_file_is_changed_reading_ends(tmp_path):
    """For damaged metadata of a column pyarrow itself may end the process."""
    path = tmp_path / "t.parquet"
    table = pyarrow.table({"id": list("abc"), "image": [encoded(0), None, encoded(1)]})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    whole = path.read_bytes()
    for i, byte in itertools.product(range(4, len(whole)), (0x15, 0xFF)):
        path.write_bytes(whole[:i] + bytes([byte]) + whole[i + 1 :])
        try:
            found = list(itertools.islice(parquet.Parquet(str(path)).pictures(), 100))
        except parquet.ColumnsError:
            continue
        assert len(found) <= 4


def test_a_parquet_file_of_any_length_is_an_error(tmp_path):
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [encoded(0)]}), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        (picture,) = parquet.Parquet(str(path)).pictures()
        with pytest.raises(OSError, match="cannot be read beyond row 0: its metadata are damaged"):
            picture.open(float("inf"))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x15\x00",
        b"\x15\x00\x15" + b"\xff" * 10**4,
        b"\x15\x00\x15\x02",
        b"\x15\x00\x15\x01\x15\x02\x00",
        b"\x15\x00\x15\x02\x15\x01\x00",
        b"\x15\x00\x15\x02\x00",
        b"\x15\x00\x18\x01a\x15\x02\x00",
        b"\x1c" * 10**5,
        b"\x19" * 10**5,
        b"\x18\xff\xff\xff\xff\x0f",
        b"\x19\xf1" + b"\xff" * 8 + b"\x7f",
        b"\x19\xf3" + b"\xff" * 8 + b"\x7f",
        b"\x19\xfc" + b"\xff" * 8 + b"\x7f",
        b"\x1b\x01\x88",
        b"\x05" + b"\xff" * 9 + b"\x01",
        b"\x1e\x00",
    ],
)
def test_a_damaged_header_of_a_page_is_an_error(header):
    with pytest.raises(ValueError, match="its metadata are damaged"):
        list(parquet_pages._pages(lambda at, size: header[at : at + size], 0, 10**6))


# The peak for each source.

PEAK = """
import re, sys
from pathlib import Path

import pyarrow.parquet
from pallas_patch_embed.embed import decoders, on_ray, pictures, preprocessing, sources


def memory(kind, process="self"):
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(kind + r":\\s*(\\d+)", status)[1])


path, limit, workers, decoders.DECODED_HERE = sys.argv[1], *map(int, sys.argv[2:])
how = preprocessing.Preprocessing(2, (9, 9), 3, 9)
(unit,) = sources.find([path], sources.Columns(), lambda *_: None)
pictures.extensions()
before, found, failed = memory("VmRSS"), 0, []
with decoders.Decoders(how, workers, pictures.Budget(limit), 64) as pool:
    for ids, images in pool.decode(unit.pictures()):
        for image in images:
            if isinstance(image, str):
                failed.append(image)
            else:
                found += 1
    peak = memory("VmHWM") - before
    for process in pool._processes:
        # A process that has imported Pillow and NumPy, and that decodes nothing, has 60 MB.
        if process.child._process is not None:
            peak += memory("VmHWM", process.child._process.pid) - 60 * 2**20
print(found, peak, *failed, sep="\\n")
"""


def peak(path, limit, workers=2, here=512):
    """Returns the number of pictures, the growth of memory in bytes, and reasons of failures."""
    command = [sys.executable, "-c", PEAK, *map(str, (path, limit, workers, here))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found, grown, *failed = result.stdout.splitlines()
    return int(found), int(grown), failed


NUMBER, WIDTH, HEIGHT = 32, 1900, 1800
BMP = 54 + 3 * WIDTH * HEIGHT
HEAD = struct.pack("<2sIHHI", b"BM", BMP, 0, 0, 54)
HEAD += struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 24, 0, BMP - 54, 0, 0, 0, 0)


def black(folder):
    """Writes pictures of 10 MB into a folder; on the disk they are small."""
    folder = folder / "black"
    folder.mkdir()
    for i in range(NUMBER):
        with open(folder / f"{i}.bmp", "wb") as file:
            file.write(HEAD)
            file.truncate(BMP)
    return folder


def black_tar(folder, opened=open):
    path = folder / ("t.tar" if opened is open else "t.tar.gz")
    with opened(path, "wb") as file:
        for i in range(NUMBER):
            info = tarfile.TarInfo(f"{i}.bmp")
            info.size = BMP
            file.write(info.tobuf() + HEAD)
            if opened is open:
                file.seek(BMP - 54 + -BMP % 512, 1)
            else:
                file.write(bytes(BMP - 54 + -BMP % 512))
        file.write(bytes(1024))
    return path


def black_parquet(folder):
    path = folder / "t.parquet"
    content = HEAD + bytes(BMP - 54)
    schema = pyarrow.schema([("image", pyarrow.binary())])
    options = dict(compression="zstd", use_dictionary=False)
    with pyarrow.parquet.ParquetWriter(path, schema, **options) as writer:
        for _ in range(NUMBER // 4):
            writer.write_table(pyarrow.table({"image": [content] * 4}, schema=schema))
    return path


BLACK = {
    "folder": black,
    "URLs": lambda folder: f"file://{black(folder)}",
    "tar": black_tar,
    "tar.gz": functools.partial(black_tar, opened=functools.partial(gzip.open, compresslevel=1)),
    "tar at a URL": lambda folder: f"file://{black_tar(folder)}",
    "parquet": black_parquet,
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("source", BLACK)
def test_the_peak_of_memory_does_not_depend_on_the_source(tmp_path, source):
    """330 MB of pictures are read. Each needs 37 MB: 10 encoded, and 27 for its pixels."""
    # One thread reads every second source, and three processes the others.
    workers, here = ((1, 512), (3, 0))[list(BLACK).index(source) % 2]
    limit = 100 * 2**20
    found, grown, failed = peak(BLACK[source](tmp_path), limit, workers, here)
    assert (found, failed) == (NUMBER, [])
    # A page of the parquet file and the rows that are read from it have 40 MB each.
    assert grown < limit + (180 if source == "parquet" else 80) * 2**20
