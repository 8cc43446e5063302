"""`embed --ray` on a local cluster whose nodes and processes are killed, and `embed` on S3.

The extra `test-cluster` installs what these tests need. moto's server on the loopback address
stands in for S3.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from pallas_patch_embed.embed import (
    Decoder,
    Embedder,
    embedder,
    exclusive,
    folder,
    place,
    tables,
    units,
)
from tests.commands.current_folder import fill, installed, ran
from tests.commands.shard_folders import (
    COMMAND,
    MODEL,
    assert_same,
    by_id,
    encoded,
    expected,
    opened,
    run,
    shards,
    write_tar,
)
from tests.encoder.goldens import NAFLEX, checkpoint
from tests.pages import blocks
from tests.repository import ROOT

pytestmark = pytest.mark.cluster
WAITS = 300  # Seconds after which a wait times out.


@pytest.fixture(scope="module")
def s3():
    """Starts a server with S3's protocol; yields a file system on it with an empty bucket."""
    reason = "the extra test-cluster is missing"
    server = pytest.importorskip("moto.server", reason=reason)
    s3fs = pytest.importorskip("s3fs", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        serving = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        serving.start()
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*serving.get_host_and_port()))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs = s3fs.S3FileSystem()
        fs.mkdir("bucket")
        yield fs
        serving.stop()


@pytest.fixture(scope="module")
def cluster(s3):
    """Starts a cluster whose head has no CPUs, so that no task runs there; its nodes use `s3`."""
    reason = "the extra test-cluster is missing"
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=dict(num_cpus=0))
        yield cluster
        cluster.shutdown()


@pytest.fixture
def nodes(cluster):
    """Adds two nodes of two CPUs each; yields them by their id."""
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    yield {node.node_id: node for node in nodes}
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


@pytest.fixture
def pictures(tmp_path):
    """Makes a folder of 150 pictures and one file that is not a picture."""
    photographs = tmp_path / "pictures"
    photographs.mkdir()
    for i in range(150):
        (photographs / f"{i:03}.png").write_bytes(encoded(i))
    (photographs / "bad.png").write_text("no picture")
    return photographs


