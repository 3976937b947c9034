"""`torchwright chat`: a conversation in a terminal, with a server of this machine that it starts, or one that runs."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from torchwright.core.ansi import DIM, PLAIN, takes_styles
from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.escapes import escaped
from torchwright.core.paths import cache_folder
from torchwright.core.process.orphans import die_with_parent
from torchwright.core.regular_file import read_regular
from torchwright.core.system import apart, kill_all
from torchwright.serve.limits import INPUT_PICTURE_BYTES, INPUT_VIDEO_BYTES

HELP = """\
/system TEXT   set the system prompt and begin anew; without TEXT show it
/clear         begin anew
/image FILE    show a picture with the next line, to a model that takes pictures
/video FILE    show a video with the next line, to a model that takes videos
/save FILE     write the conversation to FILE as JSON
/help          this list
/exit          leave, as Ctrl-D does
A line that ends with \\ goes on; \"\"\" begins and ends a text of several lines. Ctrl-C stops an answer."""
BLOCK = '"""'
PARTS = {"/image": "image_url", "/video": "video_url"}
"""Commands that show a file → the type of its part of a message."""
MOST_BYTES = {"image_url": INPUT_PICTURE_BYTES, "video_url": INPUT_VIDEO_BYTES}
HISTORY, HISTORY_LINES = "chat_history", 1000
READY = re.compile(r" at (http://\S+) after ")
SECONDS = 600.0
"""Without a word from the server an answer has failed."""


@dataclass(kw_only=True)
class Conversation:
    """The conversation so far, as OpenAI's messages."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def save(self, file: Path) -> None:
        """Write the messages as JSON; raises `WorkloadError` where that fails."""
        try:
            file.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise WorkloadError(f"{file} cannot be written", found=str(error)) from error


class LocalServer:
    """`torchwright serve` in a process of its own, from its start to the block's end."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def __enter__(self) -> str:
        """Return the URL once requests are taken; raises `TorchwrightError` with the server's words where none is."""
        command = [sys.executable, "-m", "torchwright", "serve", *self._words, "--port", "0"]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=partial(die_with_parent, os.getpid()),
            **apart(),
        )
        said = []
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                said.append(line.strip())
                if found := READY.search(line):
                    return found[1]
        except BaseException:
            self._end()
            raise
        self._end()
        reason = said[-1].removeprefix("torchwright: ") if said else "it said nothing"
        raise TorchwrightError(f"the model cannot be served: {reason}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        kill_all(self._process)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def deltas(url: str, body: dict[str, Any], key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a streamed chat completion; raises `TorchwrightError` with the server's message."""
    place = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname or "", place.port, timeout=SECONDS)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(
            "POST",
            f"{place.path.rstrip('/')}/v1/chat/completions",
            json.dumps({**body, "stream": True}),
            headers,
        )
        response = connection.getresponse()
        if response.status != 200:
            raise TorchwrightError(_message(response.read()) or f"the server answered {response.status}")
        for line in response:
            data = line.decode("utf-8", "replace").strip().removeprefix("data: ")
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise TorchwrightError(_message(data.encode()) or "the server failed")
            for choice in event.get("choices", ()):
                yield choice["delta"]
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TorchwrightError(f"{url} cannot be asked", found=str(error) or type(error).__name__) from error
    finally:
        connection.close()


def _message(body: bytes) -> str | None:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None


