"""The user's interface to an artifact that reads text: embeddings, or a classifier's answers.

Needs neither transformers nor the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.hub.folder import find_object
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.workloads.base import Case, Run
from torchwright.workloads.rows import Batcher, RowShapes, fixed_calls, inputs_of

Activation = Literal["none", "sigmoid", "softmax"]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda logits_NC: logits_NC,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits_NC: logits_NC.softmax(1),
}
SCORE_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}
"""By the last name of PyTorch's class."""


@dataclass(frozen=True)
class Labels:
    """The labels of a classifier's logits."""

    names: list[str]
    """By their index."""
    activation: Activation
    """The function that turns logits into probabilities."""


@runtime_checkable
class TextAnswerer(Protocol):
    """The interface that the server needs of a text model: answers for whole texts, as vectors or as label logits."""

    layout: RowShapes
    tokens: Tokens

    def by_call(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, special: bool = True
    ) -> Iterator[tuple[list[int], torch.Tensor, int]]:
        """The answers to texts, or to texts with their pairs, as each call brings them.

        That is (places of n texts, their rows (n, C), tokens). `special` says whether the tokens are put around a text
        that the model expects there.
        """
        ...

    def labels(self) -> Labels | None:
        """The labels of a row's columns; None if a row is a vector."""
        ...

    def score_activation(self) -> Activation:
        """The function that turns a row's one logit into a score."""
        ...


class TextEmbedder:
    """Embeds texts or token ids with an encoder's fixed calls.

    `encode` takes one text or many; calling it takes (input_ids, attention_mask) of any batch that fits.
    """

    def __init__(self, run: Run, layout: RowShapes, folder: Path | None, device: str = "cpu") -> None:
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

    def by_call(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, special: bool = True
    ) -> Iterator[tuple[list[int], torch.Tensor, int]]:
        """Yield the results of `encode` per fixed call: (places of n texts, embeddings (n, E), tokens).

        Raises `WorkloadError` as `encode` does, before the first.
        """
        case = Case(name="encode", args=tuple(self.tokens.of(_many(texts), pairs, special=special).values()))
        for places, vectors_BE, tokens in _by_call(self._run, case, self.layout):
            yield places, vectors_BE[: len(places)], tokens

    def labels(self) -> None:
        """None: it embeds."""

    def score_activation(self) -> Activation:
        """Always `none`, because a vector is not a score."""
        return "none"


