"""The data of a run: sources of training windows, held-out windows, and reports on their rows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from torchwright.train.data.documents import FileReport, form_of, read_report
from torchwright.train.data.hold_out import divide
from torchwright.train.data.layouts import SAID, Form
from torchwright.train.data.mixture import Mixture, Walk
from torchwright.train.data.packing import Packed, PackedHeldOut
from torchwright.train.data.shards import DataError, Shards, verify_shards
from torchwright.train.data.streams import HeldOut, Windows
from torchwright.train.data.text import expand, kind_of, token_shards
from torchwright.train.model.foreign import ModelConfig, end_token
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Run
from torchwright.train.run.runtime.processes import on_first

TOKENS = "tokens"
"""The part of a run folder that holds token shards of its text and rows."""
PAIRED = ("preference", "embedding")
"""Forms whose documents belong together in twos."""
ONE = "train"
"""The name of the only source."""
VISIBLE_S = 120.0
"""Seconds until processes on other machines must see a file: NFS caches the list of a folder for up to a minute."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The run's token shards, opened."""

    train: dict[str, Shards]
    """By the sources' names."""
    validation: Shards | None
    packed: bool
    """True if windows hold whole documents."""
    end: int | None
    """The token that ends documents in shards that do not say where they begin."""
    reports: dict[str, FileReport]
    """File of rows → the report on them."""
    reference: dict[str, np.ndarray] = field(default_factory=dict)
    """Source → (pairs, 2): log-probabilities of preference pairs by the model that the run starts from."""
    held_out_reference: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all training shards."""
        return sum(shards.tokens for shards in self.train.values())

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the number of files and tokens of each source."""
        return {
            name: {"files": len(shards.paths), "tokens": shards.tokens} for name, shards in self.train.items()
        }

    def digest(self) -> str:
        """Return a digest of the training data."""
        each = {name: shards.digest() for name, shards in self.train.items()}
        if list(each) == [ONE]:
            return each[ONE]
        return hashlib.sha256(repr(sorted(each.items())).encode()).hexdigest()[:16]


def open_data(run: Run, config: ModelConfig, folder: Path, source: Path, out: Path) -> Corpus:
    """Tokenize text and rows into RUN/tokens on the first process, verify checksums, map everything on all.

    Raises `DataError` for data that cannot be read or is less than one window, `RunError` for a begin token that the
    model does not have.
    """
    made, sizes = on_first(partial(_made_and_sizes, run, config, folder, source, out / TOKENS))
    wait_until_visible(sizes)
    corpus = open_shards(run, config, made)
    window = max(run.context, run.schedule.decay_context or 0)
    for shards in () if corpus.packed else corpus.train.values():
        if shards.tokens < window:
            raise DataError(
                f"the training data is less than one window of {window} tokens",
                found=f"{shards.tokens:,} tokens in {len(shards.paths)} files",
                next="use a shorter window, or give more data",
            )
    return corpus


def wait_until_visible(
    sizes: Mapping[Path, int], seconds: float = VISIBLE_S, *, rank: int | None = None
) -> None:
    """Wait until this process sees every file in the size that its writer saw.

    Raises `DataError` after `seconds`, which names the process by its `rank`, by default the one in its group.
    """
    ends = time.monotonic() + seconds
    while missing := [path for path, size in sizes.items() if not _has_size(path, size)]:
        if time.monotonic() > ends:
            here = dist.get_rank() if rank is None else rank
            raise DataError(
                f"process 0 wrote the token shard {missing[0]}, and process {here} cannot see it",
                found=f"{len(missing)} of {len(sizes)} files are missing or shorter after {seconds:g} s",
                next="put the run folder and the data on a file system that all machines share",
            )
        time.sleep(0.1)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class MadeShards:
    """The files of a run's shards."""

    train: dict[str, list[Path]]
    validation: list[Path]
    reports: dict[str, FileReport]


