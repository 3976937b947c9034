"""The next step of greedy sequences, launched before the host knows the tokens of this one.

A device computes on its own while the host chooses tokens, reports them and plans. The most likely tokens lie on the
device, so that the step behind them can begin there at once. The host's plan then either has these sequences, each
with its one new token, and their logits are there; or not, and what was computed for them is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torchwright.hardware.devices.transfer import send
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.scores import Logits
from torchwright.serve.engine.pages import Pages
from torchwright.serve.engine.request import Sequence


@dataclass(frozen=True, kw_only=True)
class StepAhead:
    """A launched step: one token of each sequence, in a slot that its sequence holds."""

    decoder: PagedModel
    rows: Mapping[Sequence, int]
    slots: Mapping[Sequence, tuple[int, int]]
    """Each token's place in its sequence, and its page."""
    logits: Logits

    def planned(self, tokens: Mapping[Sequence, int], decoder: PagedModel) -> list[Sequence]:
        """Return the sequences of a plan whose tokens are those of this step.

        A sequence that was preempted, or given other pages, has lost the keys and values of the token.
        """
        return [
            sequence for sequence in self.rows if tokens.get(sequence) == 1 and self._holds(sequence, decoder)
        ]

    def of(self, sequences: list[Sequence]) -> Logits:
        """Return the logits of some of the sequences, a row each."""
        if len(sequences) == len(self.rows):
            return self.logits
        rows = [self.rows[sequence] for sequence in sequences]
        values_NV = self.logits.values_NV
        return Logits(values_NV[send(torch.tensor(rows), values_NV.device)])

    def _holds(self, sequence: Sequence, decoder: PagedModel) -> bool:
        (place, page), pages = self.slots[sequence], sequence.cache.pages
        return (
            decoder is self.decoder
            and (sequence.cache.length, sequence.missing) == (place, 1)
            and len(pages) > place // PAGE
            and pages[place // PAGE] == page
        )


def launch(
    sequences: list[tuple[int, Sequence]],
    leading_N: torch.Tensor,
    decoder: PagedModel,
    cache: PagedCache,
    pages: Pages,
) -> StepAhead | None:
    """Launch the step behind these sequences' most likely tokens; None where pages are short.

    Each comes with its row of `leading_N`, which `Logits.leading` returned.
    """
    going = [sequence for _, sequence in sequences]
    need = sum(pages.need(sequence, 1) for sequence in going)
    if need > pages.available:
        return None
    pages.reserve(need)
    for sequence in going:
        cache.hold(sequence.cache, 1)
    batch = cache.ahead([(sequence.cache, 0) for sequence in going], 0)
    # A token that is not a number ends its sequence once the host knows it.
    rows, ids_T = [row for row, _ in sequences], leading_N.clamp(min=0)
    if len(rows) < len(leading_N):
        ids_T = ids_T[send(torch.tensor(rows), leading_N.device)]
    logits = decoder.answer(replace(batch, ids_T=ids_T), cache, batch.last_rows_B)
    places = {sequence: sequence.cache.length for sequence in going}
    return StepAhead(
        decoder=decoder,
        rows={sequence: row for row, sequence in enumerate(going)},
        slots={sequence: (place, sequence.cache.pages[place // PAGE]) for sequence, place in places.items()},
        logits=logits,
    )


def runs_ahead(cache: PagedCache, decoder: PagedModel) -> bool:
    """Check whether steps can be launched ahead: on an asynchronous device, by a model without recurrent states whose
    angles do not depend on the sequence's length.
    """
    return is_asynchronous(cache.device) and cache.states is None and not decoder.config.varies_by_length


def is_asynchronous(device: torch.device) -> bool:
    """Check whether a device computes while the host goes on."""
    return device.type != "cpu"
