"""A benchmark's run: options, the machine's facts, printed tables and JSON rows. torch is imported only when needed."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "src" / "torchwright" / "workloads" / "bundled"
Row = dict[str, Any]


class Option(dict[str, Any]):
    """Arguments of argparse's `add_argument`, where the short forms of `options` do not suffice."""


def options(doc: str | None, *positional: str, json: Any = True, **flags: Any) -> argparse.Namespace:
    """Parse the command line; `doc`, the script's docstring, is its --help.

    A positional argument is a name with its nargs, such as "model?". The value of a flag is its default and gives the
    type. False is a switch; a type has no default. A list takes several values. A tuple or mapping takes some of its
    members, by default all. `json` adds --json.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in positional:
        parser.add_argument(name.rstrip("?*+"), nargs=name[-1] if name[-1] in "?*+" else None)
    if json:
        flags["json"] = Option(metavar="FILE", help="write the rows to FILE as they finish")
    several: dict[str, list[Any]] = {}
    for name, value in flags.items():
        given: dict[str, Any] = {}
        if isinstance(value, Option):
            given = dict(value)
        elif value is False:
            given = {"action": "store_true"}
        elif isinstance(value, type):
            given = {"type": value}
        elif isinstance(value, list | tuple | Mapping):
            several[name] = list(value)
            given = {"nargs": "+", "action": "extend", "type": type(next(iter(value), ""))}
            if not isinstance(value, list):
                given |= {"choices": list(value), "metavar": "NAME", "help": ", ".join(map(str, value))}
            else:
                given["help"] = f"default: {' '.join(map(str, value))}"
        else:
            given = {"type": type(value), "default": value, "help": "default: %(default)s"}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    found = parser.parse_args()
    for name, default in several.items():
        setattr(found, name, getattr(found, name) or default)
    return found


def need_kernels() -> None:
    """Compile the CPU's kernels where they are not there; ends the program with the reason where that fails."""
    from torchwright.hardware.kernels.cpu import build

    if fault := build.load_fault():
        raise SystemExit(fault)


def machine() -> Row:
    """Return hardware, versions and command."""
    import torch
    import transformers

    from torchwright.hardware.devices import get_device

    here = get_device().identify()
    return {
        "cpu": get_device("cpu").identify().name,
        **({} if here.kind == "cpu" else {"card": here.name}),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", *_command()]),
    }


def _command() -> list[str]:
    """Return the words behind `python`, with `-m MODULE` for a module of this package."""
    script = Path(sys.argv[0]).resolve()
    if not script.is_relative_to(ROOT):
        return sys.argv
    return ["-m", ".".join(script.relative_to(ROOT).with_suffix("").parts), *sys.argv[1:]]


class Rows(list[Row]):
    """The rows of a run. Each is printed as a line of a table and written to the JSON file when it is added."""

    def __init__(self, file: str | None = None, columns: Sequence[str] = (), *, note: str = "") -> None:
        super().__init__()
        self.file = file
        self.records: list[Row] = []
        for key, value in machine().items():
            print(f"{key}: {value}")
        print(f"\n{note}\n" if note else "", flush=True)
        head(columns)

    def add(self, row: Row, cells: Sequence[Any] | str = ()) -> None:
        """Keep a row; print its cells as a line of the table, or text as it is."""
        self.append(row)
        if cells:
            print(cells if isinstance(cells, str) else line(cells), flush=True)
        self.write()

    def measured(
        self, workload: str, figures: Mapping[tuple[str, str], Any], conditions: str = "", **facts: str
    ) -> None:
        """Keep ratios for the board: (technique, "over its baseline") → an `Interval` or its `triple`.

        The JSON file has them under `records`; `python -m benchmarks.board.keep FILE` adds them to the board's rows.
        Figures of other `conditions` (sizes, budget) are not compared.
        """
        here = machine()
        self.records.append(
            {
                "benchmark": here["command"].split()[2] if " -m " in here["command"] else here["command"],
                "workload": workload,
                "conditions": conditions,
                "device": here.get("card", here["cpu"]),
                "threads": here["threads"],
                "commit": commit(),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "versions": {name: here[name] for name in ("torch", "transformers", "python")},
                "command": here["command"],
                "figures": [
                    {
                        "technique": technique,
                        "measure": measure,
                        "interval": triple(ratio) if hasattr(ratio, "low") else list(ratio),
                    }
                    for (technique, measure), ratio in figures.items()
                ],
                "facts": facts,
            }
        )
        self.write()

    def write(self) -> None:
        """Write the JSON file again; call it after changing a row."""
        if self.file:
            found = {"machine": machine(), "rows": list(self), "records": self.records}
            Path(self.file).write_text(json.dumps(found, indent=1) + "\n")


def head(columns: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    if columns:
        print(line(columns), "|" + "---|" * len(columns), sep="\n", flush=True)


def line(cells: Iterable[Any]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def times(interval: Any) -> str:
    """Return a ratio with its 95% interval as text; `interval` is an `Interval` or its `triple`."""
    return "{:.2f}x [{:.2f}, {:.2f}]".format(*(triple(interval) if hasattr(interval, "low") else interval))


def triple(interval: Any) -> list[float]:
    """Return value, low and high of an `Interval`, as JSON keeps them."""
    return [interval.value, interval.low, interval.high]


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def in_short(error: BaseException) -> str:
    """Return an error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def last_line(text: str) -> str:
    """Return the last line that is not empty, which is where Python names an error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def torchwright(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process, and return its output. Raises SystemExit if `check` and it failed."""
    check = how.pop("check", True)
    command = [sys.executable, "-m", "torchwright", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, **how)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; none where it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def commit() -> str:
    """Return the commit of the working tree; a tree with changes says so."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
