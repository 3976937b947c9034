"""`torchwright chat`: lines in, answers out, and the commands that begin with a slash."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_support import serving
from picture_support import picture, write_folder
from test_http_reasoning import ECHO

from torchwright.cli import main
from torchwright.core.errors import TorchwrightError
from torchwright.serve.chat import Chat, Conversation, Terminal, deltas


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(template=ECHO) as running:
        yield running.url


def talk(url: str, lines: str, **options: Any) -> tuple[str, Conversation]:
    """Return the text shown for these lines and the conversation afterwards; the engine repeats its input."""
    shown, conversation = io.StringIO(), Conversation()
    Chat(url, conversation, Terminal(io.StringIO(lines), shown), key=None, **options).run()
    return shown.getvalue(), conversation


@pytest.mark.slow
def test_a_conversation_is_remembered_and_begun_anew(url: str) -> None:
    shown, conversation = talk(url, "Hello there\n\nAgain\n")
    assert shown == "Hello there\nAgain\n"
    assert [turn["content"] for turn in conversation.messages] == ["Hello there"] * 2 + ["Again"] * 2
    _, conversation = talk(url, "Hello\n/system Be brief.\nOnce more\n")
    assert [turn["role"] for turn in conversation.messages] == ["system", "user", "assistant"]
    _, conversation = talk(url, "Hello\n/clear\n")
    assert conversation.messages == []


def test_texts_of_several_lines(url: str) -> None:
    _, conversation = talk(url, 'one \\\ntwo\n"""three\n/four\n\nfive"""\n"""six"""\n')
    asked = [turn["content"] for turn in conversation.turns if turn["role"] == "user"]
    assert asked == ["one \ntwo", "three\n/four\n\nfive", "six"]


def test_a_conversation_can_be_saved(url: str, tmp_path: Path) -> None:
    shown, conversation = talk(
        url, f"é\n/save {tmp_path / 'talk.json'}\n/save {tmp_path / 'no' / 'x'}\n/exit\nlate\n"
    )
    assert json.loads((tmp_path / "talk.json").read_text("utf-8")) == conversation.messages
    assert "cannot be written" in shown
    assert "late" not in shown


def test_reasoning_is_shown_and_sent_back_apart(url: str) -> None:
    shown, conversation = talk(url, "<think>hm</think>Yes.\n")
    assert shown == "hm\n\nYes.\n"
    assert conversation.turns[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


def test_what_fails_is_said_and_not_remembered(url: str) -> None:
    shown, conversation = talk(url, "a " * 2000 + "\nshort\n")
    assert "! the model's context is" in shown
    assert len(conversation.turns) == 2
    assert "! http://127.0.0.1:9" in talk("http://127.0.0.1:9", "hi\n")[0]
    assert "/save FILE" in talk(url, "/help\n")[0]
    assert "/save FILE" in talk(url, "/unknown\n")[0]


def test_an_answer_that_is_stopped_stays(url: str) -> None:
    class Stopped(io.StringIO):
        """Ctrl-C is pressed when the first piece is shown."""

        def write(self, text: str) -> int:
            begins = not self.getvalue()
            super().write(text)
            if begins:
                raise KeyboardInterrupt
            return len(text)

    whole = "a few words and a few more of them"
    shown, conversation = Stopped(), Conversation()
    Chat(url, conversation, Terminal(io.StringIO(f"{whole}\n"), shown), key=None).run()
    first = shown.getvalue().removesuffix("\n")
    assert first
    assert first != whole
    assert conversation.turns[-1] == {"role": "assistant", "content": first}


def test_a_key_is_sent() -> None:
    with serving(keys=["secret"]) as running:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert list(deltas(running.url, body, "secret"))
        with pytest.raises(TorchwrightError, match="key"):
            list(deltas(running.url, body, "wrong"))


@pytest.mark.slow
def test_the_command_serves_the_model_for_the_conversation() -> None:
    words = [sys.executable, "-m", "torchwright", "chat", "--max-tokens", "4"]
    ended = subprocess.run(words, input="Hello\n/exit\n", capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip()


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "none")]) == 2
    assert f"there is no model at {tmp_path / 'none'}" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9", "--kv", "int8"]) == 2


@pytest.mark.parametrize("verb", ["run", "help", "version", "quantize"])
def test_verbs_of_other_tools_name_ours(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "x"]) == 2
    assert f"No such command '{verb}': " in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_go_with_the_next_line(
    url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    lines = f"/image {tmp_path / 'a.png'}\n/image {tmp_path / 'none.png'}\nWhat?\nAnd?\n"
    with serving(folder=write_folder(tmp_path_factory.mktemp("vision"))) as running:
        shown, conversation = talk(running.url, lines, max_tokens=2)
        moving, _ = talk(running.url, f"/video {tmp_path / 'a.png'}\nWhat?\n")
    assert "takes no videos for this model" in moving
    assert "goes with the next line" in shown
    assert f"! {tmp_path / 'none.png'} cannot be shown" in shown
    first, _, second, _ = conversation.turns
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "And?"
    shown, conversation = talk(url, lines)
    assert "! the served model takes text alone" in shown
    assert [turn["content"] for turn in conversation.turns] == ["And?", "And?"]
