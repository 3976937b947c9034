"""One step's computation: the planned tokens through the model, and the tokens that follow from their logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torchwright.core.errors import ModelError
from torchwright.hardware.devices.transfer import begin_fetch, send
from torchwright.models.decoder.batch import Batch, with_adapters
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.scores import Logits, tokens_of
from torchwright.models.decoder.shown import with_pictures
from torchwright.serve.engine import ahead
from torchwright.serve.engine.draft import Drafter
from torchwright.serve.engine.pages import Pages
from torchwright.serve.engine.request import Sequence
from torchwright.serve.engine.sampling import logprob
from torchwright.serve.engine.scheduler import StepPlan
from torchwright.serve.grammar.masks import Grammars, Masks
from torchwright.serve.wire.messages import Finish, TokenLogprob

LOGIT_ROWS = 128
"""Rows of logits at once: with 128 thousand tokens 64 MB."""


@dataclass(kw_only=True)
class StepResult:
    """A step's result for one sequence that has caught up; its tokens are the sequence's already."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    joins: bool = False
    """True if it has shared another sequence's prompt until now, and runs by itself from here on."""
    proposed: int = 0
    finish: Finish | None = None
    message: str = ""

    def fail(self, message: str, finish: Finish = "error") -> StepResult:
        """End the sequence with what went wrong."""
        self.finish, self.message = finish, message
        return self


@dataclass(frozen=True, kw_only=True)
class StepPiece:
    """One sequence's tokens in a step, and the row of the first."""

    sequence: Sequence
    ids: list[int]
    proposals: list[int]
    """The last of the ids."""
    row: int
    start: int
    """The place of the first token in its sequence."""
    answers: bool
    """Check whether nothing is missing after this step."""

    @property
    def rows(self) -> range:
        """Rows whose logits choose tokens: the last known one's, and the proposals'."""
        end = self.row + len(self.ids)
        return range(end - 1 - len(self.proposals), end)