class Terminal:
    """The lines of a person, and where answers are shown; a pipe gets no prompts."""

    def __init__(self, source: TextIO | None = None, shown: TextIO | None = None) -> None:
        self._in, self._out = source or sys.stdin, shown or sys.stdout
        self._person = self._in is sys.stdin and self._in.isatty()
        self._colors = takes_styles(self._out)

    @contextlib.contextmanager
    def history(self) -> Iterator[None]:
        """Keep lines for the arrow keys of this conversation and later ones."""
        if not self._person:
            yield
            return
        try:
            import readline
        except ImportError:  # Windows has its own
            yield
            return
        file = cache_folder() / HISTORY
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                readline.write_history_file(file)

    def read(self) -> str | None:
        """Return what the person says next, which may have several lines; None at the end."""
        line = self._line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        while line.endswith("\\"):
            more = self._line("... ")
            line = line[:-1] + "\n" + (more or "")
            if more is None:
                break
        return line

    def _block(self, text: str) -> str:
        while BLOCK not in text:
            line = self._line("... ")
            if line is None:
                return text
            text += "\n" + line
        return text.partition(BLOCK)[0].strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._person:
            try:
                return input(prompt)
            except EOFError:
                self.say("")
                return None
        line = self._in.readline()
        return line.rstrip("\r\n") if line else None

    def show(self, text: str, *, dim: bool = False) -> None:
        """Show a piece of an answer at once; a terminal acts on nothing that it holds."""
        text = escaped(text) if self._out.isatty() else text
        text = f"{DIM}{text}{PLAIN}" if dim and self._colors else text
        encoding = self._out.encoding or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()

    def say(self, text: str) -> None:
        self.show(text + "\n")


class Chat:
    """The loop: a line, an answer, and the commands that begin with a slash."""

    def __init__(
        self, url: str, conversation: Conversation, terminal: Terminal, *, key: str | None, **options: Any
    ) -> None:
        self._url, self._key, self._options = url, key, options
        self.conversation, self._terminal = conversation, terminal
        self._pictures: list[dict[str, Any]] = []
        """Those of the next line, as parts of its message."""

    def run(self) -> None:
        """Talk until the person leaves."""
        with self._terminal.history(), _python_interrupts():
            while True:
                try:
                    text = self._terminal.read()
                except KeyboardInterrupt:
                    self._terminal.say("\n/exit or Ctrl-D leaves")
                    continue
                if text is None or text.strip() in ("/exit", "/bye", "/quit"):
                    return
                try:
                    self._take(text)
                except TorchwrightError as error:
                    self._terminal.say(f"! {error}")

    def _take(self, text: str) -> None:
        command, _, rest = text.strip().partition(" ")
        if not command.startswith("/"):
            if text.strip():
                self.answer(text)
        elif command == "/clear":
            self.conversation.turns.clear()
        elif command == "/system" and rest:
            self.conversation.system = rest
            self.conversation.turns.clear()
        elif command == "/system":
            self._terminal.say(self.conversation.system or "(no system prompt)")
        elif command in PARTS and rest:
            self._pictures.append(media_part(PARTS[command], Path(rest.strip()).expanduser()))
            self._terminal.say(f"{rest.strip()} goes with the next line")
        elif command == "/save" and rest:
            self.conversation.save(Path(rest.strip()).expanduser())
            self._terminal.say(f"saved to {rest.strip()}")
        else:
            self._terminal.say(HELP)

    def answer(self, text: str) -> None:
        """Ask and show the answer; one that fails is not part of the conversation, one that is stopped is."""
        turns = self.conversation.turns
        shown, self._pictures = self._pictures, []
        turns.append({"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text})
        said: dict[str, str] = {"content": "", "reasoning_content": ""}
        body = {"messages": self.conversation.messages, **self._options}
        try:
            for delta in deltas(self._url, body, self._key):
                self._grow(said, delta)
        except KeyboardInterrupt:
            pass
        except TorchwrightError:
            turns.pop()
            raise
        self._terminal.say("")
        reasoning = {name: found for name, found in said.items() if name != "content" and found}
        turns.append({"role": "assistant", "content": said["content"], **reasoning})

    def _grow(self, said: dict[str, str], delta: dict[str, Any]) -> None:
        for name, dim in (("reasoning_content", True), ("content", False)):
            piece = delta.get(name)
            if not piece:
                continue
            if name == "content" and said["reasoning_content"] and not said["content"]:
                self._terminal.show("\n\n")
            said[name] += piece
            self._terminal.show(piece, dim=dim)


def media_part(kind: str, file: Path) -> dict[str, Any]:
    """Return a picture's or video's file as a part of a message; raises `WorkloadError` where it cannot be read."""
    try:
        content = read_regular(file, MOST_BYTES[kind])
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{file} cannot be shown", found=str(error)) from error
    url = f"data:;base64,{base64.b64encode(content).decode()}"
    return {"type": kind, kind: {"url": url}}


@contextlib.contextmanager
def _python_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt here: it stops an answer, not the command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
