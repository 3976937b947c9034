"""Text generation over two fixed-shape calls, `prefill` and `decode`, and a preallocated KV cache.

Needs neither transformers nor the model's code, so that an artifact answers as soon as its compiled calls are
loaded. Prompts are left-padded to whole chunks, which lets rows of different lengths share their cache slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.json_file import typed
from torchwright.hub.tokenizer import find_tokenizer
from torchwright.workloads.base import Case, Run

MOST_CACHED = 2**42
"""Numbers in a cache of keys, and in one of values."""
FORMS = "a text, a list of token ids, or a list of either"


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The fixed sizes of a language model's two calls."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: int
    chunk: int
    """Tokens of one prefill call."""
    slots: int
    """Tokens the KV cache holds for each row."""
    context: int
    """The model's own limit."""
    windows: tuple[int, ...]
    """One dense mask for each distinct kind of layer: 0 is full attention, else the sliding window's width."""
    eos: tuple[int, ...] = ()
    bos: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Geometry:
        """Read the result of `as_dict`; raises `ArtifactError` for anything else, since the file may be untrusted."""
        found = typed(data, cls, "the geometry")
        sizes = (found.layers, found.kv_heads, found.head_dim, found.vocabulary, found.batch, found.chunk)
        sizes += (found.slots, found.context)
        cached = found.layers * found.batch * found.kv_heads * found.slots * found.head_dim
        if min(sizes) < 1 or max(sizes) > MOST_CACHED or cached > MOST_CACHED:
            raise ArtifactError("the geometry is damaged", found=f"sizes {str(sizes)[:200]}")
        return found


