"""Texts and pairs of texts through a sentence encoder or a classifier: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ArtifactError, TorchwrightError, WorkloadError
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.optimization.artifact.load import load
from torchwright.workloads.encoder import open_text_encoder
from torchwright.workloads.encoding import ACTIVATIONS, TextAnswerer
from torchwright.workloads.forward import open_text_model

NOT_NUMBERS = "the model's answer is not a number"
EMPTY = "the text is empty"


class TextReader:
    """An opened model of text: rows of its answer for texts, with the reason where a text has none."""

    def __init__(self, spec: TaskSpec) -> None:
        self.notices: list[str] = []
        self.model = self._open(spec)
        self.labels = self.model.labels()
        self._most = self.model.layout.tokens
        tokenizer = self.model.tokens.tokenizer  # raises where the folder has none
        if spec.options.truncate:
            tokenizer.enable_truncation(min(self._most, self.model.layout.cut or self._most))

    def read(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> Iterator[tuple[int, torch.Tensor | Rejected]]:
        """Yield (place, row of the answer) of every text; texts are sorted by their lengths within the call."""
        try:
            yield from self._rows(texts, pairs)
        except TorchwrightError as error:
            if len(texts) == 1:
                yield 0, Rejected(str(error))
                return
            # A text that the model does not take fails its whole call before anything is computed.
            yield from self._apart(texts, pairs)

    def _rows(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
        with torch.inference_mode():
            for places, rows_nC, _ in self.model.by_call(texts, pairs):
                finite_n = torch.isfinite(rows_nC).all(1).tolist()
                for place, row_C, finite in zip(places, rows_nC.cpu(), finite_n, strict=True):
                    yield place, row_C if finite else Rejected(NOT_NUMBERS)

    def _apart(
        self, texts: Sequence[str], pairs: Sequence[str] | None
    ) -> Iterator[tuple[int, torch.Tensor | Rejected]]:
        """Read the texts that fit together, and say of each other one why it does not."""
        lengths = self.lengths(texts, pairs)
        fitting = [place for place, length in enumerate(lengths) if 0 < length <= self._most]
        for place, length in enumerate(lengths):
            if length > self._most:
                yield (
                    place,
                    Rejected(
                        f"the text has {length:,} tokens, and this model takes {self._most:,}: --truncate cuts "
                        "it, or optimize again with more tokens"
                    ),
                )
            elif not length:
                yield place, Rejected("the text has no tokens")
        if len(fitting) == len(texts):  # it was something else
            for place in fitting:
                one = None if pairs is None else [pairs[place]]
                yield from ((place, row) for _, row in self.read([texts[place]], one))
        elif fitting:
            chosen = None if pairs is None else [pairs[place] for place in fitting]
            for inner, row in self.read([texts[place] for place in fitting], chosen):
                yield fitting[inner], row

    def lengths(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[int]:
        """Return the number of tokens that the model reads of each text."""
        prompt = self.model.layout.prompt
        read: Any = [prompt + text for text in texts]
        read = read if pairs is None else list(zip(read, pairs, strict=True))
        return [len(found.ids) for found in self.model.tokens.tokenizer.encode_batch(read)]

    def _open(self, spec: TaskSpec) -> TextAnswerer:
        if spec.artifact is not None:
            loaded = load(spec.artifact, trust=spec.model.trust)
            self.notices += loaded.notices
            if not isinstance(loaded.model, TextAnswerer):
                raise ArtifactError(f"{spec.artifact} does not answer for whole texts")
            return loaded.model
        self.notices.append("not optimized: `torchwright optimize` makes an artifact, which answers faster")
        folder = Path(spec.folder)
        return open_text_encoder(folder) if spec.kind == "encoder" else open_text_model(folder)


class TextTask(Task):
    """Embeds, classifies or scores texts."""

    def __init__(self, spec: TaskSpec) -> None:
        self._reader, options = TextReader(spec), spec.options
        self.notices = self._reader.notices
        assert options.text_column is not None, "the plan names the columns"
        self._text, self._pair = options.text_column, options.pair_column
        self._answer = self._maker(spec)

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        good, texts, pairs = list[int](), list[str](), list[str]()
        for place, row in enumerate(rows):
            fault = text_fault(row, self._text) or (self._pair and text_fault(row, self._pair))
            if fault:
                yield place, Rejected(fault)
                continue
            good.append(place)
            texts.append(row[self._text])
            pairs.append(row[self._pair] if self._pair else "")
        if not good:
            return
        if self._pair is not None and self._reader.labels is None:
            yield from ((good[place], found) for place, found in self._cosines(texts, pairs))
            return
        for place, row_C in self._reader.read(texts, pairs if self._pair else None):
            yield good[place], row_C if isinstance(row_C, Rejected) else self._answer(row_C)

    def _maker(self, spec: TaskSpec) -> Callable[[torch.Tensor], dict[str, Any]]:
        labels = self._reader.labels
        if spec.task == "embed" or labels is None:
            return lambda row_E: {"embedding": row_E.tolist()}
        if spec.task == "score":
            if len(labels.names) != 1:
                raise WorkloadError(
                    f"{spec.artifact or spec.folder} gives no scores: it has {len(labels.names)} labels",
                    allowed="a cross-encoder with one label, or a sentence encoder",
                    next="--task classify",
                )
            scored = ACTIVATIONS[self._reader.model.score_activation()]
            return lambda row_C: {"score": scored(row_C[None])[0, 0].item()}
        activated, names = ACTIVATIONS[labels.activation], labels.names

        def classified(row_C: torch.Tensor) -> dict[str, Any]:
            scores_C = activated(row_C[None].float())[0]
            best = int(scores_C.argmax())
            found: dict[str, Any] = {"label": names[best], "score": scores_C[best].item()}
            if spec.options.all_labels:
                found["scores"] = dict(zip(names, scores_C.tolist(), strict=True))
            return found

        return classified

    def _cosines(self, first: list[str], second: list[str]) -> Iterator[tuple[int, Answer]]:
        """Score pairs by the cosine of their embeddings; a text of several pairs is read once."""
        texts = list(dict.fromkeys([*first, *second]))
        known = {texts[place]: row for place, row in self._reader.read(texts)}
        for place, (one, two) in enumerate(zip(first, second, strict=True)):
            a_E, b_E = known[one], known[two]
            if isinstance(a_E, Rejected) or isinstance(b_E, Rejected):
                yield place, a_E if isinstance(a_E, Rejected) else b_E  # pyright: ignore[reportReturnType]
                continue
            yield place, {"score": torch.cosine_similarity(a_E.float(), b_E.float(), dim=0).item()}


def text_fault(row: dict[str, Any], column: str) -> str | None:
    """Return why a row has no text in a column; None if it has."""
    value = row.get(column)
    if isinstance(value, str):
        return None if value.strip() else EMPTY
    if value is None:
        return f"there is no '{column}'"
    return f"'{column}' is {'not a number (NaN)' if value != value else type(value).__name__}, and a text is read"