def _made_and_sizes(
    run: Run, config: ModelConfig, folder: Path, source: Path, cache: Path
) -> tuple[MadeShards, dict[Path, int]]:
    """Make the shards; return them with the sizes of all their files."""
    made = make_shards(run, config, folder, source, cache)
    paths = [path for paths in made.train.values() for path in paths] + made.validation
    return made, {path: path.stat().st_size for path in paths}


def make_shards(run: Run, config: ModelConfig, folder: Path, source: Path, cache: Path) -> MadeShards:
    """Return the run's files as shards, those of text and rows made in `cache`; the run's paths start from `folder`.

    `source` has the tokenizer. Raises `DataError` and `RunError`.
    """
    if run.data.begin_every and config.bos is None:
        raise RunError(
            "data.begin_every leads windows with the begin token, and the model has none",
            next="set bos_token_id in the model's config.json, or begin_every = 0",
        )
    sources = {ONE: run.data.train}
    if run.data.mixture is not None:
        sources = {name: mixed.files for name, mixed in run.data.mixture.items()}
    reports: dict[str, FileReport] = {}

    def shards_of(patterns: Sequence[str]) -> list[Path]:
        files = expand(patterns, folder)
        paths = token_shards(files, run.data.text, source, end_token(config), cache, run.rows_as)
        both = list(zip(files, paths, strict=True))
        reports.update(
            (str(file), read_report(shard)) for file, shard in both if kind_of(file, run.data.text) == "rows"
        )
        if run.data.verify:
            verify_shards(paths)
        for file, shard in both:
            check_form(run, file, form_of(shard))
        return paths

    train = {name: shards_of(patterns) for name, patterns in sources.items()}
    return MadeShards(train=train, validation=shards_of(run.data.validation), reports=reports)


def open_shards(run: Run, config: ModelConfig, made: MadeShards) -> Corpus:
    """Map the shards, and hold out what the run says."""
    opened = {name: Shards(paths, config.vocabulary, run.data.ids) for name, paths in made.train.items()}
    held_out = Shards(made.validation, config.vocabulary, run.data.ids) if made.validation else None
    packed = _packed(run, [*opened.values(), *([held_out] if held_out else [])])
    if run.data.hold_out is not None:
        opened, held_out = _divided(opened, run.data.hold_out, pairs=run.needs in PAIRED, whole=packed)
    return Corpus(
        train=opened,
        validation=held_out,
        packed=packed,
        end=end_token(config),
        reports=made.reports,
    )


def _divided(
    opened: dict[str, Shards], share: float, *, pairs: bool, whole: bool
) -> tuple[dict[str, Shards], Shards | None]:
    """Return what is trained on of each source, and what is held out of all."""
    parts = {name: divide(shards, share, pairs=pairs, whole=whole) for name, shards in opened.items()}
    held = [part for _, part in parts.values() if part is not None]
    return {name: train for name, (train, _) in parts.items()}, Shards.joined(held) if held else None


def check_form(run: Run, file: Path, form: Form | None) -> None:
    """Raise `DataError` for a file that holds something else than what the run minimizes a loss of."""
    if run.needs is None and form == "preference":
        raise DataError(
            f"{file} holds pairs of answers, and the run would learn the rejected ones as well",
            next="add [preference] to the run file (with --model: --dpo), or leave the file out",
        )
    if run.needs is None and form in SAID:
        raise DataError(
            f"{file} holds texts whose last label is no token",
            found=form,
            next=f'add [head] with kind = "{form}" to the run file, or leave the file out',
        )
    if run.needs is not None and form != run.needs:
        raise DataError(
            f"{file} holds no rows of {run.needs}, which the run learns from",
            found=form or "text or token ids",
            allowed="rows, or what `torchwright data pack` makes of them with this run file",
        )


