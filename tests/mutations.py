"""Good artifacts with something wrong in them: what a forger, or a bad disk, may make of every file.

All checksums are made right again, so that what is wrong is reached.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_artifacts import seal
from torchwright.optimization.artifact import folder as artifact

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308),
    *("", "x", "\x00", "\ud800", "ä\n", "'\"{}", "a" * 100_000, "../../../../etc/passwd", "/etc/passwd"),
    *(
        "__import__('os').system('touch owned')",
        "9**9**9**9",
        "torch.os.system",
        "torch.ops.aten.from_file.default",
    ),
    *(
        "[1, {}]",
        "L['x'].size()[0] == 1",
        "Symbol('s0', positive=True, integer=True)",
        "eager",
        "native",
        "aot",
    ),
    *([], {}, [[]], [None], {"": None}, {"as_int": 1}, {"as_string": "x"}, {"tensor": "t0"}, {"list": []}),
    *([0] * 10_000, {"expr_str": "s0", "hint": None}, {"type": "builtins.dict", "context": "[]"}),
)


def mutate(folder: Path, chance: random.Random) -> str:
    """Change one thing in an artifact; returns what, in words."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    jsons = [name for name in files if name.endswith(".json")]
    way = chance.random()
    if way < 0.7:
        return _json(folder, chance.choice(jsons), chance)
    if way < 0.95:
        return _bytes(folder, chance.choice(files), chance)
    return _file(folder, chance.choice(files), chance)


def _json(folder: Path, name: str, chance: random.Random) -> str:
    path = folder / name
    data = json.loads(path.read_text())
    places = list(_places(data))
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        holder, key = chance.choice(places)
        done.append(_change(holder, key, chance))
    path.write_text(json.dumps(data))
    if name != artifact.MANIFEST:
        seal(folder)
    return f"{name}: {'; '.join(done)}"


def _places(data: Any) -> Any:
    """Every (list or object, key) of a JSON value; of large ones, all by their depth and a part of the leaves."""
    left = [data]
    while left:
        holder = left.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                left.append(holder[key])


def _change(holder: Any, key: Any, chance: random.Random) -> str:
    if (isinstance(holder, list) and key >= len(holder)) or (isinstance(holder, dict) and key not in holder):
        return "nothing more"  # another change was faster
    match chance.randrange(6):
        case 0:
            del holder[key]
            return f"without {str(key)[:40]}"
        case 1 if isinstance(holder, dict):
            holder[str(chance.choice(("extra", "as_int", "", "__class__", "a b", "as_operator")))] = holder[
                key
            ]
            return f"{key} twice"
        case 1:
            holder.insert(key, holder[key])
            return f"{key} twice"
        case 2:
            other = chance.choice(range(len(holder)) if isinstance(holder, list) else list(holder))
            holder[key], holder[other] = holder[other], holder[key]
            return f"{key} for {other}"
        case 3 if isinstance(holder[key], int | float):
            holder[key] = chance.choice(
                (-holder[key], holder[key] + 1, holder[key] * 2**20, float(holder[key]))
            )
            return f"{key} = {holder[key]}"
        case _:
            holder[key] = chance.choice(ODD)
            return f"{key} = {str(holder[key])[:40]!r}"


def _bytes(folder: Path, name: str, chance: random.Random) -> str:
    path = folder / name
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data)) if data else 0
    ways: tuple[Callable[[], Any], ...] = (
        lambda: data.__setitem__(slice(place, place + 1), bytes([data[place] ^ (1 << chance.randrange(8))])),
        lambda: data.__delitem__(slice(place, None)),
        lambda: data.clear(),
        lambda: data.extend(data),
        lambda: data.__setitem__(slice(place, place), chance.randbytes(20)),
        lambda: data.__setitem__(slice(0, 8), chance.randbytes(8)),
        lambda: data.__setitem__(slice(0, 0), b"[" * 100_000),
    )
    way = chance.randrange(len(ways))
    if data:
        ways[way]()
    path.write_bytes(data)
    if name not in (artifact.MANIFEST, artifact.SIGNATURE):
        seal(folder)
    return f"{name}: bytes {way} at {place}"


def _file(folder: Path, name: str, chance: random.Random) -> str:
    path = folder / name
    match chance.randrange(4):
        case 0:
            path.unlink()
            what = "gone"
        case 1:
            (folder / "selftest.json").write_bytes(path.read_bytes())
            what = "as selftest.json"
        case 2:
            (folder / chance.choice(("extra", "native", "model.json", "ü"))).write_bytes(path.read_bytes())
            what = "under another name"
        case _:
            path.unlink()
            path.symlink_to("/etc/passwd")
            what = "a link"
    if (folder / artifact.MANIFEST).is_file() and not (folder / artifact.MANIFEST).is_symlink():
        seal(folder)
    return f"{name}: {what}"