def new_cache(geometry: Geometry, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Zeroed keys and values, layer by layer: [k_0, v_0, k_1, …], each (B, K, S, D)."""
    shape = (geometry.batch, geometry.kv_heads, geometry.slots, geometry.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * geometry.layers)]


def call(
    name: str,
    geometry: Geometry,
    ids_BT: torch.Tensor,
    start: int,
    cache: list[torch.Tensor],
    *,
    padding_B: torch.Tensor | None = None,
    keep_K: torch.Tensor | None = None,
    repeat: int = 1,
) -> Case:
    """One call that writes T tokens into cache slots `start` to `start + T` and returns logits (B, K, V).

    `padding_B` counts the empty slots at the left of each row. A padded query sees itself alone: a row of the mask
    with nothing allowed would turn into NaN, and NaN in the cache outlives its mask.
    """
    B, T = ids_BT.shape
    device = ids_BT.device
    slots_T = torch.arange(start, start + T, device=device)
    padding_B = torch.zeros(B, dtype=torch.long, device=device) if padding_B is None else padding_B
    positions_BT = (slots_T[None] - padding_B[:, None]).clamp_min(0)
    keep_K = torch.tensor([T - 1], device=device) if keep_K is None else keep_K
    key_S = torch.arange(geometry.slots, device=device)
    distance_TS = slots_T[:, None] - key_S[None]
    causal_BTS = (distance_TS >= 0) & (key_S[None, None] >= padding_B[:, None, None])
    causal_BTS = causal_BTS | (distance_TS == 0)
    masks = [
        (causal_BTS & (distance_TS < window) if window else causal_BTS)[:, None]
        for window in geometry.windows
    ]
    return Case(
        name=name, args=(ids_BT, positions_BT, slots_T, keep_K, masks, cache), repeat=repeat, fixed=True
    )


@runtime_checkable
class Writer(Protocol):
    """A model that continues a text token by token: what `torchwright generate` asks of an artifact's answerer."""

    sampling: frozenset[str]
    """The options of sampling that `write` takes."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...

    def room(self, tokens: int) -> int:
        """Return how many new tokens fit after a prompt of this many tokens."""
        ...

    def write(
        self, ids: list[int], limit: int, *, seed: int, on_token: Callable[[int], None], **sampling: Any
    ) -> None:
        """Give `on_token` each token that continues `ids`, until the text ends or there are `limit` of them."""
        ...


class Continued(Protocol):
    """One prompt and the cache of its tokens."""

    def prefill(self) -> torch.Tensor:
        """Read the prompt and return the next token's logits (V,) in float32."""
        ...

    def advance(self, token: int) -> torch.Tensor:
        """Append a token and return the next one's logits (V,) in float32."""
        ...


class SteppedWriter(Protocol):
    """A writer whose answers are computed one by one, token by token: what `WritingEngine` serves."""

    vocabulary: int
    longest: int
    """Tokens of prompt and answer together at most."""
    chunk: int
    """Prompts take room in whole chunks of so many tokens."""

    @property
    def stop(self) -> Sequence[int]:
        """End-of-text ids."""
        ...

    @property
    def cache_bytes(self) -> int:
        """The memory of one session's cache when it is full."""
        ...

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) in float32 of token ids (B, T)."""
        ...

    def room(self, tokens: int) -> int:
        """Return how many new tokens fit after a prompt."""
        ...

    def session(self, ids: Sequence[int]) -> Continued:
        """Return a session that continues one prompt. Raises `WorkloadError` for unusable ids."""
        ...


class Generator:
    """Generates text with a language model's `prefill` and `decode`.

    `generate` takes texts or token ids, one or many of different lengths, and returns texts for texts and lists of
    ids for ids.
    """

    sampling = frozenset({"temperature"})

    def __init__(
        self, run: Run, geometry: Geometry, dtype: torch.dtype, folder: Path | None, device: str = "cpu"
    ):
        self._tokenizer = find_tokenizer(folder) if folder else None
        self._run, self.geometry, self._dtype, self._device = run, geometry, dtype, device
        self.vocabulary, self.chunk, self.stop = geometry.vocabulary, geometry.chunk, geometry.eos
        self.longest = min(geometry.slots, geometry.context)

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) in float32 of token ids (B, T), at most one cache long."""
        geometry = self.geometry
        if ids_BT.ndim != 2 or not ids_BT.numel():
            raise WorkloadError(
                f"the input has shape {list(ids_BT.shape)}", allowed="token ids (B, T), neither of them 0"
            )
        B, T = ids_BT.shape
        check_ids(ids_BT.flatten().tolist(), self.vocabulary)
        self._check_room(T + -T % geometry.chunk, 0)
        padded = -T % geometry.chunk
        ids = torch.zeros(geometry.batch, T + padded, dtype=torch.long, device=self._device)
        rows: list[torch.Tensor] = []
        for first in range(0, B, geometry.batch):
            part = ids_BT[first : first + geometry.batch]
            ids[: len(part), padded:] = part
            cache = new_cache(geometry, self._dtype, self._device)
            padding_B = torch.full((geometry.batch,), padded, device=self._device)
            chunks = [
                self._run(
                    call(
                        "prefill",
                        geometry,
                        ids[:, start : start + geometry.chunk],
                        start,
                        cache,
                        padding_B=padding_B,
                        keep_K=torch.arange(geometry.chunk, device=self._device),
                    )
                )
                for start in range(0, T + padded, geometry.chunk)
            ]
            rows.append(torch.cat(chunks, 1)[: len(part), padded:].float())
        return torch.cat(rows)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Continue each prompt until an end-of-text token or `max_new_tokens`.

        `temperature` 0 is greedy; above it, each row's tokens are drawn with a generator of its own, seeded by `seed`
        and the row's number. `on_token(row, token)` is called as tokens appear.

        Raises `WorkloadError` for an empty prompt, ids out of range, or a prompt that does not fit the cache.
        """
        if not 0 <= temperature < math.inf:
            raise WorkloadError(f"temperature {temperature}", allowed="0 or more")
        if max_new_tokens < 0:
            raise WorkloadError(f"max_new_tokens {max_new_tokens}", allowed="0 or more")
        items, single = as_list(prompts)
        texts = isinstance(items[0], str)
        rows = [self.encode(item) if texts else item for item in items]
        for ids in rows:
            check_ids(ids, self.vocabulary)
        # A generator for each row: what a prompt is answered must not depend on the others' lengths or number.
        randoms = [torch.Generator().manual_seed(1_000_003 * seed + row) for row in range(len(rows))]
        outputs: list[list[int]] = []
        for first in range(0, len(rows), self.geometry.batch):
            part = slice(first, first + self.geometry.batch)
            outputs += self._batch(rows[part], max_new_tokens, temperature, randoms[part], first, on_token)
        results = [self.decode(ids) for ids in outputs] if texts else outputs
        return results[0] if single else results

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the begin-of-text token where the model has one."""
        ids = self._need_tokenizer().encode(text, add_special_tokens=True).ids
        bos = self.geometry.bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._need_tokenizer().decode(list(ids), skip_special_tokens=True)

    def room(self, tokens: int) -> int:
        """Return how many new tokens fit after a prompt of this many tokens, in whole chunks."""
        return self.longest - tokens - -tokens % self.chunk

    def write(
        self, ids: list[int], limit: int, *, seed: int, on_token: Callable[[int], None], **sampling: Any
    ) -> None:
        """See `Writer.write`; the errors are `generate`'s."""
        with torch.inference_mode():
            self.generate(
                ids, max_new_tokens=limit, seed=seed, on_token=lambda row, token: on_token(token), **sampling
            )

    @property
    def cache_bytes(self) -> int:
        """The memory of one session's keys and values."""
        geometry = self.geometry
        row = geometry.kv_heads * geometry.head_dim * self._dtype.itemsize
        return 2 * geometry.layers * geometry.batch * geometry.slots * row

    def session(self, ids: Sequence[int]) -> GenerationSession:
        """Return a session that continues one prompt token by token; raises `WorkloadError` as `generate` does."""
        check_ids(ids, self.vocabulary)
        self._check_room(len(ids) + -len(ids) % self.geometry.chunk, 0)
        return GenerationSession(self._run, self.geometry, self._dtype, self._device, ids)

    def _batch(self, rows, max_new_tokens, temperature, randoms, first_row, on_token) -> list[list[int]]:
        geometry, device = self.geometry, self._device
        longest = max(map(len, rows))
        length = longest + (-longest % geometry.chunk)
        self._check_room(length, max_new_tokens)
        ids_BT = torch.zeros(geometry.batch, length, dtype=torch.long, device=device)
        padding_B = torch.zeros(geometry.batch, dtype=torch.long, device=device)
        for row, ids in enumerate(rows):
            ids_BT[row, length - len(ids) :] = torch.tensor(ids, device=device)
            padding_B[row] = length - len(ids)
        cache = new_cache(geometry, self._dtype, device)
        logits = None
        for start in range(0, length, geometry.chunk):
            chunk = ids_BT[:, start : start + geometry.chunk]
            logits = self._run(call("prefill", geometry, chunk, start, cache, padding_B=padding_B))
        outputs: list[list[int]] = [[] for _ in rows]
        alive = set(range(len(rows)))
        for step in range(max_new_tokens):
            assert logits is not None
            token_B = sample(logits[:, -1], temperature, randoms)
            for row in sorted(alive):
                token = int(token_B[row])
                if token in geometry.eos:
                    alive.discard(row)
                    continue
                outputs[row].append(token)
                if on_token:
                    on_token(first_row + row, token)
            if not alive or step + 1 == max_new_tokens:
                break
            logits = self._run(
                call(
                    "decode", geometry, token_B[:, None].to(device), length + step, cache, padding_B=padding_B
                )
            )
        return outputs

    def _check_room(self, length: int, new: int) -> None:
        geometry, limit = self.geometry, self.longest
        if length + new > limit:
            raise WorkloadError(
                f"the prompt ({length} tokens, in whole chunks of {geometry.chunk}) and {new} new tokens do not fit",
                found=f"{length + new} tokens",
                allowed=f"{limit}: the cache holds {geometry.slots}, the model's context is {geometry.context}",
                next="optimize again with a larger --prompt-tokens or --new-tokens",
            )

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise WorkloadError(
                "this model folder has no tokenizer.json", next="pass token ids instead of text"
            )
        return self._tokenizer


