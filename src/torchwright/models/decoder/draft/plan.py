"""A draft's calls as one operator each: what follows a step, and whole chains of proposals.

plan = DraftPlan(draft, cache.draft)
states, tokens, confidence = plan.follow(batch, features, rows, choices)
tokens_BD, confidence_BD = plan.grow(chains)

Proposals are those of the draft's own calls. The kernels are the same, and the race is that of `generation/race.py`.
Confidences may differ in their last digits, and where logits tie at the edge of the tokens that a draw keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import PAGE, LayerCache
from torchwright.models.decoder.draft.draft import Draft
from torchwright.models.decoder.generation.sampling import Sampling

DRAWN_FROM = 64
"""The draft's likeliest tokens among which a proposal is drawn: at temperature 1 others are drawn once in ten tokens or
less, and are rarely right."""


class Choice(NamedTuple):
    """A sequence's options, and the keys of its races (`Sampler.keys`)."""

    sampling: Sampling
    keys: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of one sequence's chain."""

    token: int
    place: int
    """The slot, counted from the sequence's first, that the token is computed in."""
    pages: Sequence[int]
    most: int
    """Proposals at most."""
    reach: float
    """The probability that the token is right."""
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The tokens and seconds by which chains grow, or end."""

    acceptance: Sequence[Sequence[float]]
    """The acceptance of greedy and of drawn proposals: by equally wide classes of confidence, and last the mean."""
    call_s: Sequence[float]
    """Seconds of a call for n chains, and of the rows that these add; for as many chains as there are, or more."""
    tokens: float
    """Tokens that are expected, and their seconds, without these chains."""
    seconds: float
    row: float
    """A chain ends where it is accepted whole with this probability or less."""


class DraftPlan:
    """A draft over one cache, as described to the kernels; rebuilt when the draft's parts are replaced."""

    def __init__(self, draft: Draft, pages: LayerCache) -> None:
        self._draft = draft
        # A draft that reads no features runs one program behind steps and along chains.
        self._along = draft.program(pages, observes=False).native
        self._behind = draft.program(pages, observes=True).native if draft.observed else self._along

    def follow(
        self, batch: Batch, features_TF: torch.Tensor | None, rows: Sequence[int], choices: Sequence[Choice]
    ) -> tuple[torch.Tensor, list[int], list[float]]:
        """Compute a batch's tokens; return the hidden states (N, E) of some rows, and the proposals behind these."""
        angles = [*self._draft.angles(batch.longest), batch.positions_T]
        states_NE, tokens_N, confidence_N = self._behind.follow(
            batch.ids_T,
            angles,
            batch.slots_T,
            batch.block_tables_BP,
            batch.query_starts,
            batch.context_lens_B,
            _nothing() if features_TF is None else features_TF,
            torch.tensor(rows, dtype=torch.int64),
            *_choices(choices, 1),
            DRAWN_FROM,
        )
        return states_NE, tokens_N.tolist(), confidence_N.tolist()

    def grow(
        self, starts: Sequence[Start], states_BE: torch.Tensor | None, worth: Worth
    ) -> list[list[tuple[int, float]]]:
        """Return each chain's further tokens with the confidence in them, while they are worth their time."""
        deepest = max(start.most for start in starts)
        width = max(-(-(start.place + start.most) // PAGE) for start in starts)
        tables_BP = np.zeros((len(starts), width), np.int32)
        for row, start in enumerate(starts):
            assert start.place + start.most <= len(start.pages) * PAGE, "a chain's slots are not held"
            pages = start.pages[:width]
            tables_BP[row, : len(pages)] = pages
        tokens_BD, confidence_BD = self._along.grow(
            torch.tensor([start.token for start in starts]),
            _nothing() if states_BE is None else states_BE,
            *self._draft.angles(max(start.place + start.most for start in starts)),
            torch.tensor([start.place for start in starts]),
            torch.from_numpy(tables_BP),
            *_choices([start.choice for start in starts], deepest),
            torch.tensor([start.most for start in starts]),
            torch.tensor([start.reach for start in starts], dtype=torch.float64),
            torch.tensor(worth.acceptance, dtype=torch.float64),
            torch.tensor(worth.call_s[: len(starts) + 1], dtype=torch.float64),
            float(worth.tokens),
            float(worth.seconds),
            float(worth.row),
            DRAWN_FROM,
        )
        found = zip(tokens_BD.tolist(), confidence_BD.tolist(), strict=True)
        return [
            [(token, confidence) for token, confidence in zip(*row, strict=True) if token >= 0]
            for row in found
        ]


def _choices(choices: Sequence[Choice], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Options (N, 4) in float64 and keys (N, depth) as the kernels take them."""
    options_N4 = np.array(
        [(one.temperature, one.top_k, one.top_p, one.min_p) for one, _ in choices], np.float64
    ).reshape(-1, 4)
    keys_ND = np.zeros((len(choices), depth), np.uint64)
    for row, (_, keys) in enumerate(choices):
        keys_ND[row, : len(keys)] = keys
    return torch.from_numpy(options_N4), torch.from_numpy(keys_ND.view(np.int64))


def _nothing() -> torch.Tensor:
    return torch.empty(0, 0)
