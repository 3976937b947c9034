"""A GGUF file as a model folder: config.json and tokenizer written from its metadata, the file itself linked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torchwright.core.paths import private_cache
from torchwright.hub.gguf.config import config_of, stop_ids
from torchwright.hub.gguf.header import is_gguf, read_gguf
from torchwright.hub.gguf.names import places
from torchwright.hub.gguf.tokenizer import tokenizer_of

FILE = "model.gguf"
VERSION = 3
"""The version of the written files; a newer version does not read an older folder."""


def opened(path: Path) -> Path:
    """The folder of a GGUF file, made in the user's cache when it is first asked for; any other path as it is.

    Raises `ModelError`, naming the file, for one that is damaged, or whose model or tokenizer is not read here.
    """
    if not is_gguf(path):
        return path
    folder = private_cache("gguf") / _key(path)
    if not folder.is_dir():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write(path, made)
            os.replace(made, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _key(path: Path) -> str:
    """Return a key that changes when the file does."""
    found = path.stat()
    said = f"{VERSION} {path.resolve()} {found.st_size} {found.st_mtime_ns}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _write(path: Path, folder: Path) -> None:
    header = read_gguf(path)
    config = config_of(header)
    places(header)
    tokenizer, settings = tokenizer_of(header)
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", {"eos_token_id": stop_ids(header)})
    _json(folder / "tokenizer_config.json", settings)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / FILE).symlink_to(path.resolve())


def _json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