class Runner:
    """A model with its cache: computes plans."""

    def __init__(
        self,
        decoder: PagedModel,
        cache: PagedCache,
        pages: Pages,
        grammars: Grammars,
        drafter: Drafter | None = None,
    ) -> None:
        self.decoder, self._cache, self._pages, self._grammars = decoder, cache, pages, grammars
        self._drafter = drafter
        self._runs_ahead = drafter is None and ahead.runs_ahead(cache, decoder)
        self._ahead: ahead.StepAhead | None = None

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Compute a plan's tokens and choose those that follow; sequences that share a prompt part here."""
        step, self._ahead = self._ahead, None
        early = step.planned(plan.tokens, self.decoder) if step else []
        rest = {sequence: count for sequence, count in plan.tokens.items() if sequence not in early}
        self._pages.reserve(plan.new_pages)
        answers = list[StepResult]()
        if step and early:
            pieces = list(_pieces(dict.fromkeys(early, 1)))
            self._cache.extend([(sequence.cache, 1) for sequence in early])
            answers += self._answers(pieces, step.of(early), None, goes_on=not rest)
        return answers + self._run(rest, goes_on=not early) if rest else answers

    def _run(self, tokens: dict[Sequence, int], *, goes_on: bool) -> list[StepResult]:
        """Compute tokens; where it `goes_on`, the step behind them may be launched."""
        pieces = list(_pieces(tokens))
        self._pages.mark((piece.sequence, len(piece.ids), len(piece.proposals)) for piece in pieces)
        shown = [(piece.sequence.shown, piece.sequence.cache.length, len(piece.ids)) for piece in pieces]
        adapted = [(piece.sequence.adapter, len(piece.ids)) for piece in pieces]
        batch = self._cache.append([(piece.sequence.cache, piece.ids) for piece in pieces])
        batch = with_adapters(with_pictures(batch, shown), adapted)
        followed = [piece for piece in pieces if piece.sequence.drafted] if self._drafter else []
        if self._drafter and followed:
            batch = replace(batch, features=self._drafter.features(len(batch.ids_T), self.decoder.embedding))
        answering = [piece for piece in pieces if piece.answers]
        masks = self._masks(answering)
        blocks = list(_blocks(answering))
        logits = self._compute(batch, pieces, blocks)
        for piece in pieces:
            if not piece.answers:
                self._pages.keep(piece.sequence)
        answers: list[StepResult] = []
        goes_on = goes_on and len(blocks) == 1 and len(answering) == len(pieces)
        for block, found in zip(blocks, logits, strict=True):
            answers += self._answers(block, found, masks, goes_on=goes_on)
        if self._drafter:
            self._drafter.follow(batch, [(piece.sequence, piece.row, piece.start) for piece in followed])
        return answers

    def _compute(
        self, batch: Batch, pieces: list[StepPiece], blocks: list[list[StepPiece]]
    ) -> Iterator[Logits]:
        """The batch through the model, and what prompts report; the logits of each block when it is asked for, on the
        model's device.
        """
        numbers = [np.array([row for piece in block for row in piece.rows]) for block in blocks]
        rows = [send(torch.from_numpy(rows_N), batch.ids_T.device) for rows_N in numbers]
        reports = [piece for piece in pieces if piece.sequence.wants_prompt_logprobs]
        if len(rows) == 1 and not reports:
            return iter([self.decoder.answer(batch, self._cache, rows[0])])
        hidden_TE = self.decoder(batch, self._cache)
        for piece in reports:
            self._report_prompt(piece, hidden_TE)
        return (Logits(self.decoder.logits(hidden_TE[rows_N])) for rows_N in rows)

    def _masks(self, pieces: list[StepPiece]) -> Masks | None:
        wanted, rows = [], 0
        for piece in pieces:
            if piece.sequence.constraint and piece.sequence.submit.max_tokens:
                wanted.append((piece.sequence.constraint, piece.rows.start, piece.proposals))
                rows = piece.rows.stop
        return self._grammars.fill(rows, wanted) if wanted else None

    def _report_prompt(self, piece: StepPiece, hidden_TE: torch.Tensor) -> None:
        """The probabilities of the prompt's tokens that follow this step's."""
        sequence, submit = piece.sequence, piece.sequence.submit
        ids, found, top = submit.ids, sequence.prompt_logprobs, submit.prompt_logprobs
        assert top is not None
        if not found:
            found.append(None)  # nothing comes before the first, or nothing that was asked for
        start = sequence.cache.length - len(piece.ids)  # the position of the piece's first token
        last = min(sequence.cache.length, len(ids) - 1)
        for first in range(submit.prompt_logprobs_from + len(found) - 1, last, LOGIT_ROWS):
            stop = min(last, first + LOGIT_ROWS)
            at = piece.row - start
            logits_NV = self.decoder.logits(hidden_TE[at + first : at + stop]).cpu()
            for position, logits_V in zip(range(first, stop), logits_NV, strict=True):
                found.append(logprob(logits_V, ids[position + 1], top, submit.logprob_ids))

    def _answers(
        self, block: list[StepPiece], logits: Logits, masks: Masks | None, *, goes_on: bool
    ) -> Iterator[StepResult]:
        best, logits = self._fetched(block, logits, goes_on=goes_on)
        held = self._ahead.rows if self._ahead else {}
        row = 0
        for piece in block:
            sequence = piece.sequence
            siblings, sequence.siblings = sequence.siblings, []
            if siblings:
                self._pages.keep(sequence)
            for sibling in siblings:
                self._pages.fork(sequence, sibling)
                sibling.cached_tokens = sequence.cached_tokens
            for one in (sequence, *siblings):
                yield _answer(piece, one, logits, best, row, masks)
            # What follows the last accepted token was computed for nothing; that token itself is computed next.
            length = min(sequence.cache.length, len(sequence.tokens) - 1)
            if sequence not in held or length < sequence.cache.length:
                self._cache.rewind(sequence.cache, length)
            self._pages.keep(sequence)
            row += len(piece.rows)

    def _fetched(
        self, block: list[StepPiece], logits: Logits, *, goes_on: bool
    ) -> tuple[list[int | None], Logits]:
        """Return each row's most likely token, and on the host the logits of rows of which more is asked."""
        if not ahead.is_asynchronous(self._cache.device):
            return logits.best(), logits
        looked_at = _looked_at(block)
        if looked_at or not (goes_on and self._runs_ahead and all(map(_is_plain, block))):
            return logits.best(), logits.fetched(looked_at)
        leading_N = logits.leading()
        fetched = begin_fetch(leading_N)
        self._ahead = self._launch(block, leading_N)
        return tokens_of(fetched()), logits

    def _launch(self, block: list[StepPiece], leading_N: torch.Tensor) -> ahead.StepAhead | None:
        """Launch the step behind a block, of the sequences that do not end with it."""
        going = [
            (row, piece.sequence)
            for row, piece in enumerate(block)
            if piece.sequence.new_tokens + 1 < piece.sequence.submit.max_tokens
        ]
        return ahead.launch(going, leading_N, self.decoder, self._cache, self._pages) if going else None