# The command line with small shards. The last picture of the last unit is read only when the file
# `go` exists. The process that waits for it writes its id to the file `reader`, and the process
# that embeds writes its id to `embedder`.
DRIVER = """
import dataclasses, os, sys, time
from pathlib import Path

from pallas_patch_embed import __main__
from pallas_patch_embed.embed import command, on_ray, sources

folder = Path(sys.argv.pop(1))


def here(name):
    import ray

    context = ray.get_runtime_context()
    (folder / f".{name}").write_text(f"{context.get_node_id()} {os.getpid()}")
    (folder / f".{name}").rename(folder / name)


@dataclasses.dataclass(frozen=True)
class Waiting:
    unit: object

    def pictures(self):
        *first, last = self.unit.pictures()
        yield from first
        if not (folder / "go").exists():
            here("reader")
        while not (folder / "go").exists():
            time.sleep(0.05)
        yield last


class Recording(on_ray.Embedder):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        here("embedder")


def find(*arguments, find=sources.find):
    *units, last = find(*arguments)
    return iter([*units, Waiting(last)])


sources.FILES_PER_UNIT, on_ray.SHARD_ROWS = 40, 16
command.sources.find, on_ray.Embedder = find, Recording
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""


class Driver:
    """A run of the command that waits for `go`."""

    def __init__(self, tmp_path, address, pictures, out):
        self.folder = tmp_path / "waits"
        self.folder.mkdir()
        arguments = ["--checkpoint", checkpoint(MODEL), pictures, "--out", out, "--batch", "8"]
        self.arguments = [*map(str, arguments), "--ray", address]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.folder), "embed", *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, out):
        """Waits until only the last picture is missing and a shard has been written."""
        end = time.monotonic() + WAITS
        while not ((self.folder / "reader").exists() and any(out.glob("embeddings/*.parquet"))):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                pytest.fail(self.process.communicate()[0])
            time.sleep(0.1)

    def who(self, name):
        """Returns the ids of node and process of the "reader" or the "embedder"."""
        node, process = (self.folder / name).read_text().split()
        return node, int(process)

    def go(self):
        """Lets the last picture be read; returns the output of the command."""
        (self.folder / "go").touch()
        return self.process.communicate(timeout=WAITS)[0]


def assert_whole(out, pictures):
    names = [str(path) for path in pictures.glob("[01]*.png")]
    files = [(name, Path(name).read_bytes()) for name in names]
    assert_same(by_id(out), expected(files, batch=8))
    assert shards(out, "__errors")["id"] == [str(pictures / "bad.png")]
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("what", ["reader", "embedder"])
@pytest.mark.parametrize("kind", ["process", "node"])
def test_what_is_killed_on_the_cluster_is_done_again(
    tmp_path, cluster, nodes, pictures, kind, what
):
    out = tmp_path / "out"
    driver = Driver(tmp_path, cluster.address, pictures, out)
    driver.wait(out)
    node, process = driver.who(what)
    if kind == "node":
        cluster.remove_node(nodes[node], allow_graceful=False)
    else:
        os.kill(process, signal.SIGKILL)
    said = driver.go()
    assert driver.process.returncode == 3, said  # One file is not a picture.
    assert_whole(out, pictures)


def test_a_driver_that_is_killed_goes_on(tmp_path, cluster, nodes, pictures):
    out = tmp_path / "out"
    driver = Driver(tmp_path, cluster.address, pictures, out)
    driver.wait(out)
    command = [*COMMAND, *driver.arguments]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and "another run is writing there" in second.stderr
    driver.process.kill()
    driver.go()
    before = len(by_id(out)) + len(shards(out, "__errors").get("id", []))
    assert 0 < before < 151
    second = subprocess.run(command, capture_output=True, text=True)
    earlier = re.findall(r"Earlier runs (?:had embedded|could not embed) (\d+)", second.stdout)
    assert sum(map(int, earlier)) == before, second.stdout + second.stderr
    assert_whole(out, pictures)


def test_pictures_of_one_small_file_are_spread(tmp_path, cluster, nodes):
    """Decoding and embedding work on blocks of one batch, for any number of units."""
    write_tar(tmp_path / "a.tar", {f"{i}.png": encoded(i) for i in range(50)})
    arguments = [sys.executable, "-c", PLAN, "embed", "--checkpoint", checkpoint(MODEL)]
    arguments += [tmp_path / "a.tar", "--out", tmp_path / "out", "--batch", "8"]
    arguments += ["--ray", cluster.address]
    result = subprocess.run([*map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # The last row has only numbers of pictures.
    assert result.stdout.splitlines()[-1].split() == ["8"] * 6 + ["3"]
    ids = [(str(i), encoded(i)) for i in range(50)]
    assert_same(by_id(tmp_path / "out"), expected(ids, batch=8))


# The command line; at the end it prints the number of pictures in each call of the decoder.
PLAN = """
import os, sys, tempfile

from pallas_patch_embed import __main__
from pallas_patch_embed.embed import on_ray

calls = tempfile.mkdtemp()


class Counting(on_ray.Decode):
    def __call__(self, batch):
        tempfile.mkstemp(dir=calls, prefix=f"{len(batch['entry'])}-")
        return super().__call__(batch)


on_ray.Decode = Counting
sys.argv[0] = "pallas-patch-embed"
try:
    __main__.run()
finally:
    print(*sorted((name.split("-")[0] for name in os.listdir(calls)), reverse=True))