class GenerationSession:
    """One prompt's cache in the calls of fixed shapes, read once and grown token by token.

    It takes the first row of the calls; the others hold padding alone.
    """

    def __init__(
        self, run: Run, geometry: Geometry, dtype: torch.dtype, device: str, ids: Sequence[int]
    ) -> None:
        self._run, self._geometry, self._device = run, geometry, device
        self._length = len(ids) + -len(ids) % geometry.chunk
        self._ids_BT = torch.zeros(geometry.batch, self._length, dtype=torch.long, device=device)
        self._ids_BT[0, self._length - len(ids) :] = torch.tensor(ids, device=device)
        self._padding_B = torch.full((geometry.batch,), self._length, device=device)
        self._padding_B[0] = self._length - len(ids)
        self._cache = new_cache(geometry, dtype, device)

    def prefill(self) -> torch.Tensor:
        """Read the prompt and return the next token's logits (V,) in float32."""
        geometry, logits = self._geometry, torch.empty(0)
        for start in range(0, self._length, geometry.chunk):
            chunk = self._ids_BT[:, start : start + geometry.chunk]
            logits = self._call("prefill", chunk, start)
        return logits

    def advance(self, token: int) -> torch.Tensor:
        """Append a token and return the next one's logits (V,) in float32."""
        ids_BT = torch.zeros(self._geometry.batch, 1, dtype=torch.long, device=self._device)
        ids_BT[0] = token
        logits_V = self._call("decode", ids_BT, self._length)
        self._length += 1
        return logits_V

    def _call(self, name: str, ids_BT: torch.Tensor, start: int) -> torch.Tensor:
        case = call(name, self._geometry, ids_BT, start, self._cache, padding_B=self._padding_B)
        return self._run(case)[0, -1].float().cpu()


