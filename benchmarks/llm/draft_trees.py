"""The most that trees of draft tokens could bring over chains, by measured acceptance and measured costs.

    python -m benchmarks.llm.draft_trees [--model DIR] [--folder DIR] [--texts 48] [--quantize none w4a8] [--costs DIR]

The target (the bundled model without --model) writes texts at temperature 0 and 0.8. The EAGLE-3 head that
`benchmarks.llm.drafts --folder DIR` has trained proposes along them. The rank of each token among its likeliest is
counted, by depth and by the rank of the token before. A proposal is accepted where it is the token that the sampler
draws. So these shares are what a served tree of that shape would accept.

The engine times the target by rows and the draft by calls; with --costs the model in another folder, with a head of
random weights. A table that was measured elsewhere is given as --verify 1 0.98 1.38 2.17 4.6, the times of 1, 2, 4, 8
and 16 rows, and --call 0.1, the time of a draft's call. For each table of costs the script looks for the chain and
for the tree of the most tokens per second: of all shapes, and for a tree that may take another shape at each step by
the head's own probability for its first token. `free draft` counts the draft's calls as nothing, which favours trees.
It is a bound: the attention that a tree needs, and copies of pages, would cost on top of the rows.
"""

from __future__ import annotations

import heapq
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run
from benchmarks.llm.drafts import trained
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import load_draft
from torchwright.serve.engine.acceptance import RowCosts
from torchwright.serve.engine.draft import MEASURED_ROWS, DraftCosts, measure_costs
from torchwright.serve.engine.draft_bench import cut
from torchwright.train.draft.config import HeadSection
from torchwright.train.draft.files import file_tensors, new_head, started_head, write_head
from torchwright.train.draft.target import TargetModel

PROMPT, NEW = 64, 128
DEPTH, RANKS = 6, 6
"""Proposals behind each other, and children of a node, at most."""
NODES = 15
"""Proposals of a tree, so that a step has 16 rows with the last token's."""
BINS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.01)
"""Bounds of the head's probability for its first token, by which a tree may choose its shape."""
HEAD_TOKENS = 1024
"""Tokens that a head of random weights can propose."""
MEASURED = 15
"""Measurements of the costs."""
ROUNDS = 30
"""Steps of the search for the best rate, which converges in a few."""


@dataclass(frozen=True)
class Shape:
    """A set of proposals: the expected accepted ones, and the nodes that the draft expands at each depth."""

    nodes: int
    accepted: float
    expanded: tuple[int, ...]

    def seconds(self, costs: DraftCosts) -> float:
        """Return the time of a step: the target's rows, and a call of the draft for each depth."""
        return costs.verify(1 + self.nodes) + sum(costs.draft(count) for count in self.expanded)


class Ranks:
    """Counts of the rank that the next token had among the head's likeliest, RANKS standing for none of them."""

    def __init__(self) -> None:
        self.counts = torch.zeros(len(BINS) - 1, DEPTH, RANKS, RANKS + 1)
        """By the bin of the first probability, depth, rank of the token before (0 at depth 0), and rank."""

    def add(self, bins_N: torch.Tensor, rank_ND: torch.Tensor) -> None:
        """Count chains: a place counts at each depth up to the first token that no child would be."""
        before_N, lives_N = torch.zeros_like(bins_N), torch.ones_like(bins_N, dtype=torch.bool)
        for depth in range(DEPTH):
            rank_N = rank_ND[:, depth]
            here = lives_N.nonzero()[:, 0]
            place = (bins_N[here], torch.full_like(here, depth), before_N[here], rank_N[here])
            self.counts.index_put_(place, torch.ones(len(here)), accumulate=True)
            lives_N &= rank_N < RANKS
            before_N = rank_N.clamp(max=RANKS - 1)

    def shares(self, bins: Sequence[int]) -> torch.Tensor:
        """Return the share (depth, rank before, rank) over some bins; what was never seen is never right."""
        counts = self.counts[list(bins)].sum(0)
        return (counts / counts.sum(-1, keepdim=True).clamp(min=1))[..., :RANKS]


