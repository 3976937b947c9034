"""Sources with what they should be answered: two text files, a line of one for each line of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.seq2seq.rules import GenerationRules
from torchwright.models.decoder.seq2seq.source import SourceTokenizer
from torchwright.workloads.texts import KEPT, Split

LARGEST = 64 * 2**20
"""Bytes of either file."""


@dataclass(frozen=True)
class Pair:
    """A source's token ids, and those of its answer: the start, the text, its end."""

    source: list[int]
    target: list[int]


def reference_of(value: Any, eval_text: Path | None) -> Path | None:
    """Return the file of a workload's option `reference`, or None without one.

    Raises `WorkloadError` for more than one, for one that is not there, and for one without sources.
    """
    names = [value] if isinstance(value, str | Path) else list(value or ())
    if not names:
        return None
    if len(names) > 1 or not isinstance(names[0], str | Path):
        raise WorkloadError(
            f"--reference {' '.join(map(str, names))[:100]}",
            allowed="one text file, a line for each line of --eval-text",
        )
    path = Path(names[0])
    if not path.is_file():
        raise WorkloadError(f"--reference {path}: there is no such file")
    if eval_text is None:
        raise WorkloadError(
            "--reference without its sources", next="add --eval-text FILE, a line for each reference"
        )
    return path.absolute()


def read_pairs(sources: Path, references: Path) -> Split[list[tuple[str, str]]]:
    """The files' lines side by side, without those that are empty in both; the last ones calibrate.

    Raises `WorkloadError` for files of different lengths, for a source without its reference, and for one that is too
    large.
    """
    rows = [_lines(path) for path in (sources, references)]
    if len(rows[0]) != len(rows[1]):
        raise WorkloadError(
            f"{references} does not belong to {sources}",
            found=f"{len(rows[1])} lines for {len(rows[0])}",
            allowed="a line for each line",
        )
    pairs = list(zip(*rows, strict=True))
    for number, (source, reference) in enumerate(pairs, 1):
        if bool(source) != bool(reference):
            empty = references if source else sources
            raise WorkloadError(f"line {number} of {empty} is empty, and that of the other file is not")
    whole = [pair for pair in pairs if pair[0]]
    cut = len(whole) - len(whole) // KEPT
    return Split(whole[:cut], whole[cut:])


def target_of(tokenizer: SourceTokenizer, text: str, rules: GenerationRules, most: int) -> list[int]:
    """Return the decoder's input for an answer: start, the first token if one is forced, the text, an end."""
    special = {*rules.stop, rules.start, *([] if rules.first is None else [rules.first])}
    plain = [token for token in tokenizer.plain(text) if token not in special]
    first = [] if rules.first is None else [rules.first]
    return [rules.start, *first, *plain, *sorted(rules.stop)[:1]][:most]


def padded_targets(targets: Sequence[list[int]], count: int, pad: int) -> list[list[int]]:
    """All of `count` tokens."""
    return [target + [pad] * (count - len(target)) for target in targets]


def _lines(path: Path) -> list[str]:
    size = path.stat().st_size
    if size > LARGEST:
        raise WorkloadError(f"{path} is too large", found=f"{size} bytes", allowed=f"{LARGEST}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is no text in UTF-8", found=str(error)) from error
    return [" ".join(line.split()) for line in text.removesuffix("\n").split("\n")]
