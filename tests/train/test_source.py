"""RUN/source and copies of model folders hold every chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.hub.chat_template import ChatTemplate, template_files
from torchwright.hub.folder import copy_files, model_files
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.runtime.source import CONFIG, write_files

SOURCES = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "additional_chat_templates").mkdir(parents=True)
    (made / CONFIG).write_text("{}")
    (made / "chat_template.jinja").write_text(SOURCES["default"])
    (made / "additional_chat_templates" / "tool_use.jinja").write_text(SOURCES["tool_use"])
    return made


def test_source_holds_named_templates_and_notices_another(folder: Path, tmp_path: Path) -> None:
    files = {name: path.read_bytes() for name, path in template_files(folder).items()} | {CONFIG: b"{}"}
    source = write_files(tmp_path, files)
    assert ChatTemplate(source).sources == SOURCES
    assert write_files(tmp_path, files) == source
    named = "additional_chat_templates/tool_use.jinja"
    with pytest.raises(RunError, match=f"{named} of the tokenizer"):
        write_files(tmp_path, files | {named: b"another"})


def test_a_run_that_was_begun_without_templates_goes_on(folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {CONFIG: b"{}"})
    files = {name: path.read_bytes() for name, path in template_files(folder).items()} | {CONFIG: b"{}"}
    write_files(tmp_path, files)


def test_a_copy_of_a_folder_holds_named_templates(folder: Path, tmp_path: Path) -> None:
    copy_files(model_files(folder, weights=False), tmp_path / "copy")
    assert ChatTemplate(tmp_path / "copy").sources == SOURCES