class TextModel:
    """Answers as a text model of transformers does, with its fixed calls.

    Calling it takes (input_ids, attention_mask, token_type_ids) of any batch that fits and returns the tensors of its
    output by name; `classify` takes texts.
    """

    def __init__(
        self, run: Run, layout: RowShapes, folder: Path | None, reads: Sequence[str], device: str = "cpu"
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
        """Return float32 outputs of right-padded token ids (N, T): `logits` (N, C) or (N, T, C), ….

        Raises `WorkloadError` for a batch that is empty, left-padded, or longer than was optimized for, and for
        segments (token_type_ids) where the model has only one.
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
        """Return the likeliest label of each text, or of each text with its pair: {"label": …, "score": …}.

        Scores are probabilities: softmax, or the logistic function where labels do not exclude each other or there is
        only one. A regression's scores are its raw outputs. Texts are truncated at the model's own limit. One text
        gives one answer, several a list.

        Raises `WorkloadError` for an empty list of texts, and for another number of pairs than of texts. So it does
        for a longer text than was optimized for, and for a model that answers per token.
        """
        inputs = self._inputs(_many(texts), None if pairs is None else _many(pairs))
        logits_NC = self(**inputs)["logits"].float()
        labels = self.labels(logits_NC.shape[1])
        scores_NC = ACTIVATIONS[labels.activation](logits_NC)
        best_N = scores_NC.argmax(1).tolist()
        answers = [
            {"label": labels.names[index], "score": float(row_C[index])}
            for index, row_C in zip(best_N, scores_NC, strict=True)
        ]
        return answers[0] if isinstance(texts, str) else answers

    def by_call(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, special: bool = True
    ) -> Iterator[tuple[list[int], torch.Tensor, int]]:
        """Logits of texts, or of texts with their pairs, by call: (places of n texts, logits (n, C), tokens).

        `special` says whether the tokens are put around a text that the model expects there. Raises `WorkloadError` as
        `classify` does, before the first.
        """
        inputs = self._inputs(_many(texts), None if pairs is None else _many(pairs), special=special)
        case = Case(name="forward", kwargs={name: inputs[name] for name in self._reads})
        for places, outputs, tokens in _by_call(self._run, case, self.layout):
            yield places, outputs["logits"][: len(places)].float(), tokens

    def labels(self, count: int | None = None) -> Labels:
        """Return the labels of the logits; `count` is their number where the caller has seen some."""
        config = self._config()
        named = config.get("id2label") or {}
        count = count or len(named) or int(config.get("num_labels") or 2)
        kind = config.get("problem_type")
        several = count > 1 and kind != "multi_label_classification"
        activation = "none" if kind == "regression" else "softmax" if several else "sigmoid"
        names = [named.get(str(index), f"LABEL_{index}") for index in range(count)]
        return Labels(names=names, activation=activation)

    def score_activation(self) -> Activation:
        """Return the activation for a cross-encoder's one logit, as sentence-transformers defines it.

        Raises `ModelError` for any that is neither the logistic function nor none.
        """
        config = self._config()
        name = (
            self._config("config_sentence_transformers.json").get("activation_fn")
            or (config.get("sentence_transformers") or {}).get("activation_fn")
            or config.get("sbert_ce_default_activation_function")
            or "Sigmoid"
        )
        found = SCORE_ACTIVATIONS.get(str(name).rpartition(".")[2])
        if found is None:
            raise ModelError(
                f"{self._folder} makes scores of its logits in a way that is not known",
                found=str(name)[:80],
                allowed=", ".join(SCORE_ACTIVATIONS),
            )
        return found

    def _inputs(
        self, texts: list[str], pairs: list[str] | None, *, special: bool = True
    ) -> dict[str, torch.Tensor]:
        if self.layout.tokenwise:
            raise WorkloadError(
                "this model does not answer for a text as a whole",
                next="call it with input_ids and attention_mask: it answers for each token",
            )
        if pairs is not None and len(pairs) != len(texts):
            raise WorkloadError(f"{len(texts)} texts have {len(pairs)} pairs", allowed="one for each")
        return self.tokens.of(texts, pairs, special=special)

    def _config(self, name: str = "config.json") -> dict[str, Any]:
        assert self._folder is not None  # its tokenizer has been read from there
        return find_object(self._folder / name)


class Tokens:
    """Texts as a batch of token ids by the tokenizer of a folder, which is read when it is first needed."""

    def __init__(self, layout: RowShapes, folder: Path | None, reads: Sequence[str], device: str) -> None:
        self._layout, self._folder, self._reads, self._device = layout, folder, reads, device

    @cached_property
    def tokenizer(self) -> Any:
        """Raise `WorkloadError` if the folder is missing, and `ModelError` if the folder has no tokenizer."""
        if self._folder is None:
            raise WorkloadError(
                "this model has no tokenizer", next="pass input_ids and attention_mask instead"
            )
        return plain_tokenizer(self._folder / self._layout.part, self._layout.cut)

    def of(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, special: bool = True
    ) -> dict[str, torch.Tensor]:
        """The tensors (N, T) that the model reads, by the names of transformers; raises as `tokenizer` does."""
        texts = [self._layout.prompt + text for text in texts]
        read = texts if pairs is None else list(zip(texts, pairs, strict=True))
        rows = self.tokenizer.encode_batch(read, add_special_tokens=special)
        ids_BT, mask_BT = padded([row.ids for row in rows], self._layout.pad)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if "token_type_ids" in self._reads:
            inputs["token_type_ids"], _ = padded([row.type_ids for row in rows], 0)
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}


def _by_call(run: Run, case: Case, layout: RowShapes) -> Iterator[tuple[list[int], Any, int]]:
    """The calls that answer one of any size: (places of n of its rows, the output for at least these, their tokens)."""
    lengths_N = inputs_of(case)[1].sum(1)
    for call, rows_n in fixed_calls(case, layout):
        yield rows_n.tolist(), run(call), int(lengths_N[rows_n].sum())


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
    tokenizer = open_tokenizer(folder)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if cut is not None:
        tokenizer.enable_truncation(cut)
    return tokenizer