def shapes(shares: torch.Tensor, width: int) -> list[Shape]:
    """The best set of each size: nodes by falling probability, which their children never exceed."""
    found, accepted = [Shape(0, 0.0, ())], 0.0
    expanded = [0] * (DEPTH + 1)
    heap: list[tuple[float, int, int, int, int]] = []
    count = 0

    def push(value: float, depth: int, before: int, parent: int) -> None:
        if depth < DEPTH:
            for rank in range(width):
                heapq.heappush(heap, (-value * float(shares[depth, before, rank]), depth, rank, parent, 0))

    push(1.0, 0, 0, 0)
    parents: set[int] = set()
    while heap and count < NODES:
        value, depth, rank, parent, _ = heapq.heappop(heap)
        count += 1
        accepted -= value
        if parent not in parents:
            parents.add(parent)
            expanded[depth] += 1
        found.append(Shape(count, accepted, tuple(each for each in expanded if each)))
        push(-value, depth + 1, rank, count)
    return found


def best_rate(choices: Sequence[tuple[float, list[Shape]]], costs: DraftCosts) -> tuple[float, list[Shape]]:
    """Most tokens per second if each case, of a weight, may take its own shape (Dinkelbach's method)."""
    rate, taken = 0.0, list[Shape]()
    for _ in range(ROUNDS):
        taken = [
            max(some, key=lambda shape: 1 + shape.accepted - rate * shape.seconds(costs))
            for _, some in choices
        ]
        pairs = [(weight, shape) for (weight, _), shape in zip(choices, taken, strict=True)]
        tokens = sum(weight * (1 + shape.accepted) for weight, shape in pairs)
        rate = tokens / sum(weight * shape.seconds(costs) for weight, shape in pairs)
    return rate, taken


def main() -> int:
    options = run.options(
        __doc__,
        model=str,
        folder=str,
        texts=48,
        characters=1_000_000,
        tokens=300_000,
        quantize=["none", "w4a8"],
        costs=str,
        verify=[1.0, 1.0, 1.0, 1.0, 1.0],
        call=float,
    )
    target = Path(options.model or run.BUNDLED)
    rows = run.Rows(
        options.json,
        (
            "costs",
            "temperature",
            "draft",
            "chain",
            "tree",
            "tree over chain",
            "by confidence",
            "over its chain",
        ),
    )
    with tempfile.TemporaryDirectory() as scratch:
        head = trained(target, Path(options.folder or scratch), options.characters, options.tokens)
        ranks = {t: counted(target, head, options.texts, t) for t in (0.0, 0.8)}
        for temperature, found in ranks.items():
            first = found.shares(range(len(BINS) - 1))
            shown = [[round(float(share), 3) for share in first[0, 0]], round(float(first[1, 0, 0]), 3)]
            run.say(f"temperature {temperature}: ranks at depth 1 {shown[0]}, then first again {shown[1]}")
        if options.call is not None:
            costs = DraftCosts(RowCosts(MEASURED_ROWS, options.verify), RowCosts([1, 16], [options.call] * 2))
            for temperature, found in ranks.items():
                compare("given", temperature, found, costs, rows)
            return 0
        timed = (target, head) if options.costs is None else with_random_head(options.costs, Path(scratch))
        for quantize in options.quantize:
            costs = measured(*timed, None if quantize == "none" else quantize)
            rows.add({"costs": quantize, "verify": vars(costs.verify), "draft": vars(costs.draft)})
            for temperature, found in ranks.items():
                compare(quantize, temperature, found, costs, rows)
    return 0


