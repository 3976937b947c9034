"""Models of the hub: downloaded from a server, gone on with, listed and removed, by the program itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from folders import causal, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "some/model"
LARGE = 24 * 2**20
"""Bytes of a file that the library writes in several pieces."""


class Hub(ThreadingHTTPServer):
    """As much of a hub as a download asks for: one model, whose branch v1 and main are one commit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files["model.py"] = b"raise SystemExit"
        self.cut = 0
        """Downloads of weights that end in the middle before one is whole."""
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "api":
            self._api(parts)
        elif parts[2:3] == ["resolve"] and parts[-1] in self.server.files:
            self._file(parts[-1])
        else:
            self._json(404, {"error": "not here"}, "EntryNotFound")

    def _api(self, parts: list[str]) -> None:
        revision = parts[parts.index("revision") + 1] if "revision" in parts else "main"
        if "/".join(parts[2:4]) != REPOSITORY:
            return self._json(401, {"error": "Repository not found"}, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._json(404, {"error": "no such revision"}, "RevisionNotFound")
        if "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            return self._json(200, tree)
        siblings = [{"rfilename": name} for name in self.server.files]
        return self._json(200, {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False})

    def _json(self, status: int, value: Any, code: str | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _file(self, name: str) -> None:
        data, asked = self.server.files[name], self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if asked:
            self.server.ranges.append(asked)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command != "GET":
            return
        if name.endswith(".safetensors") and self.server.cut > 0:
            self.server.cut -= 1
            self.wfile.write(data[start : start + len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = save(causal("Qwen2"), tmp_path / "model")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def torchwright(hub: Hub, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ours |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    command = [sys.executable, "-m", "torchwright", *words]
    return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_pulled_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "no model of the hub is here" in torchwright(hub, home, "list").stdout
    pulled = torchwright(hub, home, "pull", REPOSITORY, "--revision", "v1", "--json", HF_TOKEN="hf_secret")
    assert pulled.returncode == 0, pulled.stderr
    facts = json.loads(pulled.stdout)
    assert facts["model"] == f"{REPOSITORY}@v1"
    names = {path.name for path in Path(facts["path"]).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "model.py" not in names
    assert "Bearer hf_secret" in hub.tokens
    assert "hf_secret" not in pulled.stdout + pulled.stderr
    (row,) = json.loads(torchwright(hub, home, "list", "--json").stdout)
    assert (row["name"], row["revisions"]) == (REPOSITORY, ["v1"])
    line = torchwright(hub, home, "list").stdout
    assert line.startswith(REPOSITORY)
    assert "v1" in line
    near = torchwright(hub, home, "rm", "some/modle")
    assert near.returncode == 2
    assert f"did you mean {REPOSITORY}?" in near.stderr
    assert "are free again" in torchwright(hub, home, "rm", REPOSITORY).stdout
    assert json.loads(torchwright(hub, home, "list", "--json").stdout) == []


@pytest.mark.slow  # 4 s to import torch; other commands open folders alike
def test_a_pulled_model_answers_offline(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert torchwright(hub, home, "pull", REPOSITORY, "--revision", "v1").returncode == 0
    prompt = ("--prompt", "ab", "--max-new-tokens", "2", "--dtype", "fp32", "--json")
    answered = torchwright(hub, home, "generate", f"{REPOSITORY}@v1", *prompt, HF_HUB_OFFLINE="1")
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["new_tokens"] <= 2


def test_a_download_that_was_cut_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": os.urandom(LARGE)}
    hub.cut = 1
    pulled = torchwright(hub, tmp_path / "home", "pull", REPOSITORY, "--json")
    if pulled.returncode:  # the library gave up: the next command goes on
        pulled = torchwright(hub, tmp_path / "home", "pull", REPOSITORY, "--json")
    assert pulled.returncode == 0, pulled.stderr
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in hub.ranges]
    assert starts, "a second request began at the first byte"
    assert min(starts) > 0
    folder = Path(json.loads(pulled.stdout)["path"])
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.plain("words0-name a branch, a tag or a commit")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pull", f"{REPOSITORY}@nosuch"), "name a branch, a tag or a commit"),
        (("pull", "other/model"), "set HF_TOKEN"),
        (("pull", "model"), "is no hub id"),
        (("pull", f"{REPOSITORY}@v1", "--revision", "v2"), "--revision v2 is for a hub id"),
        (("generate", ".", "--revision", "v1", "--prompt", "a"), "--revision v1 is for a hub id"),
    ],
)
def test_what_the_hub_lacks_is_said(hub: Hub, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    found = torchwright(hub, tmp_path / "home", *words)
    assert found.returncode == 2
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