"""


def test_a_cluster_keeps_columns_and_knows_sources_and_changes(tmp_path, cluster, nodes):
    def write(i, first):
        members = {f"{j}.png": encoded(first + j) for j in range(3)}
        members |= {f"{j}.txt": f"{i} {j}".encode() for j in range(3)}
        write_tar(tmp_path / f"{i}.tar", dict(sorted(members.items())))

    def embed(*options):
        command = [*COMMAND, "--checkpoint", checkpoint(MODEL), *tars, "--out", tmp_path / "out"]
        command += ["--batch", "4", "--keep", "txt", "--repeated-ids", *options]
        command += ["--ray", cluster.address]
        result = subprocess.run([*map(str, command)], capture_output=True, text=True)
        columns = shards(tmp_path / "out")
        keys = zip(columns["source"], columns["id"], columns["txt"])
        return result, dict(zip(keys, columns["embedding"], strict=True))

    tars = [tmp_path / f"{i}.tar" for i in range(2)]
    for i in range(2):
        write(i, 10 * i)
    wanted = {
        (str(tars[i]), str(j), f"{i} {j}"): expected([("", encoded(10 * i + j))])[""].tolist()
        for i in range(2)
        for j in range(3)
    }
    result, found = embed()
    assert result.returncode == 0 and found == wanted, result.stderr
    write(1, 50)
    os.utime(tars[1], ns=(0, 0))
    result, found = embed()
    assert result.returncode == 3 and found == wanted, result.stderr
    assert "3 have changed since they were embedded" in result.stdout
    result, found = embed("--changed", "embed")
    for j in range(3):
        (again,) = expected([("", encoded(50 + j))]).values()
        wanted[str(tars[1]), str(j), f"1 {j}"] = again.tolist()
    assert result.returncode == 0 and found == wanted, result.stderr


# The command line; a task that writes gets the embeddings of at most three of the largest pictures.
FEW = """
import sys

from pallas_patch_embed import __main__
from pallas_patch_embed.embed import on_ray

on_ray.SHARD_BYTES = int(sys.argv.pop(1))
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""


@pytest.mark.parametrize("name, output", [(MODEL, "patches"), (NAFLEX[0], "layer:-2")])
def test_patches_are_the_same_on_a_cluster(tmp_path, cluster, nodes, name, output):
    photographs = tmp_path / "pictures"
    photographs.mkdir()
    for i in range(10):
        picture = Image.fromarray(np.full((16 * (i % 3 + 1), 48, 3), 20 * i, np.uint8))
        picture.save(photographs / f"{i}.png")
    (photographs / "bad.png").write_text("no picture")
    embed = Embedder(checkpoint(name), output=output, batch=4)
    command = [sys.executable, "-c", FEW, 3 * embed.most_bytes, "embed"]
    command += ["--checkpoint", checkpoint(name), photographs, "--out", tmp_path / "out"]
    command += ["--batch", "4", "--output", output, "--ray", cluster.address]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 3, result.stderr
    ids = [str(photographs / f"{i}.png") for i in range(10)]
    contents = [Path(id).read_bytes() for id in ids]
    wanted = embed(Decoder(embed.preprocessing)({"id": ids, "content": contents}))["embedding"]
    columns = shards(tmp_path / "out")
    assert sorted(columns["id"]) == ids
    for id, found, shape in zip(columns["id"], columns["embedding"], columns["spatial_shape"]):
        found = np.array(found, np.float32).reshape(*shape, -1)
        np.testing.assert_array_equal(found, wanted[ids.index(id)])
    for path in (tmp_path / "out" / "embeddings").iterdir():
        assert pyarrow.parquet.read_metadata(path).num_rows <= 3
    assert shards(tmp_path / "out", "__errors")["id"] == [str(photographs / "bad.png")]


def test_the_default_batch_is_that_of_the_cluster_and_stays(tmp_path, cluster, nodes):
    """The actors compute on GPUs that the driver does not have; Ray only counts them here."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()

    def embedded(*names):
        for name in names:
            (pictures / f"{name}.png").write_bytes(encoded(name))
        command = [*COMMAND, "--checkpoint", checkpoint(MODEL), pictures, "--out", tmp_path / "out"]
        command += ["--ray", cluster.address]
        result = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return json.loads((tmp_path / "out" / "_manifest.json").read_text())["batch"]

    gpus = cluster.add_node(num_cpus=2, num_gpus=1)
    try:
        assert embedded(1, 2, 3) == embedder.BATCH
    finally:
        cluster.remove_node(gpus)
    assert embedded(4, 5) == embedder.BATCH
    files = [(str(path), path.read_bytes()) for path in pictures.iterdir()]
    assert_same(by_id(tmp_path / "out"), expected(files, batch=embedder.BATCH))


def test_an_address_where_nothing_answers_is_refused_at_once(tmp_path, pictures):
    pytest.importorskip("ray", reason="the extra test-cluster is missing")
    with pytest.raises(ValueError, match=r"--ray is 127\.0\.0\.1:1: nothing answers there"):
        run([pictures], tmp_path / "out", ray="127.0.0.1:1")
    assert not (tmp_path / "out").exists()


def test_the_example_of_the_docs_runs(tmp_path, cluster, nodes, s3):
    """Only the numbers of GPUs and actors and the checkpoint's name are changed."""
    page = (ROOT / "docs/embed.md").read_text()
    (example,) = [block.code for block in blocks(page) if "import ray" in block.code]
    assert len([line for line in example.splitlines() if line]) == 10
    for before, after in (
        ("num_gpus=1", "num_gpus=0"),
        ("concurrency=8", "concurrency=1"),
        ("siglip2-base-patch16-224/", str(checkpoint(MODEL))),
    ):
        assert before in example
        example = example.replace(before, after)
    for i in range(5):
        s3.pipe_file(f"bucket/photos/{i}.png", encoded(i))
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    subprocess.run([sys.executable, "-c", example], check=True, env=environment)
    rows = pyarrow.parquet.ParquetDataset("bucket/embeddings", filesystem=s3).read().to_pylist()
    embed = Embedder(checkpoint(MODEL))
    files = [(f"bucket/photos/{i}.png", encoded(i)) for i in range(5)]
    assert_same({row["id"]: row["embedding"] for row in rows}, expected(files, embed.rows))


