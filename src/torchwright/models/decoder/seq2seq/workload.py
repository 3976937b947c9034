"""Text models of an encoder and a decoder: a batch of sources answered token by token, judged by what is said next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, model_files, read_config
from torchwright.models.decoder.seq2seq.calls import Answers
from torchwright.models.decoder.seq2seq.pairs import Pair, padded_targets, read_pairs, reference_of, target_of
from torchwright.models.decoder.seq2seq.rules import read_rules
from torchwright.models.decoder.seq2seq.source import SourceTokenizer
from torchwright.models.decoder.seq2seq.stacks import SIDES, stack_family
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Optimized,
    Run,
    Served,
    Workload,
    batches_to_judge,
    check_sizes,
)
from torchwright.workloads.encoding import padded
from torchwright.workloads.huggingface import load_model
from torchwright.workloads.sentences import sentences
from torchwright.workloads.texts import own_text, read_texts, spread

JUDGED = 4
"""Batches by which the search judges."""


class Seq2SeqWorkload(Workload):
    """A translator or summarizer: a batch of sources through the encoder, then new tokens one at a time from a cache.

    Sources are sentences of the evaluation text. Metric: perplexity of the original's predictions over its own answers,
    which every candidate is made to give; the drop is exp(mean KL divergence) − 1. With references, a line for each
    line of the evaluation text: the growth of their perplexity, with the interval of a bootstrap over sources.
    """

    name = "seq2seq"
    supports = "T5, BART, Marian, M2M100 and NLLB, Pegasus, …ForConditionalGeneration"
    opens = frozenset({"eval_text", "reference"})

    def __init__(
        self,
        folder: str | Path,
        *,
        batch: int = 4,
        tokens: int = 64,
        new_tokens: int = 32,
        language: str | None = None,
        source_language: str | None = None,
        eval_text: str | Path | None = None,
        reference: str | Path | list[str] | None = None,
    ) -> None:
        self.folder, self.label = Path(folder), str(folder)
        described = read_config(self.folder)
        family = stack_family(described)
        if family is None:
            raise ModelError(f"{folder} holds no encoder and decoder that are known here")
        fields = Fields(self.folder / "config.json", described)
        config = {side: family.read(fields, side) for side in SIDES}
        for option, value, most in (
            ("batch", batch, 2**16),
            ("tokens", tokens, config["encoder"].context),
            ("new-tokens", new_tokens, config["decoder"].context),
        ):
            if not 1 <= value <= most:
                raise WorkloadError(f"--{option} {value}", allowed=f"1 to {most}")
        self.batch, self.tokens, self.new_tokens = batch, tokens, new_tokens
        self.language, self.source_language, self.eval_text = language, source_language, own_text(eval_text)
        self.pad = fields.integer("pad_token_id", 0, minimum=0)
        tokenizer = SourceTokenizer(self.folder)
        generation = find_object(self.folder / "generation_config.json")
        self.rules = read_rules(fields, generation, config["decoder"].vocabulary)
        if language is not None:
            self.rules = replace(self.rules, first=tokenizer.language(language))
        self.reference = reference_of(reference, self.eval_text)
        self._read(tokenizer)
        self.batches = len(self._sources.evaluation) // batch
        if self.batches < 2 or not self._sources.calibration:
            raise WorkloadError(
                "the evaluation text is too short",
                found=f"{len(self._sources.evaluation)} {'sentences' if self.reference is None else 'pairs'}",
                allowed=f"{2 * batch} and more",
                next="pass a longer --eval-text FILE",
            )
        self._targets = self._answers() if self.reference is None else {}

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return stack_family(config) is not None

    def build(self) -> nn.Module:
        return load_model(self.folder, "AutoModelForSeq2SeqLM")

    def adapt(self, model: nn.Module) -> nn.Module:
        return Answers(model)

    def original_run(self, model: nn.Module) -> Run:
        answers = Answers(model)
        return lambda case: answers(*case.args)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(0)]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(~index) for index in range(CALIBRATION_BATCHES)]

    def calibrates_apart(self) -> bool:
        return True

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "batch", "tokens", "new_tokens")

    @classmethod
    def answerer(cls, optimized: Optimized) -> None:
        """None: only the native layers generate, and the engine that runs them says so itself."""

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "translator"

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        """New tokens a second of all sources together, the sources' reading included."""
        return {"tokens_per_s": description["batch"] * description["new_tokens"] / seconds["answer"]}

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Log-probabilities (tokens, V) in float16 of what follows each token of the original's answers, or of the
        references; of these also each source's sum of losses (U,) and number of tokens (U,)."""
        found, losses, counts = [], [], []
        for index in self.sample or range(self._judged()):
            case = self._case(index)
            for logits_NV, target in zip(run(case).float(), case.args[2].tolist(), strict=True):
                length = self._length(target)
                logprobs_NV = logits_NV[:length].log_softmax(-1)
                found.append(logprobs_NV.half().cpu())
                said = torch.tensor(target[1 : length + 1], device=logprobs_NV.device)
                losses.append(-logprobs_NV[: len(said)].gather(1, said[:, None]).double().sum().cpu())
                counts.append(len(said))
        return {
            "log_probabilities": torch.cat(found),
            "losses": torch.stack(losses),
            "tokens": torch.tensor(counts),
        }

    def unseen(self) -> Self | None:
        return self.judged_after(self._judged(), min(self.batches, 2 * self._judged()))

    def compare(self, reference: Any, candidate: Any) -> Quality:
        predicted = accuracy.predictions(
            reference["log_probabilities"], candidate["log_probabilities"], self.new_tokens
        )
        if self.reference is None:
            return predicted
        said = accuracy.reference_loss(reference["tokens"], reference["losses"], candidate["losses"])
        return replace(said, extras=said.extras | predicted.extras)

    def files(self, *, weights: bool) -> dict[str, Path]:
        files = model_files(self.folder, weights=weights)
        return {name: path for name, path in files.items() if path not in (self.eval_text, self.reference)}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "batch": self.batch,
            "tokens": self.tokens,
            "new_tokens": self.new_tokens,
            "language": self.language,
            "source_language": self.source_language,
            "eval_text": str(self.eval_text) if self.eval_text else None,
            "reference": str(self.reference) if self.reference else None,
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"seq2seq", "two_stacks"}

    def _judged(self) -> int:
        return batches_to_judge(JUDGED, self.batches)

    def _length(self, target: list[int]) -> int:
        """Tokens up to the end of an answer; its start may be the same token."""
        ends = [place for place, token in enumerate(target) if place and token in self.rules.stop]
        return min([len(target), *ends])

    def _case(self, index: int) -> Case:
        args = (*self._batch(index), self._target(index))
        return Case(name="answer", args=tuple(tensor.to(self.device) for tensor in args), fixed=True)

    def _batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, attention mask), both (B, S): batch `index` of what is judged, or ~`index` of what calibrates."""
        return padded([pair.source for pair in self._pairs(index)], self.pad)

    def _target(self, index: int) -> torch.Tensor:
        """(B, N): what every candidate is made to answer to that batch."""
        if self.reference is None:
            return self._targets[index]
        targets = [pair.target for pair in self._pairs(index)]
        return torch.tensor(padded_targets(targets, self.new_tokens, self.pad))

    def _pairs(self, index: int) -> list[Pair]:
        B = self.batch
        if index < 0:
            return spread(self._sources.calibration, CALIBRATION_BATCHES * B)[~index * B :][:B]
        return self._sources.evaluation[index :: self.batches][:B]

    def _read(self, tokenizer: SourceTokenizer) -> None:
        """The sources, and the references that belong to them."""

        def source(text: str) -> list[int]:
            return tokenizer.encode(text, self.source_language)[: self.tokens]

        def pair(source_text: str, reference: str) -> Pair:
            return Pair(source(source_text), target_of(tokenizer, reference, self.rules, self.new_tokens))

        if self.reference is None:
            self._sources = read_texts(self.eval_text).map(
                lambda text: [Pair(source(sentence), []) for sentence in sentences(text)]
            )
        else:
            assert self.eval_text is not None
            self._sources = read_pairs(self.eval_text, self.reference).map(
                lambda pairs: [pair(*one) for one in pairs]
            )

    @torch.inference_mode()
    def _answers(self) -> dict[int, torch.Tensor]:
        """Return the original's answers to each batch (B, N), from their start."""
        model = Answers(self.build())
        judged = range(min(self.batches, 2 * self._judged()))
        return {
            index: model.greedy(*self._batch(index), self.new_tokens, self.rules).clone()
            for index in (*range(-CALIBRATION_BATCHES, 0), *judged)
        }