def sample(logits_BV: torch.Tensor, temperature: float, randoms: Sequence[torch.Generator]) -> torch.Tensor:
    """The next token of each row (B,): the most likely one at temperature 0, else drawn from the softmax.

    `randoms` are those of the first rows; where the batch has more rows, their tokens are the most likely ones.
    """
    token_B = logits_BV.argmax(-1)
    if temperature == 0:
        return token_B
    for row, random in enumerate(randoms):
        # float64: over a tiny temperature a float32 logit is infinite.
        probabilities_V = torch.softmax(logits_BV[row].double().cpu() / temperature, -1)
        token_B[row] = torch.multinomial(probabilities_V, 1, generator=random)[0]
    return token_B


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raise `WorkloadError` for an empty prompt, and for ids out of range."""
    if not ids:
        raise WorkloadError("the prompt is empty", allowed="at least one token")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise WorkloadError(f"token id {wrong} is out of range", allowed=f"0 to {vocabulary - 1}")


def as_list(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts as a list of texts or of lists of ids, and whether there was but one.

    Raises `WorkloadError` for anything else.
    """
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or (_all_ids(prompts) and len(prompts) > 0)
    items = [prompts] if single or not isinstance(prompts, list | tuple) else prompts
    rows = [item.tolist() if isinstance(item, torch.Tensor) else item for item in items]
    if not rows:
        raise WorkloadError("there is no prompt", allowed=FORMS)
    if not all(isinstance(row, str) for row in rows) and not all(_all_ids(row) for row in rows):
        kinds = ", ".join(dict.fromkeys(type(row).__name__ for row in rows))
        raise WorkloadError("the prompts are neither texts nor token ids", found=kinds, allowed=FORMS)
    return [row if isinstance(row, str) else list(row) for row in rows], single


def _all_ids(row: Any) -> bool:
    return isinstance(row, list | tuple) and all(type(token) is int for token in row)