# S3.


def put_tar(s3, tmp_path, name, members):
    write_tar(tmp_path / "a.tar", members)
    s3.put_file(str(tmp_path / "a.tar"), name)


def put_inputs(s3, tmp_path):
    """Writes pictures as each kind of input; returns the arguments, and the pictures by id."""
    s3.pipe_file("bucket/in/a/0.png", encoded(0))
    s3.pipe_file("bucket/in/a/b/1.jpg", encoded(1, "JPEG"))
    s3.pipe_file("bucket/in/a/notes.txt", b"none")
    put_tar(s3, tmp_path, "bucket/in/t0.tar", {f"k{i}.png": encoded(i) for i in (2, 3)})
    put_tar(s3, tmp_path, "bucket/in/t1.tar", {f"k{i}.png": encoded(i) for i in (4, 5)})
    table = pyarrow.table({"image": [encoded(i) for i in (6, 7)], "id": ["p6", "p7"]})
    pyarrow.parquet.write_table(table, "bucket/in/p.parquet", filesystem=s3)
    (tmp_path / "list.txt").write_text("s3://bucket/in/c/8.png\n")
    s3.pipe_file("bucket/in/c/8.png", encoded(8))
    arguments = ["s3://bucket/in/a", "s3://bucket/in/t{0..1}.tar", "s3://bucket/in/*.parquet"]
    ids = ["s3://bucket/in/a/0.png", "s3://bucket/in/a/b/1.jpg", "k2", "k3", "k4", "k5"]
    ids += ["p6", "p7", "s3://bucket/in/c/8.png"]
    kinds = ["JPEG" if id.endswith("jpg") else "PNG" for id in ids]
    return arguments, [(id, encoded(i, kind)) for i, (id, kind) in enumerate(zip(ids, kinds))]


def test_pictures_and_shards_may_be_on_S3(tmp_path, s3, monkeypatch):
    monkeypatch.setattr(folder, "SHARD_ROWS", 4)
    arguments, contents = put_inputs(s3, tmp_path)
    options = dict(lists=[str(tmp_path / "list.txt")])
    out = "s3://bucket/out"
    assert run(arguments, out, **options) == 0
    found = by_id(out)
    assert_same(found, expected(contents))
    s3.rm("bucket/out/embeddings/000001.parquet")
    computed, start = [], Embedder.start
    monkeypatch.setattr(
        embedder.Embedder,
        "start",
        lambda self, images, *more: computed.append(len(images)) or start(self, images, *more),
    )
    assert run(arguments, out, **options) == 0
    assert sum(computed) == 4
    assert_same(by_id(out), found)
    before = s3.find("bucket/out", detail=True)
    with pytest.raises(ValueError, match="normalize was False and is now True"):
        run(arguments, out, normalize=True, **options)
    assert s3.find("bucket/out", detail=True) == before
    assert not s3.exists("bucket/out/.lease.json")


