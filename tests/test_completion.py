"""Shell completion, by the protocols of Bash and Zsh: words and the cursor in, types and values out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchwright.cli import main
from torchwright.cli.completion import VARIABLE
from torchwright.hardware.devices import devices

pytestmark = pytest.mark.quick


def complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, line: str
) -> str:
    """Return what a shell is given for a line with the cursor at its end."""
    words = line.split(" ")
    monkeypatch.setenv(VARIABLE, f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as end:
        main([])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("torchwright opt", ["plain,optimize"]),
        ("torchwright optimize --obj", ["plain,--objective"]),
        ("torchwright optimize --objective l", ["plain,latency"]),
        ("torchwright optimize --with kv", ["plain,kv8"]),
        (
            "torchwright optimize model --without nati",
            ["plain,native", "plain,native_speech", "plain,native_seq2seq", "plain,native_vision"],
        ),
        ("torchwright optimize --device c", ["plain,cpu", "plain,cuda"]),
        ("torchwright export model --to o", ["plain,onnx", "plain,openvino"]),
        ("torchwright optimize --objective = l", ["plain,latency"]),
        ("torchwright optimize --device =", [f"plain,{name}" for name in devices.names()]),
        ("torchwright map model in.jsonl --task g", ["plain,generate"]),
        ("torchwright map model te", ["file,te"]),
        ("torchwright optimize mod", ["file,mod"]),
        ("torchwright verify ", ["file,"]),
        ("torchwright optimize model -o ou", ["dir,ou"]),
        ("torchwright export --check ou", ["file,ou"]),
        ("torchwright nothing", []),
        ("torchwright optimize --nothing", []),
    ],
)
def test_bash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, wanted: list[str]
) -> None:
    assert complete(monkeypatch, capsys, "bash", line).split() == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("torchwright export model --to o", ["plain", "onnx", "_", "plain", "openvino", "_"]),
        ("torchwright optimize mod", ["file", "mod", "_"]),
        ("torchwright optimize --objective=l", ["plain", "--objective=latency", "_"]),
        ("torchwright optimize model -o ou", ["dir", "ou", "_"]),
    ],
)
def test_zsh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, wanted: list[str]
) -> None:
    assert complete(monkeypatch, capsys, "zsh", line).splitlines() == wanted


def test_a_file_is_left_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripts that are sourced complete paths where the answer says file or dir."""
    for shell, said in (("bash", "compopt -o default"), ("zsh", "_path_files -f")):
        monkeypatch.setenv(VARIABLE, f"{shell}_source")
        monkeypatch.setattr("click.shell_completion.BashComplete._check_version", lambda self=None: None)
        with pytest.raises(SystemExit):
            main([])
        assert said in capsys.readouterr().out


def test_completion_imports_no_torch() -> None:
    code = (
        "import sys\nfrom torchwright.cli import main\n"
        "try: main([])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    asked = {VARIABLE: "bash_complete", "COMP_CWORD": "3", "COMP_WORDS": "torchwright export --to o"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["plain,onnx", "plain,openvino", "False"]
