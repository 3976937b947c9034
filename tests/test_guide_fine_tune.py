"""docs/guides/fine-tune.md: its commands, as they stand, for a model of text and for one that takes pictures."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import torchwright
import vlms
from torchwright.models.vision.reader import PictureReader

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "fine-tune.md"
WITHIN_S = 240.0
TEMPLATE = (
    "{%- for m in messages %}{{- '[' + m.role + ']' }}{%- if m.content is string %}{{- m.content }}{%- else %}"
    "{%- for p in m.content %}{%- if p.type == 'image' %}{{- 'PLACE' }}{%- else %}{{- p.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '</s>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two runs of training and a server


def commands(here: Path, port: int) -> list[str]:
    """The guide's commands that train, ask, serve and replace, with this folder's names in them."""
    text = GUIDE.read_text("utf-8").replace("\\\n        ", "")
    lines = [line.strip() for line in re.findall(r"^    (.*)$", text, re.M)]
    names = {
        "DIR": here / "model",
        "FILE": here / "rows.jsonl",
        "OUT": "runs/1",
        "TEXT": "What?",
        "8000": port,
    }
    words = [
        re.sub(r"\b(DIR|FILE|OUT|TEXT|8000)\b", lambda found: str(names[found[0]]), line) for line in lines
    ]
    return [line.partition("   #")[0].strip() for line in words if "RUN.toml" not in line]


def environment() -> dict[str, str]:
    """The commands of this Python come first on the path."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def run(command: str, here: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=here, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@contextmanager
def serving(command: str, here: Path, url: str) -> Iterator[None]:
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=here, env=environment(), start_new_session=True
    )
    try:
        until = time.monotonic() + WITHIN_S
        while time.monotonic() < until:
            assert process.poll() is None, "the server has ended"
            with suppress(OSError):
                if urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200:
                    break
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def asked(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}{path}", json.dumps({"max_tokens": 8, "temperature": 0, **body}).encode()
    )
    request.add_header("content-type", "application/json")
    return json.loads(urllib.request.urlopen(request, timeout=WITHIN_S).read())


def text_model(here: Path) -> None:
    shutil.copytree(Path(torchwright.__file__).parent / "workloads" / "bundled", here / "model")
    rows = [{"prompt": f"def f{n}(x):", "completion": f" return x + {n}"} for n in range(24)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def picture_model(here: Path) -> None:
    vlms.save("Qwen2_5_VL", here / "model")
    place = PictureReader(here / "model").placeholder
    (here / "model" / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", place))
    rows = []
    for n in range(24):
        Image.fromarray(vlms.picture(n, 56, 56)).save(here / f"{n}.png")
        content = [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "What?"}]
        rows.append(
            {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"n{n}"}]}
        )
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("sees", [False, True], ids=["text", "pictures"])
def test_a_model_is_trained_asked_served_and_replaced(sees: bool, tmp_path: Path) -> None:
    (picture_model if sees else text_model)(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    train, generate, serve, serve_replaceable, again, replace = commands(tmp_path, port)
    assert serve.startswith("torchwright serve")
    run(train, tmp_path)
    alone = f"{generate} --max-new-tokens 8 --json" + (" --image 3.png" if sees else "")
    data = base64.b64encode((tmp_path / "3.png").read_bytes()).decode() if sees else ""
    shown = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
    content = [*(shown if sees else []), {"type": "text", "text": "What?"}]
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": content}]} if sees else {"prompt": "What?"}
    )
    path = "/v1/chat/completions" if sees else "/v1/completions"

    def served(model: str) -> str:
        [choice] = asked(url, path, body | {"model": model})["choices"]
        return choice["message"]["content"] if sees else choice["text"]

    def generated(adapter: str) -> str:
        return json.loads(run(alone.replace("runs/1/adapter", adapter), tmp_path))["text"]

    with serving(f"{serve_replaceable} --port {port}", tmp_path, url):
        assert served("mine") == generated("runs/1/adapter")
        run(again, tmp_path)
        assert "Success" in run(replace, tmp_path)
        assert served("mine") == generated("runs/2/adapter")