def test_one_run_at_a_time_has_the_lease_of_a_folder_on_S3(s3, monkeypatch):
    monkeypatch.setattr(exclusive, "VOID", 20.0)
    monkeypatch.setattr(exclusive, "RENEWED", 0.2)
    url, path = "s3://bucket/leased", "bucket/leased/.lease.json"
    with exclusive.Lease(s3, path, url):
        with pytest.raises(exclusive.BusyError):
            exclusive.Lease(s3, path, url).__enter__()
        # Both runs find no lease, and one of them creates it first.
        monkeypatch.setattr(exclusive.Lease, "_holder", lambda self: None)
        monkeypatch.setattr(place, "_check_new", lambda *_: None)
        with pytest.raises(OSError, match=r"s3://bucket/leased .*pre-conditions"):
            exclusive.Lease(s3, path, url).__enter__()
        monkeypatch.undo()
    assert not s3.exists(path)


def test_a_file_that_another_process_wrote_is_found_at_once(s3):
    """s3fs caches listings, and a cached listing would not contain the file."""
    with opened("s3://bucket/found") as taker:
        taker.remove_partials()  # This lists the folder.
        other = type(s3)(skip_instance_cache=True)
        rows = np.ones((2, 4), np.float32)
        written = [units.Entry("a"), units.Entry("b")]
        table = tables.parquet_bytes(tables.embeddings_table(written, rows), {})
        other.pipe_file("bucket/found/unfinished", table)
        committed = taker.commit("embeddings", "unfinished")
    assert committed == [(entry, "") for entry in written]
    assert shards("s3://bucket/found")["id"] == ["a", "b"]


def test_a_run_on_S3_that_was_killed_goes_on(tmp_path, s3):
    """The next run waits until the lease is void."""
    members = {f"k{i}.png": encoded(i) for i in range(60)}
    put_tar(s3, tmp_path, "bucket/killed.tar", members)
    arguments = ["embed", "--checkpoint", checkpoint(MODEL), "s3://bucket/killed.tar"]
    arguments += ["--out", "s3://bucket/killed", "--batch", "4"]
    command = [sys.executable, "-c", SMALL, *map(str, arguments)]
    result = subprocess.run(command, env=os.environ | {"KILL": "3"}, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert s3.exists("bucket/killed/.lease.json")
    assert 0 < len(by_id("s3://bucket/killed")) < 60
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert_same(by_id("s3://bucket/killed"), expected([(k[:-4], c) for k, c in members.items()]))


# The command line with small shards and short leases; it kills itself after KILL shards.
SMALL = """
import os, signal, sys

from pallas_patch_embed import __main__
from pallas_patch_embed.embed import exclusive, folder


def write(self, *arguments, write=folder.Folder._write_shard, written=[]):
    write(self, *arguments)
    written.append(arguments)
    if len(written) == int(os.environ.get("KILL", 0)):
        os.kill(os.getpid(), signal.SIGKILL)


exclusive.VOID, exclusive.RENEWED = 4.0, 0.5
folder.SHARD_ROWS, folder.Folder._write_shard = 8, write
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""


def test_a_cluster_reads_from_S3_and_writes_there(tmp_path, s3, cluster, nodes):
    arguments, contents = put_inputs(s3, tmp_path)
    command = [*COMMAND, "--checkpoint", checkpoint(MODEL), *arguments, "s3://bucket/in/c/8.png"]
    command += ["--out", "s3://bucket/by-ray", "--batch", "4", "--ray", cluster.address]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert_same(by_id("s3://bucket/by-ray"), expected(contents))
    assert not s3.glob("bucket/by-ray/.*")


@pytest.mark.parametrize("is_local", [False, True], ids=["a cluster", "a new cluster"])
def test_workers_import_nothing_from_the_current_folder(tmp_path, cluster, nodes, is_local):
    (tmp_path / "here").mkdir()
    fill(tmp_path / "here")
    write_tar(tmp_path / "a.tar", {f"k{i}.png": encoded(i) for i in range(8)})
    command = [installed("pallas-patch-embed"), "embed", "--checkpoint"]
    command += [Path(checkpoint(MODEL)).absolute(), tmp_path / "a.tar", "--batch", "4", "--quiet"]
    command += ["--out", tmp_path / "out", "--ray", *([] if is_local else [cluster.address])]
    done, imported = ran(tmp_path / "here", *command)
    assert done.returncode == 0, done.stderr
    assert imported == [] and len(by_id(tmp_path / "out")) == 8
