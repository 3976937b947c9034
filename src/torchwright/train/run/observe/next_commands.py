"""Commands that use what a training run has left, or go on with it (no torch)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.hub.run_folder import ADAPTER, MODEL
from torchwright.train.run.observe.history import History
from torchwright.train.run.runtime.folder import RUN_FILE

HEADS = {
    "classification": ("AutoModelForSequenceClassification.from_pretrained({})", "load it by transformers"),
    "embedding": ("SentenceTransformer({})", "load it by sentence-transformers"),
}
"""Kind of [head] → the Python that loads its model, and what that does."""


@dataclass(frozen=True)
class Next:
    """A command and what it does."""

    command: str
    does: str


def next_commands(out: Path, history: History, *, live: bool = False) -> list[Next]:
    """Return what can be done with a run as it stands, the most likely first; `live` means that it is at work."""
    if live:
        return [Next(_shell("train", "--watch", out), "follow the run in a terminal")]
    if history.end is None or history.end["event"] != "end":
        return [Next(_shell("train", out / RUN_FILE), "go on from the last checkpoint")] if _file(out) else []
    return list(_of_model(out, history.run))


def _of_model(out: Path, run: Mapping[str, Any]) -> Iterator[Next]:
    model, adapter = out / MODEL, out / ADAPTER
    kind, head = run.get("kind") or "language-model", run.get("head")
    if isinstance(head, dict) and head.get("kind") in HEADS and model.is_dir():
        code, does = HEADS[head["kind"]]
        yield Next(code.format(json.dumps(str(model))), does)
    elif kind == "language-model" and model.is_dir():
        yield Next(_shell("serve", out), "an OpenAI-compatible server")
        yield Next(_shell("generate", model, "--prompt", "Hello"), "one answer")
    elif kind == "language-model" and adapter.is_dir():
        base = _base(adapter)
        yield Next(_shell("serve", base, "--adapter", adapter), "an OpenAI-compatible server")
        yield Next(_shell("generate", base, "--adapter", adapter, "--prompt", "Hello"), "one answer")
        if _file(out):
            yield Next(_shell("train", out / RUN_FILE, "--merge"), "write a model with the adapters in it")
    elif kind == "vision-language" and adapter.is_dir():
        base, about = _base(adapter), ("--image", "FILE.png", "--prompt", "What is it?")
        yield Next(
            _shell("serve", base, "--adapter", f"mine={adapter}"),
            "a server; requests choose the model 'mine'",
        )
        yield Next(_shell("generate", base, "--adapter", adapter, *about), "one answer about a picture")
    elif kind == "draft" and model.is_dir():
        target = run.get("target")
        folder = target.get("folder") if isinstance(target, dict) else None
        yield Next(
            _shell("serve", str(folder or "TARGET"), "--draft", model), "serve the target with this draft"
        )
    elif kind == "speech" and model.is_dir():
        yield Next(_shell("transcribe", "--model", model, "FILE.wav"), "text of a sound")
    elif kind == "image-classification" and model.is_dir():
        yield Next(_shell("optimize", model, "-o", out / "fast"), "make it faster on this machine")


def _base(adapter: Path) -> str:
    """Return the folder of the model that adapters were trained on, as peft's file names it."""
    try:
        told = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        return str(told["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "BASE"


def _file(out: Path) -> bool:
    return (out / RUN_FILE).is_file()


def _shell(*words: str | Path) -> str:
    return shlex.join(["torchwright", *map(str, words)])
