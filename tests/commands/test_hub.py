"""Checkpoints that are named as on the Hugging Face hub are downloaded."""

import hashlib
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from urllib.parse import unquote, urlsplit

import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.embed.embedder import Embedder
from pallas_patch_embed.encoders.hub import find_checkpoint
from tests.commands.shard_folders import COMMAND, MODEL, assert_same, by_id, encoded, expected
from tests.encoder.goldens import checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_name_that_is_no_path_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "google/absent":
            raise RuntimeError("404")
        return str(checkpoint(MODEL))

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("google/siglip") == checkpoint(MODEL)
    assert Embedder("google/siglip").width == 96
    assert ppe.load_encoder("google/siglip").config.width == 96
    assert asked == [("google/siglip", ["*.json", "*.safetensors"])] * 3
    with pytest.raises(FileNotFoundError, match=r"'google/absent' on this machine.*hub says: 404"):
        find_checkpoint("google/absent")
    (tmp_path / "google" / "siglip").mkdir(parents=True)
    for path in ("google/siglip", "./google/absent", "/google/absent", "absent", "a/b/c"):
        assert str(find_checkpoint(path)) == path.removeprefix("./")
    assert len(asked) == 4


def test_without_huggingface_hub_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        find_checkpoint("google/siglip")


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the requests of huggingface_hub for a model, with the files of `MODEL`."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        files = {path.name: path for path in checkpoint(MODEL).iterdir()}
        headers = {"X-Repo-Commit": COMMIT}
        status, content = 404, b"{}"
        if parts[:4] == ["api", "models", "tests", "model"]:
            entries = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": name}
                for name, path in files.items()
            ]
            whole = {
                "id": "tests/model",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in files],
            }
            status, content = 200, json.dumps(entries if "tree" in parts else whole).encode()
        elif parts[:3] == ["tests", "model", "resolve"] and parts[-1] in files:
            status, content = 200, files[parts[-1]].read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.cluster
def test_a_model_is_downloaded_from_a_hub(tmp_path):
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("the extra test-cluster is missing")
    (tmp_path / "a.png").write_bytes(encoded(3))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [*COMMAND, "--checkpoint", "tests/model", str(tmp_path / "a.png")]
        command += ["--out", str(tmp_path / "out"), "--batch", "4"]
        result = subprocess.run(
            command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True
        )
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert_same(by_id(tmp_path / "out"), expected([(str(tmp_path / "a.png"), encoded(3))]))
