"""Torchwright's encoder and decoder in place of a speech workload's model: the calls of `calls.py` on their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchwright.models.speech.native import NativeSpeech, Pages
from torchwright.models.speech.packed import read_packed, write_packed


class NativeCalls(nn.Module):
    """Called like `CallsModel`. Keys and values stay in pages of its own, which are found by the callers' tensors."""

    def __init__(self, speech: NativeSpeech) -> None:
        super().__init__()
        self.speech = speech
        self.stem, self.encoder, self.decoder = speech.stem, speech.encoder, speech.decoder
        self._encoded = WeakTensorKeyDictionary()  # what belongs to a tensor goes when it does
        self._steps = WeakTensorKeyDictionary()

    @classmethod
    def load(cls, folder: Path, model_folder: Path) -> Self:
        """Load the files that `save` wrote."""
        return cls(read_packed(folder, model_folder))

    def save(self, folder: Path) -> None:
        write_packed(self.speech, folder)

    def forward(self, heard: Any, ids_1T: Any = None, slots_T: Any = None, cache: Any = None) -> Any:
        if ids_1T is None:
            states_SE = self.speech.states(heard)
            self._encoded[states_SE] = self.speech.remember(states_SE)
            return [states_SE]
        start, ids = int(slots_T[0]), ids_1T[0].tolist()
        steps = self._steps.get(cache[0])
        encoded = self._memory(heard[0])
        if steps is None or steps.encoded is not encoded:
            steps = self._steps[cache[0]] = self.speech.steps(encoded)
        if steps.kept.sequence.length < start:  # a call timed by itself: what came before is zeros
            steps.read([0] * (start - steps.kept.sequence.length))
        self.speech.rewind(steps, start)
        # What fills a chunk up may lie behind the last position.
        wanted = ids[: self.decoder.config.context - start]
        logits_TV = self.speech.logits(steps.read(wanted))
        return nn.functional.pad(logits_TV, (0, 0, 0, len(ids) - len(wanted)))[None]

    def _memory(self, heard: torch.Tensor) -> Pages:
        """Return the cross-attention pages of the given states; keys (1, H, S, D) stand for as many zero states."""
        known: Any = self._encoded.get(heard)
        if known is None:
            states_SE = torch.zeros(heard.shape[2], self.encoder.config.model, dtype=heard.dtype)
            known = self._encoded[heard] = self.speech.remember(states_SE)
        return known
