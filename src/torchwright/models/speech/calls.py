"""A speech model as calls of fixed shapes, however they are run: what a search times, compiles and keeps.

    memory = run(encoding(input_1))                                once a window: keys and values for every layer
    logits_1TV = run(reading(sizes, ids, start, memory, cache))    `prefill` for `CHUNK` tokens, `decode` for one

`CallsModel` answers them by transformers' modules, `native_calls.py` by Torchwright's own; `CalledSpeech` is the speech
model that a recognizer runs through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.json_file import typed
from torchwright.models.speech.steps import Head, SpeechModel, Steps
from torchwright.workloads.base import Case, Run
from torchwright.workloads.huggingface import cache_keyword

CHUNK = 32
"""Tokens of one prefill call."""
MOST = 2**20
"""Upper bound of each cache size in a file."""


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """The decoder's keys and values: of its own tokens, and of the encoder's states."""

    layers: int
    heads: int
    head_dim: int
    positions: int
    """Tokens of a window at most."""
    states: int
    """Encoder states of the timed window."""

    @property
    def slots(self) -> int:
        """Room for all positions, and for a chunk of which but one token is wanted."""
        return self.positions + CHUNK

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> CacheSizes:
        """Read the result of `as_dict`; raises `ArtifactError` for anything else, since the file may be untrusted."""
        found = typed(data, cls, "the cache's sizes")
        if not all(1 <= size <= MOST for size in asdict(found).values()):
            raise ArtifactError("the cache's sizes are damaged", found=str(data)[:200])
        return found


def new_cache(sizes: CacheSizes, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Zeroed keys and values of a window's tokens, layer by layer: [k_0, v_0, k_1, …], each (1, H, slots, D)."""
    return _zeros(sizes, sizes.slots, dtype, device)