def _packed(run: Run, opened: Sequence[Shards]) -> bool:
    """Check whether windows hold whole documents: as the run says, else if some tokens are not trained on."""
    if run.needs is not None:
        return True
    partly = any(shards.answers(shard) for shards in opened for shard in range(len(shards.paths)))
    if partly and run.data.packing == "stream":
        raise RunError(
            "a part of the data's tokens is not trained on, and data.packing is 'stream'",
            found="conversations or completions, which a stream would cut off from what they answer",
            next="set data.packing = 'documents', or leave it out",
        )
    if partly and run.data.begin_every:
        raise RunError(
            "data.begin_every leads windows of a stream, and a part of the data's tokens is not trained on",
            next="leave begin_every out: a chat template writes the begin token itself",
        )
    return partly or run.data.packing == "documents"


def walk_of(run: Run, corpus: Corpus, context: int, begin: int | None, phase: int) -> Walk:
    """Return the walk of a phase of the run over its training data."""
    walks: dict[str, Walk] = {
        name: Packed(
            shards,
            context,
            _seed(run, phase),
            end=corpus.end,
            pairs=run.needs in PAIRED,
            reference_P2=corpus.reference.get(name),
        )
        if corpus.packed
        else windows_of(run, shards, context, begin, phase)
        for name, shards in corpus.train.items()
    }
    if run.data.mixture is None:
        return walks[ONE]
    return Mixture(walks, {name: mixed.weight for name, mixed in run.data.mixture.items()})


def epochs(walk: Walk, windows: int) -> float | None:
    """Return how often the data are read in so many windows; None for a mixture, whose sources differ."""
    if isinstance(walk, Packed):
        return windows / walk.count
    if isinstance(walk, Windows):
        return walk.start(windows) / walk.stream.shards.tokens
    return None


def check_context(run: Run, config: ModelConfig) -> None:
    """Raise `RunError` for windows that are longer than the positions that the model knows."""
    context = max(run.context, run.schedule.decay_context or 0)
    if config.context is not None and context > config.context:
        raise RunError(
            f"windows of {context:,} tokens are longer than the model's positions reach",
            found=f"max_position_embeddings = {config.context:,}",
            next="use a shorter context, or set max_position_embeddings (and rope_scaling) in the model's config.json",
        )


def left_out(walk: Walk, *, strict: bool) -> dict[str, Packed]:
    """Sources whose windows cut documents or leave some out. Raises `DataError` for one left out where it is strict."""
    walks = walk.walks if isinstance(walk, Mixture) else {ONE: walk}
    packed = {name: one for name, one in walks.items() if isinstance(one, Packed)}
    for one in packed.values():
        if strict and one.pieces.dropped:
            named = ", ".join(path.name for path in one.shards.paths[:5])
            raise DataError(
                f"nothing is trained on of {one.pieces.dropped:,} documents of {named}",
                found=f"their labels lie behind a window of {one.context:,} tokens",
                next="use a larger context, or leave out strict: they are then counted, and left out",
            )
    return {name: one for name, one in packed.items() if one.pieces.cut or one.pieces.dropped}


def held_out(run: Run, corpus: Corpus, begin: int | None) -> HeldOut | PackedHeldOut | None:
    """Return the windows that every evaluation reads; None without held-out data."""
    if corpus.validation is None:
        return None
    if not corpus.packed:
        # A held-out window begins as a text does, if training marks where texts begin.
        lead = begin if run.data.begin_every else None
        return HeldOut(corpus.validation, run.context, run.evaluation.tokens, begin=lead)
    return PackedHeldOut(
        corpus.validation,
        run.context,
        run.evaluation.tokens,
        end=corpus.end,
        pairs=run.needs in PAIRED,
        reference_P2=corpus.held_out_reference,
    )


def windows_of(run: Run, shards: Shards, context: int, begin: int | None, phase: int) -> Windows:
    """Return the walk of a phase of the run over the stream of one source."""
    return Windows(shards, context, _seed(run, phase), begin=begin, begin_every=run.data.begin_every)


def _seed(run: Run, phase: int) -> int:
    return run.data.seed + 1000 * phase
