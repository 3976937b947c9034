"""A wheel with compiled kernels next to one without: sizes, and seconds from `pip install` to the first token.

    python -m benchmarks.llm.install [--rounds 3] [--json FILE]         with the extra `wheel` installed

Both wheels are made from this checkout; they take turns. Each round installs a wheel in a new virtual environment that
sees the packages of this one: dependencies are not installed again. The bundled model then generates one token with an
empty cache folder, and once more. `no compiler` is the same on a machine without g++. The last
column is the reason why compiled kernels were not loaded, if there is one: such a run took the slow reference.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.turns import seconds

ASKED = "from torchwright.hardware.kernels.cpu import build; print(build.load_fault() or 'compiled')"
COLUMNS = {
    "wheel_mb": "wheel, MB",
    "installed_mb": "installed, MB",
    "install_s": "pip install, s",
    "first_s": "first token, s",
    "again_s": "again, s",
    "kernels": "kernels",
}


@dataclass(frozen=True)
class Case:
    name: str
    wheel: Path
    compiler: bool


def main() -> None:
    options = run.options(__doc__, rounds=3)
    with tempfile.TemporaryDirectory() as scratch:
        plain, prebuilt = make_wheels(Path(scratch))
        cases = [
            Case("with kernels", prebuilt, True),
            Case("sources alone", plain, True),
            Case("with kernels, no compiler", prebuilt, False),
            Case("sources alone, no compiler", plain, False),
        ]
        rows = run.Rows(
            options.json, ["wheel", *COLUMNS.values()], note="Medians; in brackets least and most."
        )
        found: dict[str, list[run.Row]] = {case.name: [] for case in cases}
        for number in range(options.rounds):
            for case in cases:
                run.say(f"round {number + 1} of {options.rounds}: {case.name}")
                found[case.name].append(measure(case, Path(scratch) / f"{number} {case.name}"))
        for name, rounds in found.items():
            rows.add({"wheel": name, "rounds": rounds}, [name, *(_cell(rounds, key) for key in COLUMNS)])


def make_wheels(scratch: Path) -> tuple[Path, Path]:
    """Make a wheel of the sources alone, and one with kernels."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", scratch / "plain", run.ROOT], check=True)
    script = run.ROOT / "scripts" / "wheel.py"
    subprocess.run([sys.executable, script, "--out", scratch / "prebuilt"], check=True, stdout=sys.stderr)
    (plain,), (prebuilt,) = ((scratch / kind).glob("*.whl") for kind in ("plain", "prebuilt"))
    return plain, prebuilt


def measure(case: Case, folder: Path) -> run.Row:
    """Install one wheel and generate twice."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").iterdir()) / "site-packages"
    (site / "others.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")), encoding="utf-8"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "TORCHWRIGHT_CACHE": str(folder / "cache"),
        **({} if case.compiler else {"CXX": "no-such-compiler"}),
    }

    def child(*words: object) -> str:
        command = [str(python), *map(str, words)]
        return subprocess.run(
            command, env=environment, cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    token = ("-m", "torchwright", "generate", "--prompt", "The", "--max-new-tokens", 1)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", case.wheel)
    row = {"install_s": seconds(lambda: child(*install))}
    row |= {"first_s": seconds(lambda: child(*token)), "again_s": seconds(lambda: child(*token))}
    files = [path for path in (site / "torchwright").rglob("*") if path.is_file()]
    return {
        **row,
        "wheel_mb": case.wheel.stat().st_size / 1e6,
        "installed_mb": sum(path.stat().st_size for path in files) / 1e6,
        "kernels": child("-c", ASKED).splitlines()[-1],
    }


def _cell(rounds: list[run.Row], key: str) -> str:
    values = [row[key] for row in rounds]
    if isinstance(values[0], str):
        return "; ".join(dict.fromkeys(values))[:60]
    text = f"{statistics.median(values):.1f}"
    return text if max(values) - min(values) < 0.05 else f"{text} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
