"""Coding agents' own programs against `torchwright serve`, each set up by its block of docs/use-from.md.

    python -m benchmarks.serve.agent_programs [--keep DIR]

The programs are looked for on PATH: `npm install @anthropic-ai/claude-code @openai/codex @continuedev/cli opencode-ai`
and `pip install aider-chat` in an environment of its own. Each has a new home folder and a folder to work in. The model
is the bundled one with a longer context, because an agent's first prompt has 10,000 tokens and more; what it answers
is of no use, and all that counts is that every request is answered and the program prints the answer. `--keep` writes
what each program sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torchwright
from benchmarks.serve.recording_proxy import Exchange, recording
from benchmarks.serve.server import server

PAGE = Path(__file__).parents[2] / "docs" / "use-from.md"
ADDRESS, NAME = "http://127.0.0.1:8000", "local"
QUESTION = "Which files are here?"
CONTEXT = 131_072
ENDS = ".):"
"""An answer ends before the first token with one of these: agents set no limit, and 100,000 tokens take too long."""
SECONDS = 300.0
"""For one program and its question."""
WITHOUT_TELEMETRY = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The command by which one agent is asked a question without a terminal."""

    command: str
    package: str
    """Its name in the registry."""
    ask: tuple[str, ...]
    """Arguments before the question."""
    file: str = ""
    """The place of its block below the home folder; empty for a block of shell, which has variables."""


PROGRAMS: Mapping[str, Program] = {
    "Claude Code": Program(command="claude", package="@anthropic-ai/claude-code", ask=("-p",)),
    "Codex": Program(
        command="codex",
        package="@openai/codex",
        ask=("exec", "--skip-git-repo-check"),
        file=".codex/config.toml",
    ),
    "Continue": Program(
        command="cn", package="@continuedev/cli", ask=("-p",), file=".continue/config.yaml"
    ),
    "aider": Program(
        command="aider",
        package="aider-chat",
        ask=(
            "--model", f"openai/{NAME}", "--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes",
            "--no-show-model-warnings", "--analytics-disable", "--message",
        ),
    ),
    "OpenCode": Program(
        command="opencode", package="opencode-ai", ask=("run",), file=".config/opencode/opencode.json"
    ),
}  # fmt: skip
"""Heading in the page → its program."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one program's question."""

    version: str
    exchanges: list[Exchange]
    said: str
    trouble: str
    """Its last words, where it failed."""

    @property
    def refused(self) -> list[Exchange]:
        return [one for one in self.exchanges if one.status != 200]


def installed() -> list[str]:
    """Return the agents whose programs are on PATH."""
    return [name for name, program in PROGRAMS.items() if shutil.which(program.command)]


@contextlib.contextmanager
def long_model() -> Iterator[Path]:
    """Yield a copy of the bundled model that has room for an agent's prompt, and short answers."""
    source = Path(torchwright.__file__).parent / "workloads" / "bundled"
    with tempfile.TemporaryDirectory() as folder:
        for path in source.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        config = json.loads((source / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        tokens = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
        ends = [id for text, id in tokens.items() if any(end in text for end in ENDS)]
        generation = json.loads((source / "generation_config.json").read_text())
        generation["eos_token_id"] = [generation["eos_token_id"], *ends]
        (Path(folder) / "generation_config.json").write_text(json.dumps(generation))
        yield Path(folder)


def ask(name: str, url: str) -> Run:
    """Set one program up by its block of the page, and ask it the question."""
    program = PROGRAMS[name]
    command = shutil.which(program.command)
    assert command is not None, f"{program.command} is not on PATH"
    with tempfile.TemporaryDirectory() as folder, recording(url) as record:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        (work / "README.md").write_text("An example.\n")
        block = _block(name).replace(ADDRESS, record.url)
        names = dict(re.findall(r"^export (\w+)=(\S+)$", block, re.MULTILINE))
        if program.file:
            (home / program.file).parent.mkdir(parents=True)
            (home / program.file).write_text(block)
        known = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        env = {**known, "HOME": str(home), "TERM": "dumb", **WITHOUT_TELEMETRY, **names}

        def run(*arguments: str) -> tuple[int | None, str, str]:
            with subprocess.Popen(
                [command, *arguments],
                cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    said, errors = process.communicate(timeout=SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)  # with what a launcher of npm has started
                    return None, *process.communicate()
            return process.returncode, said, errors

        version = re.search(r"\d+(\.\d+)+", "".join(run("--version")[1:]))
        status, said, errors = run(*program.ask, QUESTION)
        exchanges = list(record.exchanges)
    trouble = "" if status == 0 else f"status {status}: {(errors or said)[-1000:]}"
    return Run(version=version[0] if version else "", exchanges=exchanges, said=said, trouble=trouble)


def _block(name: str) -> str:
    """Return the first block under a heading of the page."""
    found = re.search(rf"^### {name}\n.*?^```\w+\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE.name} has no block for {name}"
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Coding agents' own programs against the server.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all that are here"
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="write what each program sent")
    options = parser.parse_args()
    with long_model() as folder, server(str(folder), "--served-model-name", NAME) as (url, _):
        for name in options.names or installed():
            done = ask(name, url)
            print(f"{name} {done.version}: {len(done.said.strip())} characters {done.trouble}", flush=True)
            for one in done.exchanges:
                print(f"  {one.status} {one.method} {one.path} {one.ignored}")
                if one.status != 200:
                    print(f"      {one.answer[:300]}")
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                sent = [vars(one) for one in done.exchanges]
                kept = {
                    "version": done.version,
                    "said": done.said,
                    "trouble": done.trouble,
                    "exchanges": sent,
                }
                (options.keep / f"{name}.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
