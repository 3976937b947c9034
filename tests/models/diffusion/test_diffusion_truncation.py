"""A prompt that is longer than the model reads: said in a sentence, and in no log."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchwright.models.diffusion.load import load_diffuser
from torchwright.models.diffusion.truncation import cut_prompts

SECRET = "secretword"


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What diffusers' and transformers' loggers say, to whichever handlers."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    listener = Listener()
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(listener)
    yield found
    for logger in loggers:
        logger.removeHandler(listener)


def test_what_is_cut_off_is_told_and_not_logged(pixart: Path, heard: list[str]) -> None:
    diffuser = load_diffuser(pixart)
    prompt = "a red dog " * random.randint(110, 200) + SECRET
    drawn = diffuser.draw(prompt, steps=2, size=(16, 16))
    (notice,) = drawn.notices
    assert notice.startswith("a text encoder reads ")
    assert notice.endswith(" tokens: the end of the prompt was left out")
    assert not heard
    assert diffuser.draw("a red dog", steps=2, size=(16, 16)).notices == ()
    other = diffuser.draw(prompt.removesuffix(SECRET), steps=2, size=(16, 16))
    assert (drawn.pixels_HW3 == other.pixels_HW3).all(), "the end has no part in it"


def test_other_words_and_other_threads_are_left_alone(pixart: Path, heard: list[str]) -> None:
    pipe = load_diffuser(pixart).pipe
    logger = logging.getLogger(type(pipe).__module__)
    before = [*logger.filters]
    cut = "The following part of your input was truncated because T5 can only handle up to 77 tokens: ['x']"
    with cut_prompts(pipe) as found:
        logger.warning("something else")
        logger.warning(cut)
        logger.warning(cut)
        thread = threading.Thread(target=logger.warning, args=(cut,))
        thread.start()
        thread.join()
    assert found == ["a text encoder reads 77 tokens: the end of the prompt was left out"]
    logger.warning(cut)
    assert heard == ["something else", cut, cut]
    assert logger.filters == before


def test_the_command_says_it(pixart: Path, tmp_path: Path) -> None:
    from torchwright.cli.imagine import command

    out = str(tmp_path / "picture.png")
    words = [
        "a red dog " * 150 + SECRET,
        "--model",
        str(pixart),
        "--steps",
        "2",
        "--size",
        "16x16",
        "-o",
        out,
    ]
    result = CliRunner().invoke(command, words)
    assert "the end of the prompt was left out" in result.stderr
    assert SECRET not in result.output
    result = CliRunner().invoke(command, [*words, "--json"])
    assert "left out" in json.loads(result.stdout)["notices"][0]
    assert CliRunner().invoke(command, [*words, "--quiet"]).output == ""
