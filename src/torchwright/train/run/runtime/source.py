"""RUN/source: the configuration and the tokenizer of the model that a run trains."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from torchwright.hub.chat_template import template_files
from torchwright.hub.run_folder import SOURCE
from torchwright.models.decoder.families import decoder_config
from torchwright.train.model.foreign import read_model_config
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.run_file import changed_fields

CONFIG = "config.json"
TEMPLATE_ENDINGS = (".jinja", ".jinja2", "chat_template.json")
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "LICENSE.txt",
)


def write_source(run: Run, folder: Path, out: Path) -> Path:
    """Write RUN/source: config.json and the tokenizer's files, by which the trained weights can be loaded.

    Raises `RunError` if the folder has those of another model than the run file's. Raises `RunError` or `ModelError`
    for a configuration that is missing or that no family describes.
    """
    return write_files(out, _source_files(run, folder))


def write_files(out: Path, files: dict[str, bytes]) -> Path:
    """Write RUN/source of these files. Raises `RunError` if it holds others."""
    source = out / SOURCE
    if source.is_dir():
        _check_source(source, files)
        return source
    new = source.with_name(f".{SOURCE}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        for name, content in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_bytes(content)
        new.rename(source)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return source


def _source_files(run: Run, folder: Path) -> dict[str, bytes]:
    """Name → content of the files that RUN/source is to hold."""
    if run.model.config is not None:
        content = json.dumps(run.model.config, indent=2).encode()
        decoder_config(run.model.config, "`model.config` of the run file")
    else:
        assert run.model.folder is not None
        model = folder / run.model.folder
        if not (model / CONFIG).is_file():
            raise RunError(f"model.folder has no {CONFIG}: {model}", next="check `model` in the run file")
        content = (model / CONFIG).read_bytes()
        read_model_config(model)
    tokenizer = run.model.tokenizer or run.model.folder
    if not tokenizer:
        return {CONFIG: content}
    copied = {name: folder / tokenizer / name for name in COPIED} | template_files(folder / tokenizer)
    return {CONFIG: content, **{name: path.read_bytes() for name, path in copied.items() if path.is_file()}}


def _check_source(source: Path, files: dict[str, bytes]) -> None:
    """Raise `RunError`, naming what differs, unless RUN/source holds these files."""
    held = {
        path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }
    different = [
        f"model.{field}"
        for field in changed_fields(*(json.loads(which.get(CONFIG, "{}")) for which in (held, files)))
    ]
    different += [
        f"{name} of the tokenizer"
        for name in sorted({*held, *files} - {CONFIG})
        if held.get(name) != files.get(name)
        # Runs that were begun before templates were copied have none.
        and not (name.endswith(TEMPLATE_ENDINGS) and name not in held)
    ]
    if different:
        raise RunError(
            f"the run folder {source.parent} was begun with another model than the run file's",
            found="; ".join(different),
            next="set the old values, or another `out`; where nothing in the folder is wanted, remove it",
        )
