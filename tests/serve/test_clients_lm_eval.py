"""lm-eval's `local-completions` against the server: its bits per byte are those of transformers in float32."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from http_support import MODEL, command
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchwright.workloads.language import BUNDLED

LENGTH = 192
"""Of lm-eval's windows; two tokens of it are its own: one to begin with and one to generate."""
DOCUMENTS, CHARACTERS = 4, 1500
TASK = """\
task: held_out
dataset_path: json
dataset_kwargs:
  data_files:
    test: held_out.jsonl
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
metadata:
  version: 1
"""


def nll(documents: list[str], window: int) -> float:
    """Negative log-likelihood in nats. Windows of targets do not overlap; the last has all before it that fits."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    total = 0.0
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) > window, "a document has several windows"
        row = [tokenizer.bos_token_id, *ids]
        for start in range(0, len(ids), window):
            end = min(start + window, len(ids))
            first = max(0, end - window)
            with torch.inference_mode():
                logits_TV = model(torch.tensor([row[first:end]])).logits[0].double()
            picked_T = logits_TV.log_softmax(-1)[torch.arange(end - first), torch.tensor(ids[first:end])]
            total -= picked_T[start - first :].sum().item()
    return total


@pytest.mark.slow
def test_lm_eval_measures_what_transformers_measures(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm-eval here: `pip install 'lm-eval[api]'`")
    text = (BUNDLED / "eval.txt").read_text()
    documents = [text[start : start + CHARACTERS] for start in range(0, DOCUMENTS * 9000, 9000)]
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (tmp_path / "held_out.jsonl").write_text("".join(lines))
    (tmp_path / "held_out.yaml").write_text(TASK)
    with command("--api-key", "secret") as server:
        model = {
            "model": MODEL,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": BUNDLED,
            "tokenizer_backend": "huggingface",
            "max_length": LENGTH,
            "num_concurrent": 2,
        }
        words = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--batch_size", "4"]
        words += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
        words += ["--tasks", "held_out", "--include_path", ".", "--output_path", "out"]
        hub = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, **hub, "OPENAI_API_KEY": "secret"},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]["held_out"]
    size = sum(len(document.encode()) for document in documents)
    expected = nll(documents, LENGTH - 2) / size
    # bfloat16 weights and activations there, float32 here.
    assert results["bits_per_byte,none"] == pytest.approx(expected / math.log(2), rel=0.005)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(expected), rel=0.005)