def _answer(
    piece: StepPiece,
    sequence: Sequence,
    logits: Logits,
    best: list[int | None],
    row: int,
    masks: Masks | None,
) -> StepResult:
    """Choose one token, and one more for each proposal that turns out to be the one chosen.

    The sequence's logits begin at `row`; `best` has each row's most likely token, None where it is not a number.
    """
    submit, constraint, chooser = sequence.submit, sequence.constraint, sequence.chooser
    logprobs: list[TokenLogprob] | None = None if submit.logprobs is None else []
    answer = StepResult(
        sequence=sequence,
        logprobs=logprobs,
        joins=sequence is not piece.sequence,
        proposed=len(piece.proposals),
    )
    if not submit.max_tokens:
        answer.finish = "length"
        return answer
    for place, proposal in enumerate((*piece.proposals, None)):
        token = best[row + place]
        if token is None:
            return answer.fail("the model's logits are not numbers")
        if constraint or not chooser.is_argmax:
            allowed_V = masks.row(piece.rows[place]) if constraint and masks else None
            if constraint and constraint.fault:
                return answer.fail(constraint.fault, "grammar")
            try:
                token = chooser.choose(*logits.row(row + place), allowed_V)
            except ModelError as error:
                return answer.fail(str(error))
        if constraint and not constraint.accept(token):
            return answer.fail(f"the grammar does not take the token {token}")
        chooser.accept(token)
        sequence.tokens.append(token)
        answer.tokens.append(token)
        if logprobs is not None:
            values_V, _ = logits.row(row + place)
            logprobs.append(logprob(values_V, token, submit.logprobs or 0, submit.logprob_ids))
        if token in submit.stop_ids or (constraint and constraint.complete):
            answer.finish = "stop"
        elif sequence.new_tokens >= submit.max_tokens:
            answer.finish = "length"
        if answer.finish or token != proposal:
            break
    return answer


def _looked_at(block: list[StepPiece]) -> list[int]:
    """Return the block's rows of which more than the most likely token is asked."""
    found, row = list[int](), 0
    for piece in block:
        if any(_looks(sequence) for sequence in (piece.sequence, *piece.sequence.siblings)):
            found += range(row, row + len(piece.rows))
        row += len(piece.rows)
    return found


def _looks(sequence: Sequence) -> bool:
    return (
        not sequence.chooser.is_argmax
        or sequence.constraint is not None
        or sequence.submit.logprobs is not None
    )


def _is_plain(piece: StepPiece) -> bool:
    """Check whether a piece asks for one token of a sequence that has nothing but its tokens."""
    sequence = piece.sequence
    others = (piece.proposals, sequence.siblings, sequence.adapter, sequence.cache.axes)
    return not any(others)


def _pieces(tokens: dict[Sequence, int]) -> Iterator[StepPiece]:
    row = 0
    for sequence, count in tokens.items():
        start = sequence.cache.length
        known = sequence.tokens[start : start + count]
        proposals = sequence.proposals[: count - len(known)]
        answers = start + len(known) == len(sequence.tokens)
        yield StepPiece(
            sequence=sequence,
            ids=known + proposals,
            proposals=proposals,
            row=row,
            start=start,
            answers=answers,
        )
        row += count


def _blocks(pieces: list[StepPiece]) -> Iterator[list[StepPiece]]:
    """The pieces in groups that want at most `LOGIT_ROWS` rows of logits, or a single piece."""
    block, rows = list[StepPiece](), 0
    for piece in pieces:
        if block and rows + len(piece.rows) > LOGIT_ROWS:
            yield block
            block, rows = [], 0
        block.append(piece)
        rows += len(piece.rows)
    if block:
        yield block
