"""The text the bundled language model learns from: Python's documentation and standard library.

Files are split as a whole, by a hash of their name, so the split is the same on every machine. Training text loses
every paragraph that a held-out file also contains, because docstrings and documentation share sentences.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END = "<|begin|>", "<|end|>"
BEGIN_ID, END_ID = 0, 1
"""Special tokens are the first of the vocabulary."""
DEBIAN_PACKAGE = "python3.11-doc"
DEBIAN_DOCS = Path("/usr/share/doc") / DEBIAN_PACKAGE / "html" / "_sources"

SKIPPED_FOLDERS = {
    "site-packages": "not the standard library",
    "test": "tests",
    "tests": "tests",
    "idle_test": "tests",
    "encodings": "tables of code points",
    "pydoc_data": "a copy of the documentation, which would leak held-out text",
    "__pycache__": "not source",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
"""Generated on the machine that built Python."""

SHARED_PARAGRAPH = 80
"""A paragraph of at least this many characters is dropped from training when a held-out file has it too."""


class Role(StrEnum):
    """Use of a file's text."""

    TRAIN = "train"
    VALIDATION = "validation"
    EVAL = "eval"
    CALIBRATION = "calibration"


HELD_OUT_PER_MILLE = {
    "docs": {Role.EVAL: 44, Role.CALIBRATION: 16, Role.VALIDATION: 16},
    "stdlib": {Role.EVAL: 16, Role.CALIBRATION: 6, Role.VALIDATION: 8},
}
"""Share of the files of each source, in thousandths."""

EXCERPT_BYTES = {Role.EVAL: 16_000, Role.CALIBRATION: 10_000, Role.VALIDATION: 16_000}
"""No single file gives more than this to a held-out text, so that each one is a mixture."""

BUDGET_BYTES = {
    "docs": {Role.EVAL: 190_000, Role.CALIBRATION: 45_000, Role.VALIDATION: 60_000},
    "stdlib": {Role.EVAL: 70_000, Role.CALIBRATION: 20_000, Role.VALIDATION: 25_000},
}
"""About how much of each source a held-out text holds."""


@dataclass(frozen=True)
class Source:
    """One file: `name` is relative to its source's root, with forward slashes."""

    kind: str
    name: str
    text: str

    @property
    def draw(self) -> int:
        """A number that depends on the name alone."""
        return int.from_bytes(hashlib.sha256(f"{self.kind}/{self.name}".encode()).digest()[:8], "big")

    @property
    def role(self) -> Role:
        place = self.draw % 1000
        for role, share in HELD_OUT_PER_MILLE[self.kind].items():
            if place < share:
                return role
            place -= share
        return Role.TRAIN


def read_docs(root: Path) -> Iterator[Source]:
    """The reStructuredText sources of the documentation."""
    if not root.is_dir():
        raise SystemExit(
            f"no documentation in {root}; install it with `apt-get install {DEBIAN_PACKAGE}`, "
            "or name its folder with --docs"
        )
    for path in sorted(root.rglob("*.rst.txt")):
        yield Source("docs", path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))


def read_stdlib(root: Path) -> Iterator[Source]:
    """The standard library's Python files, without tests, tables and generated files."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.keys() & set(relative.parts):
            continue
        if any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts):
            continue
        try:
            yield Source("stdlib", relative.as_posix(), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            print(f"left out {relative}: not UTF-8")


def paragraphs(text: str) -> list[str]:
    return text.split("\n\n")


def without_shared(text: str, held_out: set[str]) -> str:
    """`text` without the longer paragraphs that are in `held_out`."""
    return "\n\n".join(part for part in paragraphs(text) if part.strip() not in held_out)


def excerpt(text: str, limit: int) -> str:
    """The first whole paragraphs of `text`, up to about `limit` bytes."""
    kept: list[str] = []
    size = 0
    for part in paragraphs(text):
        size += len(part.encode()) + 2
        if kept and size > limit:
            break
        kept.append(part)
    return "\n\n".join(kept).strip() + "\n"


def held_out_pieces(sources: list[Source], role: Role) -> list[Source]:
    """Excerpts of the files that play `role`, in the order of their hashes, within the byte budget of each kind."""
    left = {kind: budget[role] for kind, budget in BUDGET_BYTES.items()}
    pieces = []
    for source in sorted(sources, key=lambda each: each.draw // 1000):
        if source.role is not role or left[source.kind] <= 0:
            continue
        text = excerpt(source.text, min(EXCERPT_BYTES[role], left[source.kind]))
        if len(text) < 200:
            continue
        left[source.kind] -= len(text.encode())
        pieces.append(Source(source.kind, source.name, text))
    return pieces


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts the begin token before every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BEGIN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, BEGIN_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def debian_version(package: str) -> str:
    """The installed version of a Debian package, or "unknown" on other systems."""
    if shutil.which("dpkg-query") is None:
        return "unknown"
    query = ["dpkg-query", "--show", "--showformat=${Version}", package]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def prepare(folder: Path, docs: Path, vocab_size: int) -> dict[str, object]:
    """Write tokens, held-out texts and the tokenizer into `folder`; return the facts that the model card states.

    Writes `train.npy` and `validation.npy` (uint16 token ids), `eval.txt`, `calibration.txt`, `LICENSE.txt` and
    `tokenizer/`.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = [*read_docs(docs), *read_stdlib(stdlib)]
    held_out = {
        part.strip()
        for source in sources
        if source.role is not Role.TRAIN
        for part in paragraphs(source.text)
        if len(part.strip()) >= SHARED_PARAGRAPH
    }
    train = [
        Source(source.kind, source.name, without_shared(source.text, held_out))
        for source in sources
        if source.role is Role.TRAIN
    ]

    tokenizer = train_tokenizer((source.text for source in train), vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    bpe = tokenizer.backend_tokenizer

    def stream(texts: list[str]) -> np.ndarray:
        encodings = bpe.encode_batch(texts)
        return np.concatenate([np.array([*each.ids, END_ID], dtype=np.uint16) for each in encodings])

    tokens = stream([source.text for source in train])
    np.save(folder / "train.npy", tokens)
    pieces = {role: held_out_pieces(sources, role) for role in Role if role is not Role.TRAIN}
    np.save(folder / "validation.npy", stream([piece.text for piece in pieces[Role.VALIDATION]]))
    for role in (Role.EVAL, Role.CALIBRATION):
        text = "\n".join(piece.text for piece in pieces[role])
        (folder / f"{role}.txt").write_text(text, encoding="utf-8", newline="\n")
    shutil.copyfile(stdlib / "LICENSE.txt", folder / "LICENSE.txt")

    def count(some: Iterable[Source], kind: str) -> dict[str, int]:
        texts = [source.text for source in some if source.kind == kind]
        return {"files": len(texts), "bytes": sum(len(text.encode()) for text in texts)}

    return {
        "python": platform.python_version(),
        "docs_version": debian_version(DEBIAN_PACKAGE),
        "docs_package": DEBIAN_PACKAGE,
        "train_tokens": len(tokens),
        "vocab_size": len(tokenizer),
        "dropped_bytes": sum(len(source.text.encode()) for source in sources if source.role is Role.TRAIN)
        - sum(len(source.text.encode()) for source in train),
        "train": {kind: count(train, kind) for kind in BUDGET_BYTES},
        **{role.value: {kind: count(some, kind) for kind in BUDGET_BYTES} for role, some in pieces.items()},
    }
