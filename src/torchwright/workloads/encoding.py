"""Running an encoder whose calls have a few fixed shapes on batches of any size and raggedness.

Needs neither transformers nor the model's code, so that an artifact answers as soon as its compiled calls are
loaded. Rows never see each other in an encoder, so they may be sorted, grouped and padded as suits the shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from torchwright.errors import WorkloadError
from torchwright.workloads.base import Case, Run
from torchwright.workloads.generation import need_tokenizer

Shapes = tuple[tuple[int, int], ...]
"""(rows, tokens) of each call."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The fixed shapes (rows, tokens) of an encoder's calls, and the token that fills what is left of them."""

    shapes: Shapes
    pad: int = 0
    prompt: str = ""
    """What is put before every text."""
    cut: int | None = None
    """The model's own limit in tokens, at which it cuts texts; None where it knows none."""
    part: str = "."
    """Where the tokenizer lies inside the model's folder."""

    @property
    def tokens(self) -> int:
        """The longest row that fits."""
        return max(T for _, T in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        shapes = [list(shape) for shape in self.shapes]
        return {"shapes": shapes, "pad": self.pad, "prompt": self.prompt, "cut": self.cut, "part": self.part}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        return cls(
            shapes=tuple((int(B), int(T)) for B, T in data["shapes"]),
            pad=data["pad"],
            prompt=data["prompt"],
            cut=data["cut"],
            part=data["part"],
        )

    def plan(self, lengths: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """Every row in one call: (shape, its rows), longest rows first, each call in the tightest shape for them.

        Raises `WorkloadError` for a row that is longer than every shape.
        """
        left = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        if left and lengths[left[0]] > self.tokens:
            raise WorkloadError(
                f"a row of {lengths[left[0]]} tokens is longer than this model was optimized for",
                allowed=f"{self.tokens} tokens",
                next=f"optimize again with tokens={lengths[left[0]]}, or cut the row",
            )
        calls: list[tuple[tuple[int, int], list[int]]] = []
        while left:
            tightest = min(T for _, T in self.shapes if lengths[left[0]] <= T)
            fitting = sorted(B for B, T in self.shapes if tightest == T)
            B = next((B for B in fitting if len(left) <= B), fitting[-1])
            calls.append(((B, tightest), left[:B]))
            left = left[B:]
        return calls


def split(lengths: Sequence[int], count: int, multiple: int) -> Shapes:
    """At most `count` shapes (rows, tokens) for rows of these lengths, with the fewest padded tokens.

    Tokens are whole multiples of `multiple`, but for the longest row's own length. Exact, by dynamic programming
    over the distinct lengths.
    """
    longest = max(lengths)
    rounded = Counter(min(longest, -(-length // multiple) * multiple) for length in lengths)
    tokens = sorted(rounded)
    below = list(accumulate((rounded[T] for T in tokens), initial=0))
    # best[j]: the fewest padded tokens, and the shapes, for all rows up to the j-th distinct length.
    best: list[tuple[int, Shapes]] = [(below[j + 1] * T, ((below[j + 1], T),)) for j, T in enumerate(tokens)]
    for _ in range(count - 1):
        more = []
        for j, T in enumerate(tokens):
            choices = [best[j]]
            for i in range(j):
                rows = below[j + 1] - below[i + 1]
                choices.append((best[i][0] + rows * T, (*best[i][1], (rows, T))))
            more.append(min(choices))
        best = more
    return best[-1][1]


class Batcher:
    """Makes any call (ids_BT, mask_BT) out of calls in the layout's shapes; rows come back in their order.

    A call that has one of the shapes already is passed on as it is.
    """

    def __init__(self, run: Run, layout: Layout) -> None:
        self._run, self.layout = run, layout

    def __call__(self, case: Case) -> torch.Tensor:
        ids_BT, mask_BT = case.args
        if tuple(ids_BT.shape) in self.layout.shapes:
            return self._run(case)
        calls = fixed_calls(case.name, self.layout, ids_BT, mask_BT)
        outputs_BE = torch.cat([self._run(call)[: len(rows_N)] for call, rows_N in calls])
        order_B = torch.cat([rows_N for _, rows_N in calls])
        return torch.empty_like(outputs_BE).index_copy_(0, order_B, outputs_BE)


def fixed_calls(
    name: str, layout: Layout, ids_BT: torch.Tensor, mask_BT: torch.Tensor
) -> list[tuple[Case, torch.Tensor]]:
    """A batch as calls in the layout's shapes, each with the rows that it answers.

    Raises `WorkloadError` for an empty batch, a row without tokens, or one that is padded at its left.
    """
    if ids_BT.ndim != 2 or ids_BT.shape != mask_BT.shape or not ids_BT.numel():
        raise WorkloadError(
            "input_ids and attention_mask do not make a batch",
            found=f"{list(ids_BT.shape)} and {list(mask_BT.shape)}",
            allowed="two equal shapes (rows, tokens) with at least one row",
        )
    lengths_B = mask_BT.sum(1)
    if not torch.equal(
        mask_BT.bool(), torch.arange(mask_BT.shape[1], device=mask_BT.device) < lengths_B[:, None]
    ):
        raise WorkloadError("the attention mask has gaps", allowed="rows padded at their right end only")
    lengths = lengths_B.tolist()
    if not all(lengths):
        raise WorkloadError(
            f"row {lengths.index(0)} has no tokens", allowed="at least one token in every row"
        )
    calls = []
    for (B, T), rows in layout.plan(lengths):
        rows_N = torch.tensor(rows, device=ids_BT.device)
        # A call with room for more rows repeats its first one: an empty row would be NaN, which scales that are
        # shared by a whole tensor would spread to the others.
        take_B = rows_N if len(rows) == B else torch.cat([rows_N, rows_N[:1].expand(B - len(rows))])
        width = min(T, ids_BT.shape[1])
        ids, mask = ids_BT.new_full((B, T), layout.pad), mask_BT.new_zeros((B, T))
        ids[:, :width], mask[:, :width] = ids_BT[take_B, :width], mask_BT[take_B, :width]
        calls.append((Case(name=name, args=(ids, mask)), rows_N))
    return calls


class Encoder:
    """Embeds texts or token ids with an encoder's fixed calls.

    `encode` takes one text or many; calling it takes (input_ids, attention_mask) of any batch that fits.
    """

    def __init__(self, run: Run, layout: Layout, folder: Path | None, device: str = "cpu") -> None:
        self._run, self.layout, self._folder, self._device = Batcher(run, layout), layout, folder, device
        self._tokenizer: Any = None

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings (N, E) in float32 of token ids (N, T), padded at their right end.

        Raises `WorkloadError` for a batch that is empty, padded at its left, or longer than was optimized for.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self._run(Case(name="encode", args=(input_ids, mask)))

    def encode(self, texts: str | Sequence[str]) -> torch.Tensor:
        """Embeddings (N, E) of texts, or (E,) of one; texts are cut at the model's own limit.

        Raises `WorkloadError` for no texts, or one that is longer than was optimized for.
        """
        many = [texts] if isinstance(texts, str) else list(texts)
        if not many or not all(isinstance(text, str) for text in many):
            raise WorkloadError("there is nothing to encode", allowed="a text or a list of texts")
        if self._tokenizer is None:
            if self._folder is None:
                raise WorkloadError(
                    "this model has no tokenizer", next="pass input_ids and attention_mask instead"
                )
            self._tokenizer = plain_tokenizer(self._folder / self.layout.part, self.layout.cut)
        rows = [e.ids for e in self._tokenizer.encode_batch([self.layout.prompt + text for text in many])]
        ids_BT, mask_BT = padded(rows, self.layout.pad)
        embeddings_NE = self(ids_BT.to(self._device), mask_BT.to(self._device))
        return embeddings_NE[0] if isinstance(texts, str) else embeddings_NE


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) padded at the right to the longest row, and their attention mask (B, T) of ones and zeros."""
    ids_BT = torch.full((len(rows), max(map(len, rows))), pad)
    mask_BT = torch.zeros_like(ids_BT)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
    return ids_BT, mask_BT


def plain_tokenizer(folder: Path, cut: int | None) -> Any:
    """The folder's tokenizer without the padding that its file may ask for, cutting texts at `cut` tokens.

    Raises `ModelError` where the folder has none.
    """
    tokenizer = need_tokenizer(folder)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if cut is not None:
        tokenizer.enable_truncation(cut)
    return tokenizer
