"""Strangers' pictures and sounds: each is read, or the error says in words what is wrong."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import media

from torchwright.core.errors import TorchwrightError
from torchwright.models.vision.picture import read_picture

pytest.importorskip("soundfile")
from torchwright.models.speech.files import decoded

SECONDS = 5.0
"""Processor time after which a file counts as hanging."""
MEMORY_KB = 600_000
"""The most by which a file raises the peak: a picture of 80 million pixels as RGB takes half of it."""


def picture(path: Path) -> None:
    read_picture(path)


def sound(path: Path) -> None:
    with decoded(str(path)) as file:
        for _ in file.blocks:
            pass


def told(call: Callable[[Path], None], path: Path, what: str) -> bool:
    """Read a file; return whether it was refused."""
    start = time.process_time()
    try:
        call(path)
        refused = False
    except TorchwrightError:
        refused = True
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]!a}") from error
    assert time.process_time() - start < SECONDS, what
    return refused


@pytest.mark.parametrize("name", media.picture_bombs())
def test_a_picture_bomb_is_refused(tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "a.png").write_bytes(media.picture_bombs()[name]())
    refused = told(picture, tmp_path / "a.png", name)
    assert refused or name == "PNG whose pixels swell"  # what is behind the last row is not looked at
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB


@pytest.mark.parametrize("name", media.sound_bombs())
def test_a_sound_bomb_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "a").write_bytes(media.sound_bombs()[name])
    told(sound, tmp_path / "a", name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB


def fuzz(count: int, seed: int, folder: Path, record: Callable[[str, object], None]) -> None:
    """Read mutants of pictures and sounds; record how many were read and refused."""
    chance, counts = random.Random(seed), Counter[tuple[str, str]]()
    good = [(picture, *item) for item in media.pictures().items()]
    good += [(sound, *item) for item in media.sounds().items()]
    path = folder / "mutant"
    for index in range(count):
        call, form, data = chance.choice(good)
        path.write_bytes(media.break_bytes(data, chance))
        refused = told(call, path, f"mutant {index} of seed {seed}, {form}")
        counts[form, "refused" if refused else "read"] += 1
    lines = [f"{form}: {how} {number}" for (form, how), number in sorted(counts.items())]
    record("counts", f"{count} media of seed {seed}: " + ", ".join(lines))


def test_a_few_broken_media(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    fuzz(200, 0, tmp_path, record_property)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 5))
def test_thousands_of_broken_media(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    fuzz(2500, seed, tmp_path, record_property)
