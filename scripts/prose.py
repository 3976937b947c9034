"""Count the constructions that CONTRIBUTING.md replaces, per file, and refuse a file that got worse.

    python scripts/prose.py             print the counts per pattern and the files with the most
    python scripts/prose.py FILE...     print every match of these files with its line
    python scripts/prose.py --check     exit code 1 if a file has more matches than scripts/prose_counts.txt allows
    python scripts/prose.py --record    write the present counts to scripts/prose_counts.txt

Docstrings and comments of Python files are read, and the text of Markdown files outside code. A file that is not
recorded may have no match. Generated pages and the log are not counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COUNTS = ROOT / "scripts" / "prose_counts.txt"
FOLDERS = ("src", "scripts", "benchmarks", "examples", "packages", "docs")
UNCOUNTED = re.compile(r"docs/(reference/)?(cli|techniques)\.md|docs/log\b.*|(src/.*/)?bundled/.*")
"""Generated pages, and records of the past, which are not rewritten."""

LONGEST_SENTENCE = 25
OPENING = re.compile(r"\s*(?:What|Whether|Of|How|Where|As)\b")

PHRASES = {
    "third-party": r"\bof others\b|\bothers' \w+",
    "model zoo benchmark": r"\bthe hundred\b",
    "is not a": r"\b(?:is|are|was|were) no (?!longer|more|less|fewer|one\b)[a-z]+",
    "is not one": r"\b(?:is|are|was|were) none\b",
    "of it": r"\bof it\b",
    "accuracy loss": r"\bwhat it loses\b",
    "without success": r"\bin vain\b",
    "reported": r"\btold\b",
    "rebuilt": r"\bmade (?:again|anew|afresh)\b",
    "available": r"\bat hand\b",
    "next to, concurrently with": r"\bbeside\b",
    "descheduled": r"\bput aside\b",
    "bitwise": r"\bto the bit\b",
    "step result": r"\brungs?\b",
    "dispatcher, plugin point": r"\bdoors?\b",
    "fallback": r"\bslower ways?\b",
    "hand-tuned baseline": r"\bbest by hand\b",
    "untrusted": r"\bstrangers?\b",
    "batch size": r"\b(?:number of|any|other) rows\b",
    "dynamic shapes": r"\bsizes? (?:that )?(?:is|are) free\b|\brows (?:is|are) free\b",
    "ablation": r"\bdrop-one\b",
    "break-even": r"\bpays? (?:itself )?back\b",
    "per-channel, per-token": r"\bone scale an? (?:output feature|row)\b",
    "the noun itself": r"\bits like\b|\bthe same while\b",
    "transcript": r"\bwords of a sound\b",
}
"""The words to write instead → what it replaces."""

_PHRASE = re.compile("|".join(f"(?P<p{i}>{pattern})" for i, pattern in enumerate(PHRASES.values())))
_NAMES = list(PHRASES)
_CODE = re.compile(
    r"^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]*`|<!--.*?-->|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE
)
_SENTENCE_END = re.compile(r"[.!?:;](?=\s)|\n\s*\n|\n(?=\s*(?:[-*#|>]|\d+\.)\s)|\|")
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*',
    re.DOTALL,
)
_WORD = re.compile(r"\b[A-Za-z][\w'’-]*")


class Match(NamedTuple):
    """One construction that CONTRIBUTING.md replaces."""

    line: int
    pattern: str
    text: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="exit code 1 when a file got worse")
    choice.add_argument("--record", action="store_true", help="write the present counts")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="print the matches of these files"
    )
    given = parser.parse_args(arguments)
    if given.files:
        for file in given.files:
            for match in matches(file):
                print(f"{file}:{match.line}: {match.pattern}: {match.text}")
        return 0
    found = {path.relative_to(ROOT).as_posix(): matches(path) for path in files(ROOT)}
    if given.record:
        COUNTS.write_text(written({name: len(each) for name, each in found.items()}))
    if given.check:
        faults = worse({name: len(each) for name, each in found.items()}, read(COUNTS.read_text()))
        print("\n".join(faults) if faults else f"prose: no file of {len(found)} got worse")
        return 1 if faults else 0
    _print_summary(found)
    return 0


def files(root: Path) -> Iterator[Path]:
    """Yield the Python and Markdown files of the repository that are counted."""
    found = [*root.glob("*.md")]
    for folder in FOLDERS:
        found += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")]
    for path in sorted(found):
        if path.is_file() and not UNCOUNTED.fullmatch(path.relative_to(root).as_posix()):
            yield path


def matches(path: Path) -> list[Match]:
    """Return every match in the docstrings and comments of a Python file, or in the text of a Markdown file."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return sorted(_in_text(_CODE.sub(_blank, text), 1))
    found: list[Match] = []
    for line, docstring in _docstrings(text):
        if OPENING.match(docstring):
            found.append(Match(line, "docstring opening", docstring.strip().partition("\n")[0]))
        found += _in_text(_CODE.sub(_blank, docstring), line)
    for line, comment in _comments(text):
        found += _in_text(_CODE.sub(_blank, comment), line)
    return sorted(found)