def compare(quantize: str, temperature: float, found: Ranks, costs: DraftCosts, rows: run.Rows) -> None:
    everything = range(len(BINS) - 1)
    weights = found.counts[:, 0].sum((-1, -2))
    free = DraftCosts(costs.verify, RowCosts([1, 16], [0.0, 0.0]))
    for name, table in (("measured", costs), ("free draft", free)):
        rates: dict[str, tuple[float, list[Shape]]] = {}
        for kind, width in (("chain", 1), ("tree", RANKS)):
            rates[kind] = best_rate([(1.0, shapes(found.shares(everything), width))], table)
            own = [
                (float(weights[i]), shapes(found.shares([i]), width)) for i in everything if weights[i] > 0
            ]
            rates[f"{kind} by confidence"] = best_rate(own, table)
        plain = 1 / costs.verify(1)
        row: dict[str, Any] = {"costs": quantize, "temperature": temperature, "draft": name}
        row |= {kind: rate / plain for kind, (rate, _) in rates.items()}
        row["shapes"] = {kind: [shape.nodes for shape in taken] for kind, (_, taken) in rates.items()}
        chain, tree = row["chain"], row["tree"]
        by_chain, by_tree = row["chain by confidence"], row["tree by confidence"]
        cells = (f"{chain:.3f}x", f"{tree:.3f}x", f"{tree / chain:.3f}x", f"{by_tree:.3f}x")
        rows.add(row, (quantize, temperature, name, *cells, f"{by_tree / by_chain:.3f}x"))


@torch.inference_mode()
def counted(target: Path, folder: Path, texts: int, temperature: float) -> Ranks:
    """The ranks along texts that the target writes."""
    model = TargetModel(str(target), "bf16", None, "cpu")
    loaded = model.loaded
    prompts = cut(loaded.encode((run.BUNDLED / "eval.txt").read_text("utf-8")), PROMPT)[:texts]
    answers = loaded.generate(prompts, max_new_tokens=NEW, temperature=temperature, stop=[], seed=1)
    ids_BT = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    head, _ = started_head(str(folder), model)
    found = Ranks()
    labels_BT = torch.zeros_like(ids_BT)
    for row_BT, label_BT in zip(ids_BT.split(8), labels_BT.split(8), strict=True):
        states = model.hidden_states(head.config.observed, row_BT, label_BT, None)
        positions = torch.arange(row_BT.shape[1])[None]
        ranks, bins = list[torch.Tensor](), torch.empty(0)
        counts = row_BT.shape[1] - DEPTH - 1
        for step, hidden_BTE in enumerate(head.chains(row_BT, states.observed_BTF, positions, None, DEPTH)):
            chances_BTD = head.answer(hidden_BTE).float().softmax(-1)
            top = chances_BTD.topk(RANKS, -1)
            wanted_BT = row_BT.roll(-2 - step, 1)
            hits = head.ids[top.indices] == wanted_BT[..., None]
            rank_BT = torch.where(hits.any(-1), hits.int().argmax(-1), RANKS)
            ranks.append(rank_BT[:, PROMPT:counts].flatten())
            if step == 0:
                bins = torch.bucketize(top.values[..., 0].contiguous(), torch.tensor(BINS[1:-1]), right=True)
                bins = bins[:, PROMPT:counts].flatten()
        found.add(bins, torch.stack(ranks, 1))
    return found


def with_random_head(folder: str, scratch: Path) -> tuple[Path, Path]:
    """A model's folder, and that of a head for it."""
    target = TargetModel(folder, "bf16", None, "cpu")
    ids_D = np.arange(min(HEAD_TOKENS, target.decoder.config.vocabulary))
    head, config = new_head(HeadSection(), ids_D, target, 0)
    write_head(file_tensors(head, target, torch.bfloat16), config, scratch / "random-head")
    return Path(folder), scratch / "random-head"


def measured(target: Path, head: Path, quantize: str | None) -> DraftCosts:
    """The engine's own measurement of a target and its draft, the least of several: a bound wants no noise."""
    loaded = load_decoder(target, torch.bfloat16, quantize)
    draft = load_draft(head, loaded, quantize)
    cache = PagedCache(loaded.config, pages=64, dtype=loaded.kv_dtype, draft=draft.page_shapes)
    with loaded.on_threads():
        found = [measure_costs(loaded.decoder, draft, cache) for _ in range(MEASURED)]
    return DraftCosts(*(_least([getattr(costs, name) for costs in found]) for name in ("verify", "draft")))


def _least(costs: Sequence[RowCosts]) -> RowCosts:
    seconds = [min(times) for times in zip(*(each.seconds for each in costs), strict=True)]
    return RowCosts(costs[0].rows, seconds)


if __name__ == "__main__":
    sys.exit(main())
