"""Copies of good files with one or several things wrong in them: JSON, TOML, and bytes of any format."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import _change, _places

NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1e-320", "true", "null", '"8"', "[8]", "{}"),
    *("9" * 30, "9" * 5_000, str(10**18), str(2**31), "[" * 500 + "]" * 500, "[" * 100_000),
)
"""Texts in the place of a number."""
TEMPLATES = (
    *("{{ 1 / 0 }}", "{% for x in", "{{ 'a' * 1000000000 }}", "{{ messages[9].content }}", "{{ 5 ** 5000 }}"),
    *("{{ ''.__class__ }}", "{{ undefined_name.x.y }}", "{% raise %}", "\x00", "\ud800", ""),
)


def break_one(folder: Path, chance: random.Random) -> str:
    """Change one file of a folder; return the change in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    weights = [1 if path.suffix in (".json", ".toml", ".jinja", ".jsonl") else 0.25 for path in files]
    [path] = chance.choices(files, weights)
    how = chance.random()
    if how < 0.05:
        return f"{path.name}: {_another_kind(path, chance)}"
    if path.suffix == ".jinja" and how < 0.6:
        path.write_text(chance.choice(TEMPLATES), encoding="utf-8", errors="surrogatepass")
        return f"{path.name}: {path.read_bytes()[:40]!r}"
    if path.suffix in (".json", ".toml", ".jsonl") and how < 0.35:
        return f"{path.name}: {_number(path, chance)}"
    if path.suffix == ".json" and how < 0.8:
        return f"{path.name}: {_value(path, chance)}"
    return f"{path.name}: {_bytes(path, chance)}"


def break_checkpoint(folder: Path, chance: random.Random) -> str:
    """Change one file of a checkpoint; make the checksums right in two of three cases, as a forger does."""
    what = break_one(folder, chance)
    if chance.random() < 0.67:
        for path in folder.rglob("checkpoint.json"):
            _seal_checkpoint(path)
    return what


def _seal_checkpoint(path: Path) -> None:
    if not path.is_file() or path.stat().st_size > 100_000:
        return
    try:
        told = json.loads(path.read_bytes())
        for name in told["files"]:
            if not (path.parent / name).is_file():  # a device has no end
                return
            told["files"][name] = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return
    path.write_text(json.dumps(told))


def _number(path: Path, chance: random.Random) -> str:
    """Replace a number of a text file by another text."""
    text = path.read_text()
    places = list(re.finditer(r"(?<![\w.\"])-?\d+(\.\d+)?(e-?\d+)?(?![\w.\"])", text))
    if not places:
        return "nothing"
    place, new = chance.choice(places[:400]), chance.choice(NUMBERS)
    path.write_text(text[: place.start()] + new + text[place.end() :])
    return f"{text[max(0, place.start() - 30) : place.start()]!r} {new[:30]}"


def _value(path: Path, chance: random.Random) -> str:
    data = json.loads(path.read_text())
    places = list(_places(data))[:600]
    done = []
    for _ in range(chance.choice((1, 1, 2)) if places else 0):
        holder, key = chance.choice(places)
        done.append(_change(holder, key, chance))
    path.write_text(json.dumps(data))
    return "; ".join(done)


def _bytes(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    # Headers are in front: a change anywhere in the weights is only another weight.
    place = chance.randrange(min(len(data), 4000)) if data else 0
    ways: tuple[Callable[[], Any], ...] = (
        lambda: data.__setitem__(slice(place, place + 1), bytes([data[place] ^ (1 << chance.randrange(8))])),
        lambda: data.__delitem__(slice(place, None)),
        data.clear,
        lambda: data.__setitem__(slice(place, place), chance.randbytes(20)),
        lambda: data.__setitem__(slice(0, 8), chance.randbytes(8)),
        lambda: data.__setitem__(slice(place, place + 8), b"\xff" * 8),
        lambda: data.__setitem__(slice(0, 0), b"[" * 100_000),
    )
    way = chance.randrange(len(ways))
    if data:
        ways[way]()
    path.write_bytes(data)
    return f"bytes {way} at {place}"


def _another_kind(path: Path, chance: random.Random) -> str:
    """Put something else than a regular file in the place of one."""
    path.unlink()
    match chance.randrange(5):
        case 0:
            os.mkfifo(path)
            return "a FIFO"
        case 1:
            path.symlink_to("/dev/zero")
            return "a device"
        case 2:
            path.mkdir()
            return "a folder"
        case 3:
            path.symlink_to(path.name)
            return "a circle of links"
        case _:
            return "gone"