def worse(counts: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """Return a line for each file with more matches than are recorded for it."""
    return [
        f"{name}: {count} constructions that CONTRIBUTING.md replaces, {recorded.get(name, 0)} are recorded "
        f"(python scripts/prose.py {name})"
        for name, count in counts.items()
        if count > recorded.get(name, 0)
    ]


def read(text: str) -> dict[str, int]:
    """Return file → recorded count."""
    rows = (line.split(maxsplit=1) for line in text.splitlines())
    return {name: int(count) for count, name in rows}


def written(counts: dict[str, int]) -> str:
    """Return the text of the record: a line for each file that has a match."""
    return "".join(f"{count:4d} {name}\n" for name, count in sorted(counts.items()) if count)


def _print_summary(found: dict[str, list[Match]]) -> None:
    patterns = Counter(match.pattern for each in found.values() for match in each)
    for pattern, count in patterns.most_common():
        print(f"{count:6,}  {pattern}")
    print(f"{patterns.total():6,}  in {len(found)} files; the most:")
    for name, each in sorted(found.items(), key=lambda pair: -len(pair[1]))[:10]:
        print(f"{len(each):6,}  {name}")


def _in_text(text: str, line: int) -> Iterator[Match]:
    """Yield the phrases and the long sentences of a text that begins on `line`."""
    for match in _PHRASE.finditer(text.lower()):
        pattern = _NAMES[int((match.lastgroup or "p0")[1:])]
        yield Match(line + text.count("\n", 0, match.start()), pattern, match[0])
    if len(text.split()) <= LONGEST_SENTENCE:
        return
    start = 0
    for end in [match.end() for match in _SENTENCE_END.finditer(text)] + [len(text)]:
        sentence = text[start:end]
        count = len(_WORD.findall(sentence))
        if count > LONGEST_SENTENCE:
            at = start + len(sentence) - len(sentence.lstrip())
            opening = " ".join(sentence.split()[:6])
            yield Match(line + text.count("\n", 0, at), "long sentence", f"{count} words: {opening} …")
        start = end


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring, those below attributes among them."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.replace("\n" + " " * value.col_offset, "\n")
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, ())
            waiting += inner if isinstance(inner, list) else ()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment, the lines of one block joined."""
    block: list[str] = []
    first = last = 0
    for match in _STRING_OR_COMMENT.finditer(source):
        if not match[0].startswith("#"):
            continue
        line = source.count("\n", 0, match.start()) + 1
        alone = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if block and not (alone and line == last + 1):
            yield first, "\n".join(block)
            block = []
        first, last = (first if block else line), line
        block.append(match[0].lstrip("# "))
    if block:
        yield first, "\n".join(block)


def _blank(match: re.Match[str]) -> str:
    """Replace code in a line by one word, and a block of code by empty lines, which end a sentence."""
    inline = match[0].startswith("`") and not match[0].startswith("```")
    return " x " if inline else "\n" * match[0].count("\n")


if __name__ == "__main__":
    sys.exit(main())
