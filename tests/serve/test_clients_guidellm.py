"""GuideLLM's load against the running server: every request is answered in full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from http_support import command

from torchwright.workloads.language import BUNDLED

REQUESTS, STREAMS, NEW = 24, 4, 16


@pytest.mark.slow
def test_guidellm_finds_no_fault(tmp_path: Path) -> None:
    program = os.environ.get("GUIDELLM") or shutil.which("guidellm")
    if program is None:
        pytest.skip(
            "no guidellm here: `pip install 'torchwright[load]'`, or GUIDELLM=PATH of another environment's"
        )
    with command() as server:
        options = {
            "backend": f"kind=openai_http,target={server.url}",
            "profile": f"kind=concurrent,streams={STREAMS}",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={BUNDLED}",
            "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={NEW}",
            "output": f"kind=json,path={tmp_path / 'out.json'}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        done = subprocess.run(
            [program, "run", *words, "--disable-console"],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    assert totals["successful"] == REQUESTS
    answered = benchmark["metrics"]["output_token_count"]["successful"]
    assert (answered["min"], answered["max"]) == (NEW, NEW)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"] > 0
