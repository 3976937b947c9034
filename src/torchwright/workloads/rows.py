"""Running a model that reads rows of text in calls of a few fixed shapes, on batches of any size and raggedness.

Needs neither transformers nor the model's code, so that an artifact answers as soon as its compiled calls are
loaded. The rows never see each other, so they may be sorted, grouped and padded as suits the shapes.

Every input of such a call is a tensor (rows, tokens): token ids, the attention mask, then what else the model reads.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.json_file import typed
from torchwright.workloads.base import Case, Run, Workload, check_sizes

Shapes = tuple[tuple[int, int], ...]
"""(rows, tokens) of each call."""
LARGEST = 2**31
"""A dynamic dimension in a layout."""


@dataclass(frozen=True, kw_only=True)
class RowShapes:
    """The fixed shapes (rows, tokens) of an encoder's calls, and the token that fills what is left of them."""

    shapes: Shapes
    pad: int = 0
    prompt: str = ""
    """The prefix of every text."""
    cut: int | None = None
    """The model's own limit in tokens, at which it cuts texts; None where it knows none."""
    part: str = "."
    """The tokenizer's location inside the model's folder."""
    tokenwise: bool = False
    """True if the answer to a row has one or more values for each of its tokens."""

    @property
    def tokens(self) -> int:
        """The longest row that fits."""
        return max(T for _, T in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def from_dict(cls, data: Any) -> RowShapes:
        """Read the result of `as_dict`; raises `ArtifactError` for anything else, since the file may be untrusted."""
        found = typed(data, cls, "the layout of rows")
        sizes = [size for shape in found.shapes for size in shape]
        cut = 1 if found.cut is None else found.cut
        parts = found.part.split("/")
        if not (sizes and all(0 < size <= LARGEST for size in (*sizes, cut)) and abs(found.pad) <= LARGEST):
            raise ArtifactError("the layout of rows is damaged", found=f"shapes {str(found.shapes)[:80]}")
        if found.part != "." and not all(part and part not in (".", "..") for part in parts):
            raise ArtifactError("the layout of rows is damaged", found=f"a tokenizer in {found.part[:80]!r}")
        return found

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
    """Makes any call out of calls in the layout's shapes; rows come back in their order.

    A call that has one of the shapes already is passed on as it is. Answers for each token are zero beyond a row's
    own call.
    """

    def __init__(self, run: Run, layout: RowShapes) -> None:
        self._run, self.layout = run, layout

    def __call__(self, case: Case) -> Any:
        shape = tuple(inputs_of(case)[0].shape)
        if shape in self.layout.shapes:
            return self._run(case)
        calls = fixed_calls(case, self.layout)
        rows, width = shape
        outputs = [self._run(call) for call, _ in calls]
        order = [rows_N for _, rows_N in calls]
        return nested.map_leaves(lambda *parts: self._joined(parts, order, rows, width), *outputs)

    def _joined(
        self, parts: Sequence[torch.Tensor], order: Sequence[torch.Tensor], rows: int, width: int
    ) -> torch.Tensor:
        skip = 2 if self.layout.tokenwise else 1
        joined = parts[0].new_zeros(*(rows, width)[:skip], *parts[0].shape[skip:])
        for part, rows_N in zip(parts, order, strict=True):
            if self.layout.tokenwise:
                tokens = min(width, part.shape[1])
                joined[rows_N, :tokens] = part[: len(rows_N), :tokens]
            else:
                joined[rows_N] = part[: len(rows_N)]
        return joined


class Pieces:
    """Answers calls of any batch size by calls of exactly `B` rows: whole ones, and one that is padded or overlaps."""

    def __init__(self, run: Callable[[list[torch.Tensor]], Any], batched: Sequence[int], B: int) -> None:
        self._run, self._batched, self._B = run, frozenset(batched), B

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        rows, B = tensors[min(self._batched)].shape[0], self._B
        # The last call begins early, where there are rows for it: computing some twice is cheaper than copying all.
        starts = [min(start, max(0, rows - B)) for start in range(0, max(rows, 1), B)]
        outputs = [
            self._run([self._rows(t, start) if i in self._batched else t for i, t in enumerate(tensors)])
            for start in starts
        ]
        return nested.map_leaves(lambda *parts: self._joined(parts, starts, rows), *outputs)

    def _rows(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        taken = tensor[start : start + self._B]
        return taken if len(taken) == self._B else filled(taken, self._B)

    def _joined(self, parts: Sequence[Any], starts: Sequence[int], rows: int) -> Any:
        first = parts[0]
        if not isinstance(first, torch.Tensor):
            return first
        # As the original lays its answer out: in the order of the parts' dimensions, without gaps.
        order = sorted(range(first.dim()), key=lambda dim: -first.stride(dim))
        if len(parts) == 1 and (rows == len(first) or order[0] == 0):
            return first[:rows]
        back = sorted(range(first.dim()), key=lambda place: order[place])
        shape = (rows, *first.shape[1:])
        joined = first.new_empty([shape[dim] for dim in order]).permute(back)
        if len(parts) == 1:
            return joined.copy_(first[:rows])
        for part, start in zip(parts, starts, strict=True):
            joined[start : start + self._B] = part
        return joined


def filled(tensor: torch.Tensor, B: int) -> torch.Tensor:
    """Pad a tensor to `B` rows with copies of its first row, or with zeros if it has none.

    An empty row among others would be NaN in some models, which scales that are shared by a whole tensor would spread.
    """
    if not len(tensor):
        return tensor.new_zeros((B, *tensor.shape[1:]))
    return torch.cat([tensor, tensor[:1].expand(B - len(tensor), *tensor.shape[1:])])


class RowsWorkload(Workload):
    """A workload of one call, whose rows of text may be taken apart."""

    _buckets: RowShapes | None = None

    @abstractmethod
    def whole(self) -> RowShapes | None:
        """The layout that runs the whole batch at once, or None for a model whose rows cannot be taken apart."""

    @property
    def layout(self) -> RowShapes | None:
        """The shapes of the calls."""
        return self._buckets or self.whole()

    def graphs(self, dtype: torch.dtype) -> list[Case]:
        (case,) = self.cases(dtype)
        if self._buckets is None or len(self._buckets.shapes) == 1:
            return [case]
        calls = [call for call, _ in fixed_calls(case, self._buckets)]
        return [replace(call, name=f"{case.name} {tuple(inputs_of(call)[0].shape)}") for call in calls]

    @classmethod
    def front(cls, run: Run, description: dict[str, Any]) -> Run:
        layout = cls.layout_of(description)
        return run if layout is None else Batcher(run, layout)

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "batch", "tokens")
        cls.layout_of(description)

    @classmethod
    def layout_of(cls, description: dict[str, Any]) -> RowShapes | None:
        """The layout that a description has, or None; raises `ArtifactError` for one that is damaged."""
        return RowShapes.from_dict(description["layout"]) if description.get("layout") else None

    def bucketed(self, count: int, multiple: int) -> Workload | None:
        """The same rows in at most `count` calls whose tokens are multiples of `multiple`."""
        if (layout := self.whole()) is None:
            return None
        other = copy.copy(self)
        other._buckets = replace(layout, shapes=split(self._lengths(), count, multiple))
        return other

    def properties(self, model: nn.Module) -> set[str]:
        return {"ragged"} if self.whole() is not None and len(set(self._lengths())) > 1 else set()

    def _lengths(self) -> list[int]:
        (case,) = self.cases(torch.float32)
        return inputs_of(case)[1].sum(1).tolist()


def inputs_of(case: Case) -> list[torch.Tensor]:
    """Token ids, the attention mask and what else the call reads, all (rows, tokens)."""
    return [*case.args, *case.kwargs.values()]


def fixed_calls(case: Case, layout: RowShapes) -> list[tuple[Case, torch.Tensor]]:
    """A call as calls in the layout's shapes, each with the rows that it answers.

    Raises `WorkloadError` for an empty batch, a row without tokens, or one that is padded at its left.
    """
    inputs = inputs_of(case)
    _check(inputs)
    ids_BT, mask_BT = inputs[:2]
    calls = []
    for (B, T), rows in layout.plan(mask_BT.sum(1).tolist()):
        rows_N = torch.tensor(rows, device=ids_BT.device)
        take_B = rows_N if len(rows) == B else filled(rows_N, B)
        width = min(T, ids_BT.shape[1])
        fitted = []
        for index, tensor_BT in enumerate(inputs):
            tensor = tensor_BT.new_full((B, T), 0 if index else layout.pad)
            tensor[:, :width] = tensor_BT[take_B, :width]
            fitted.append(tensor)
        calls.append((_with_inputs(case, fitted), rows_N))
    return calls


def _check(inputs: Sequence[torch.Tensor]) -> None:
    ids_BT, mask_BT = inputs[:2]
    if ids_BT.ndim != 2 or not ids_BT.numel() or any(tensor.shape != ids_BT.shape for tensor in inputs):
        raise WorkloadError(
            "input_ids and attention_mask do not make a batch",
            found=" and ".join(str(list(tensor.shape)) for tensor in inputs),
            allowed="equal shapes (rows, tokens) with at least one row",
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


def _with_inputs(case: Case, inputs: Sequence[torch.Tensor]) -> Case:
    named = len(inputs) - len(case.kwargs)
    return replace(
        case, args=tuple(inputs[:named]), kwargs=dict(zip(case.kwargs, inputs[named:], strict=True))
    )