def new_memory(sizes: CacheSizes, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Keys and values of states that are all zeros, in the same form: each (1, H, S, D)."""
    return _zeros(sizes, sizes.states, dtype, device)


def encoding(input_1: torch.Tensor) -> Case:
    """The encoder over one window, in float32 as its family takes it; gives what `reading` takes as `memory`."""
    return Case(name="encode", args=(input_1,), fixed=True)


def reading(
    ids: Sequence[int], start: int, memory: Any, cache: list[torch.Tensor], *, repeat: int = 1
) -> Case:
    """More tokens of a window, `CHUNK` or one, into the cache's slots from `start` on; gives logits (1, T, V)."""
    device = cache[0].device
    ids_1T = torch.tensor([list(ids)], device=device)
    slots_T = torch.arange(start, start + len(ids), device=device)
    name = "decode" if len(ids) == 1 else "prefill"
    return Case(name=name, args=(memory, ids_1T, slots_T, cache), repeat=repeat, fixed=True)


class CallsModel(nn.Module):
    """A speech model of transformers, called as `encoding` and `reading` say."""

    def __init__(self, model: Any, positions: int) -> None:
        super().__init__()
        self.model, self.positions = model, positions
        self.keyword = cache_keyword(model.get_decoder())

    def forward(self, heard: Any, ids_1T: Any = None, slots_T: Any = None, cache: Any = None) -> Any:
        decoder, dtype = self.model.get_decoder(), self.model.dtype
        if ids_1T is None:
            states_1SE = self.model.get_encoder()(heard.to(dtype)).last_hidden_state
            memory: list[torch.Tensor] = []
            past = EncoderDecoderCache(_Passing([]), _Passing(memory))
            # The decoder's own layers make keys and values of the states; what it says of a token is not wanted.
            token_11 = torch.zeros(1, 1, dtype=torch.long, device=heard.device)
            decoder(
                input_ids=token_11,
                encoder_hidden_states=states_1SE,
                use_cache=True,
                position_ids=token_11,
                **{self.keyword: past},
            )
            return memory
        key_S = torch.arange(cache[0].shape[2], device=ids_1T.device)
        mask_11TS = (key_S[None] <= slots_T[:, None])[None, None]
        past = EncoderDecoderCache(_Slots(cache, slots_T), _Written(heard))
        past.is_updated = dict.fromkeys(range(len(cache) // 2), True)
        out = decoder(
            input_ids=ids_1T,
            attention_mask=mask_11TS,
            # That a memory is there; its keys and values are in the cache.
            encoder_hidden_states=heard[0].flatten(2),
            use_cache=True,
            **{self.keyword: past},
            position_ids=slots_T[None].clamp(max=self.positions - 1),
        )
        return self.model.get_output_embeddings()(out.last_hidden_state)


class _Own(Cache):
    """transformers' cache interface over tensors of ours."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


class _Passing(_Own):
    """Gives keys and values on as they come, and notes them."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def update(self, key_states, value_states, *args, **kwargs):
        self.kept += [key_states, value_states]
        return key_states, value_states


class _Slots(_Own):
    """Keys and values go into their slots; all slots are read."""

    def __init__(self, tensors: list[torch.Tensor], slots_T: torch.Tensor) -> None:
        super().__init__()
        self.tensors, self.slots_T = tensors, slots_T

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = self.tensors[2 * layer_idx], self.tensors[2 * layer_idx + 1]
        # Under autocast keys may come in another type than values.
        keys.index_copy_(2, self.slots_T, key_states.to(keys.dtype))
        values.index_copy_(2, self.slots_T, value_states.to(values.dtype))
        return keys, values


class _Written(_Own):
    """Keys and values that were written before."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        self.layers: Any = [SimpleNamespace(keys=keys, values=values) for keys, values in pairs]

    def __bool__(self) -> bool:
        return True


class _Read:
    """A window's cache, and how many tokens are in it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.length = tensors, 0


class CalledSpeech(SpeechModel):
    """A speech model whose every call is made by `run`; one window after the other."""

    def __init__(
        self, run: Run, sizes: CacheSizes, dtype: torch.dtype, description: str, device: str = "cpu"
    ) -> None:
        self._run, self._sizes, self._dtype, self._device = run, sizes, dtype, device
        self.description, self.module = description, nn.Module()

    def encode(self, input_1: torch.Tensor) -> Any:
        return self._run(encoding(input_1.to(self._device)))

    def steps(self, encoded: Any) -> Steps:
        return Steps(self, encoded, _Read(new_cache(self._sizes, self._dtype, self._device)))

    def read(self, pieces: Sequence[tuple[Steps, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits in place of the decoder's output, see `logits`."""
        return [self._read(steps, ids) for steps, ids in pieces]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return the logits of the hidden states from `read`."""
        return hidden_NE

    def cross_attention(self, heads: Sequence[Head], ids: Sequence[int], encoded: Any) -> torch.Tensor:
        raise WorkloadError(
            f"{self.description} does not say where its heads look, by which words are placed in time",
            allowed="timestamps of segments",
            next="optimize again with `--with native_speech`, or transcribe by the model's own folder",
        )

    def _read(self, steps: Steps, ids: Sequence[int]) -> torch.Tensor:
        if len(ids) == 1:
            return self._call(steps, ids)
        return torch.cat(
            [self._call(steps, ids[first : first + CHUNK]) for first in range(0, len(ids), CHUNK)]
        )

    def _call(self, steps: Steps, ids: Sequence[int]) -> torch.Tensor:
        """Logits (T, V) of up to a chunk; the tokens that fill it up are written over by those that come next."""
        kept: _Read = steps.kept
        padded = ids if len(ids) == 1 else [*ids, *[0] * (CHUNK - len(ids))]
        logits_1TV = self._run(reading(padded, kept.length, steps.encoded, kept.tensors))
        kept.length += len(ids)
        return logits_1TV[0, : len(ids)].float().cpu()


def _zeros(sizes: CacheSizes, length: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shape = (1, sizes.heads, length, sizes.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * sizes.layers)]
