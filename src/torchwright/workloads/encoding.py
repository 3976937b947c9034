"""What a user calls of an artifact that reads text: embeddings, or the answers of a classifier.

Needs neither transformers nor the model's code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchwright.errors import WorkloadError
from torchwright.workloads.base import Case, Run
from torchwright.workloads.generation import need_tokenizer
from torchwright.workloads.rows import Batcher, Layout, fixed_calls


class Encoder:
    """Embeds texts or token ids with an encoder's fixed calls.

    `encode` takes one text or many; calling it takes (input_ids, attention_mask) of any batch that fits.
    """

    def __init__(self, run: Run, layout: Layout, folder: Path | None, device: str = "cpu") -> None:
        self._run, self.layout = Batcher(run, layout), layout
        self.tokens = Tokens(layout, folder, ("input_ids", "attention_mask"), device)

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
        embeddings_NE = self(**self.tokens.of(_many(texts)))
        return embeddings_NE[0] if isinstance(texts, str) else embeddings_NE

    def by_call(self, texts: Sequence[str]) -> Iterator[tuple[list[int], torch.Tensor, int]]:
        """What `encode` gives, as each of the fixed calls brings it: (places of n texts, embeddings (n, E), tokens).

        Raises `WorkloadError` as `encode` does, before the first.
        """
        inputs = self.tokens.of(_many(texts))
        lengths_N = inputs["attention_mask"].sum(1)
        for call, rows_n in fixed_calls(Case(name="encode", args=tuple(inputs.values())), self.layout):
            yield rows_n.tolist(), self._run(call)[: len(rows_n)], int(lengths_N[rows_n].sum())


class TextModel:
    """Answers as a text model of transformers does, with its fixed calls.

    Calling it takes (input_ids, attention_mask, token_type_ids) of any batch that fits and returns the tensors of its
    output by name; `classify` takes texts.
    """

    def __init__(
        self, run: Run, layout: Layout, folder: Path | None, reads: Sequence[str], device: str = "cpu"
    ) -> None:
        self._run, self.layout = Batcher(run, layout), layout
        self._folder, self._reads = folder, tuple(reads)
        self.tokens = Tokens(layout, folder, reads, device)

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs in float32 of token ids (N, T), padded at their right end: `logits` (N, C) or (N, T, C), ….

        Raises `WorkloadError` for a batch that is empty, padded at its left, or longer than was optimized for, and
        for segments (token_type_ids) where the model has one.
        """
        if token_type_ids is not None and "token_type_ids" not in self._reads and token_type_ids.any():
            raise WorkloadError(
                "token_type_ids tell segments apart that this model does not know", next="leave them out"
            )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids) if attention_mask is None else attention_mask,
            "token_type_ids": torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids,
        }
        return self._run(Case(name="forward", kwargs={name: inputs[name] for name in self._reads}))

    def classify(
        self, texts: str | Sequence[str], pairs: str | Sequence[str] | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The likeliest label of each text, or of each text with its pair: {"label": …, "score": …}.

        Scores are probabilities, by softmax, or by the logistic function where labels do not exclude each other or
        there is one. Texts are cut at the model's own limit. One text gives one answer, several a list.

        Raises `WorkloadError` for no texts, other than one pair for each, or a text that is longer than was optimized
        for, and for a model that answers for each token.
        """
        if self.layout.tokenwise:
            raise WorkloadError(
                "this model does not answer for a text as a whole",
                next="call it with input_ids and attention_mask: it answers for each token",
            )
        many, others = _many(texts), None if pairs is None else _many(pairs)
        if others is not None and len(others) != len(many):
            raise WorkloadError(f"{len(many)} texts have {len(others)} pairs", allowed="one for each")
        logits_NC = self(**self.tokens.of(many, others))["logits"].float()
        labels, exclusive = self._labels(logits_NC.shape[1])
        scores_NC = logits_NC.softmax(1) if exclusive else logits_NC.sigmoid()
        best_N = scores_NC.argmax(1).tolist()
        answers = [
            {"label": labels[index], "score": float(row_C[index])}
            for index, row_C in zip(best_N, scores_NC, strict=True)
        ]
        return answers[0] if isinstance(texts, str) else answers

    def _labels(self, count: int) -> tuple[list[str], bool]:
        """The labels by their index, and whether one excludes the others."""
        assert self._folder is not None  # its tokenizer has been read from there
        config = json.loads((self._folder / "config.json").read_text("utf-8"))
        named = config.get("id2label") or {}
        exclusive = count > 1 and config.get("problem_type") != "multi_label_classification"
        return [named.get(str(index), f"LABEL_{index}") for index in range(count)], exclusive


class Tokens:
    """Texts as a batch of token ids by the tokenizer of a folder, which is read when it is first needed."""

    def __init__(self, layout: Layout, folder: Path | None, reads: Sequence[str], device: str) -> None:
        self._layout, self._folder, self._reads, self._device = layout, folder, reads, device

    @cached_property
    def tokenizer(self) -> Any:
        """Raises `WorkloadError` where there is no folder, and `ModelError` where it has no tokenizer."""
        if self._folder is None:
            raise WorkloadError(
                "this model has no tokenizer", next="pass input_ids and attention_mask instead"
            )
        return plain_tokenizer(self._folder / self._layout.part, self._layout.cut)

    def of(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors (N, T) that the model reads, by the names of transformers; raises as `tokenizer` does."""
        texts = [self._layout.prompt + text for text in texts]
        rows = self.tokenizer.encode_batch(texts if pairs is None else list(zip(texts, pairs, strict=True)))
        ids_BT, mask_BT = padded([row.ids for row in rows], self._layout.pad)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if "token_type_ids" in self._reads:
            inputs["token_type_ids"], _ = padded([row.type_ids for row in rows], 0)
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}


def _many(texts: str | Sequence[str]) -> list[str]:
    many = [texts] if isinstance(texts, str) else list(texts)
    if not many or not all(isinstance(text, str) for text in many):
        raise WorkloadError("there is nothing to read", allowed="a text or a list of texts")
    return many


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
