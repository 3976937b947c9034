"""What a reader copies: the blocks of the README and of getting-started run, and every command's options exist.

Trials run in this process, with a clock that says that every step pays: what is tested is that the words are right. The
slow test runs the same page in processes of its own, with nothing replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import transformers

import folders
from in_process import trials_in_process
from torchwright.cli import main
from torchwright.cli.group import cli
from torchwright.serve.folder import BUNDLED_NAME

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(
        path for path in (ROOT / "docs").rglob("*.md") if "log" not in path.relative_to(ROOT / "docs").parts
    ),
]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?<!\| )\btorchwright ((?:[a-z][a-z-]*)(?: [^`\n#|]*)?)")
"""A command, but for rows of results that begin with the project's name."""


def _small_classifier(name: str) -> torch.nn.Module:
    """A model of the README's architecture, and its vocabulary, instead of a download."""
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes)).eval()


def blocks(page: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer((ROOT / page).read_text("utf-8"))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model and a text, to work in."""
    monkeypatch.chdir(tmp_path)
    folders.save(folders.causal("Qwen2", hidden_size=64, head_dim=16), tmp_path / "my-folder")
    (tmp_path / "text.txt").write_text(" ".join(folders.SENTENCES * 40))
    monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_pretrained", _small_classifier)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/getting-started.md", marks=pytest.mark.slow)]
)
def test_every_block_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    trials_in_process(monkeypatch, 2.0, tried=("dtype",), cache=place / "cache")
    names: dict[str, object] = {}
    for language, text in blocks(page):
        if language == "sh":
            for line in text.splitlines():
                assert main(shlex.split(line)[1:]) == 0, line
        elif text.startswith("# my_model.py"):
            (place / "my_model.py").write_text(text)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_runs_as_a_user_runs_it(place: Path):
    script = place / "page.py"
    (place / "torchwright").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torchwright "$@"\n')
    (place / "torchwright").chmod(0o755)
    environment = os.environ | {"PATH": f"{place}:{os.environ['PATH']}"}
    said: list[str] = []
    for language, text in blocks("docs/getting-started.md"):
        if text.startswith("# my_model.py"):
            (place / "my_model.py").write_text(text)
        elif language == "python":
            said.append(text)
            script.write_text("\n".join(said))
        else:
            done = subprocess.run(["sh", "-ec", text], env=environment, cwd=place, check=False)
            # A busy machine may leave `verify` undecided; that ends the block, and is no fault of the page.
            assert done.returncode in (0, 3), text
    subprocess.run([sys.executable, str(script)], cwd=place, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_and_option_that_a_page_names_exists(page: Path):
    assert wrong_commands(page.read_text("utf-8")) == []


def test_a_verb_or_an_option_that_does_not_exist_is_found():
    text = "`torchwright ledger RUN` and\n\n    torchwright optimize --nothing\n\n```sh\ntorchwright cache pick\n```\n"
    assert wrong_commands(text) == ["ledger", "optimize --nothing", "cache pick"]
    fine = (
        "```python\nimport torchwright as tw\n```\n| torchwright w4 | 2x |\n`torchwright cache pack M -o b`\n"
    )
    assert wrong_commands(fine) == []


def wrong_commands(text: str) -> list[str]:
    """Return the verbs and options of a page's commands that do not exist."""
    wrong: list[str] = []
    for match in COMMAND.finditer(PYTHON.sub("", text)):
        verb, *words = match[1].split()
        command = cli.commands.get(verb)
        while isinstance(command, click.Group) and words and words[0].partition("|")[0].isidentifier():
            verb += f" {words[0]}"
            command = command.commands.get(words.pop(0).partition("|")[0])
        if command is None:
            wrong.append(verb)
            continue
        known = {"--help"} | {
            name
            for each in command.params
            if isinstance(each, click.Option)
            for name in (*each.opts, *each.secondary_opts)
        }
        named = [word.partition("=")[0] for word in words if word.startswith("--")]
        wrong += [f"{verb} {word}" for word in named if re.sub(r"[^\w-]+$", "", word) not in known]
    return wrong


def test_the_pages_ask_a_server_for_the_model_that_it_serves():
    text = (ROOT / "docs" / "serve.md").read_text("utf-8")
    assert set(re.findall(r'model="([^"]+)"', text)) <= {BUNDLED_NAME}


def test_the_readme_is_short_and_has_its_commands():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert "    pip install -e . && torchwright optimize" in lines
    assert "    pip install -e '.[test]' && pytest" in lines
