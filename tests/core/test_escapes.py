"""No verb prints an escape sequence that it read from a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.table import Table

import folders
from torchwright.cli.failures import exit_code
from torchwright.cli.group import run
from torchwright.cli.printing import say
from torchwright.core.errors import ModelError
from torchwright.core.escapes import escaped
from torchwright.report.console import SafeConsole

TITLE, CLIPBOARD, TURN = "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x07", "\u202egnp.exe"
ODD = TITLE + CLIPBOARD + TURN + "\x9b2J\r"


def test_what_a_terminal_acts_on_is_escaped_and_the_rest_is_left() -> None:
    assert escaped("a\tb\nä ▁ 漢 \u200f é") == "a\tb\nä ▁ 漢 \u200f é"
    assert escaped(ODD) == (
        r"\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\u202egnp.exe\x9b2J\r".replace(r"\r", "\\r")
    )
    assert escaped("\ud800") == r"\ud800"


def test_errors_and_lines_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert harmless(str(ModelError(ODD, found=ODD, allowed=ODD, next=ODD)))
    say(ODD)
    say(ODD, err=True)
    assert harmless("".join(capsys.readouterr()))


def test_a_console_escapes_text_and_keeps_its_own_styles() -> None:
    file = io.StringIO()
    table = Table(ODD, title=ODD)
    table.add_row(ODD)
    console = SafeConsole(file=file, width=200, force_terminal=True, color_system="standard")
    console.print(table, ODD, style="red")
    assert "\x1b[31m" in file.getvalue()
    assert harmless(file.getvalue().replace("\x1b[", ""))


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt", "a", "MODEL"],
        ["serve", "MODEL"],
        ["optimize", "MODEL", "-o", "OUT"],
        ["export", "MODEL", "--to", "gguf", "-o", "OUT"],
        ["plan-layout", "MODEL"],
        ["train", "--model", "MODEL", "--data", "DATA", "-o", "OUT"],
        ["transcribe", "DATA", "--model", "MODEL"],
        ["imagine", "--model", "MODEL", "a"],
        ["segment", "--model", "MODEL", "DATA"],
        ["report", "ARTIFACT"],
        ["report", "ARTIFACT", "--all"],
        ["verify", "ARTIFACT"],
        ["bench", "ARTIFACT"],
        ["serve", "ARTIFACT"],
        ["generate", "--prompt", "a", "ARTIFACT"],
        ["profile", "ARTIFACT"],
        ["export", "ARTIFACT", "--to", "onnx", "-o", "OUT"],
        ["why-stuck", "DUMPS"],
        ["time-report", "JOB"],
        ["report", "JOB"],
        ["train", "RUN"],
        ["prove", "RUN"],
        ["data", "check", "RUN"],
        ["data", "show", "RUN"],
        ["data", "pack", "RUN", "-o", "OUT"],
        ["cache", "unpack", "BUNDLE"],
        ["cache", "why", "BUNDLE", "MODEL"],
        ["cache", "pack", "MODEL", "-o", "OUT"],
    ],
    ids=" ".join,
)
def test_no_verb_prints_a_files_escapes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    places = {"MODEL": tmp_path / "model", "ARTIFACT": tmp_path / "artifact", "DUMPS": tmp_path / "dumps"}
    config = {"architectures": [ODD], "model_type": ODD, "num_hidden_layers": ODD}
    folders.write_json(places["MODEL"] / "config.json", config)
    folders.write_json(places["MODEL"] / "model_index.json", {"_class_name": ODD})
    folders.write_json(
        places["ARTIFACT"] / "recipe.json", {"workload": {"kind": ODD, "model": ODD}, ODD: ODD}
    )
    folders.write_json(
        places["DUMPS"] / "rank_0.json", {"entries": [{"profiling_name": ODD}], "version": ODD}
    )
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": ODD}))
    places |= {"JOB": tmp_path / "job", "RUN": tmp_path / "run.toml", "BUNDLE": tmp_path / "bundle"}
    header = {"ledger": 1, "host": ODD, "rank": 0, "world": 1, "wall": 1, "every": 1, "launch": ODD}
    folders.write_json(places["JOB"] / "ledger" / "rank00000-1-1.jsonl", header)
    figures = {"event": "start", "at": 0, "torch": ODD, "run": {"data": ODD}, "data": {ODD: ODD}}
    (places["JOB"] / "metrics.jsonl").write_text(json.dumps(figures) + "\n")
    places["RUN"].write_text(f"out = {json.dumps(ODD)}\n{json.dumps(ODD)} = 1\n")
    folders.write_json(places["BUNDLE"] / "bundle.json", {"torch": ODD, ODD: ODD})
    places |= {"DATA": tmp_path / "data.jsonl", "OUT": tmp_path / "out"}
    code = exit_code(run, [str(places.get(word, word)) for word in words])
    said = "".join(capfd.readouterr())
    assert code in (0, 1, 2), said
    assert "fault in Torchwright" not in said
    assert harmless(said), ascii(said)


def harmless(text: str) -> bool:
    return not any(code in text for code in ("\x1b", "\x07", "\x9b", "\u202e"))
