"""Any other model of transformers: one forward pass over a made-up batch of text, pictures or sound."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.errors import ArtifactError, ModelError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files, read_config
from torchwright.workloads import accuracy
from torchwright.workloads.base import CALIBRATION_BATCHES, Case, Optimized, Run, Served, batches_to_judge
from torchwright.workloads.encoder import MODEL_TYPES
from torchwright.workloads.encoding import TextModel
from torchwright.workloads.huggingface import load_model, model_class, parameter_count
from torchwright.workloads.reading import SOUNDS, BatchReader
from torchwright.workloads.rows import RowShapes, RowsWorkload
from torchwright.workloads.texts import own_text

SAMPLE_ROWS = 512
SAMPLE_OPERATIONS = 1e12
"""The metric's sample is cut to what these operations pay for, 2 per parameter and position; 2 batches at least."""
SAMPLE_BYTES = 256 * 2**20
"""The number of outputs that are kept for the metric."""


@dataclass(frozen=True)
class Judge:
    """Outputs whose rows are compared, and how."""

    outputs: tuple[str, ...]
    compare: Callable[[torch.Tensor, torch.Tensor], Quality]


CLASSES = "SequenceClassification|TokenClassification|AudioClassification|CTC|MaskedLM|CausalLM|ConditionalGeneration"
JUDGES = (
    (rf"For({CLASSES})$|LMHeadModel$", Judge(("logits",), accuracy.enough_answers)),
    (r"ForQuestionAnswering$", Judge(("start_logits", "end_logits"), accuracy.enough_answers)),
    (r"Model$", Judge(("image_embeds", "text_embeds"), accuracy.cosine)),
    (r"Model$", Judge(("last_hidden_state",), accuracy.cosine)),
)
"""By how an architecture's name ends: the first whose outputs are all there."""
TOKENWISE = {"SequenceClassification": False, "TokenClassification": True, "QuestionAnswering": True}
"""Heads with which encoders answer row by row → whether for each token, or for the text as a whole."""


UNKNOWN_LIMIT = 512
"""Tokens of a text at most, where neither configuration nor tokenizer knows a limit."""


class ForwardWorkload(RowsWorkload):
    """A transformers model that no other kind takes: one forward pass of one batch.

    The inputs are sentences of the evaluation text, padded to the longest, synthetic pictures, synthetic sounds, or
    what its architecture combines: 8 rows, or 1 of sound. Metric: top-1 agreement with the original for classes or
    tokens, cosine similarity for embeddings, else the relative error of all outputs.
    """

    name = "forward"
    supports = "any other of transformers that reads text, pictures or sound, as one forward pass"
    leftovers = True
    opens = frozenset({"eval_text"})

    def __init__(
        self,
        folder: str | Path,
        *,
        batch: int | None = None,
        tokens: int = 64,
        eval_text: str | Path | None = None,
    ) -> None:
        self.folder, self.label = Path(folder), str(folder)
        for option, value in (("batch", batch), ("tokens", tokens)):
            if value is not None and value < 1:
                raise WorkloadError(f"{option}={value}", allowed="1 or more")
        self.eval_text = own_text(eval_text)
        config = read_config(self.folder)
        model = _class(config)
        if model is None:
            raise ModelError(
                f"transformers does not know what {self.folder} holds",
                found=", ".join(map(str, config.get("architectures") or ["no architectures in config.json"])),
            )
        self.architecture = model.__name__
        head = self.architecture.rpartition("For")[2]
        alone = config.get("model_type") in MODEL_TYPES or _reads_last_token(model, config)
        self._tokenwise = TOKENWISE.get(head) if alone else None
        self.batch = batch or (1 if model.main_input_name in SOUNDS else 8)
        self.constants = (
            {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        )
        self.reader = BatchReader(
            self.folder, config, model, batch=self.batch, tokens=tokens, text=self.eval_text
        )
        self.judges = [judge for ending, judge in JUDGES if re.search(ending, self.architecture)]

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return _class(config) is not None

    def called_as_is(self) -> bool:
        return self.layout is None

    def build(self) -> nn.Module:
        return Forward(load_model(self.folder, self.architecture), self.constants).eval()

    def whole(self) -> RowShapes | None:
        if self._tokenwise is None:
            return None
        reader = self.reader
        assert reader.sentences is not None
        return RowShapes(
            shapes=((self.batch, reader.sentences.longest),),
            pad=reader.pad,
            cut=reader.limit,
            tokenwise=self._tokenwise,
        )

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        super().check(description)
        if description.get("layout") and not isinstance(description.get("inputs"), dict):
            raise ArtifactError("a model of rows does not say what it reads")

    @classmethod
    def answerer(cls, optimized: Optimized) -> TextModel | None:
        if (layout := cls.layout_of(optimized.description)) is None:
            return None
        reads = list(optimized.description["inputs"])
        return TextModel(optimized.run, layout, optimized.folder, reads, optimized.device)

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        """A reader where it answers with logits for each text as a whole."""
        layout = cls.layout_of(description)
        classifies = str(description.get("architecture")).endswith("ForSequenceClassification")
        return "reader" if layout is not None and not layout.tokenwise and classifies else ""

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(0)]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(index, calibration=True) for index in range(CALIBRATION_BATCHES)]

    def calibrates_apart(self) -> bool:
        return True

    def observe(self, run: Run, dtype: torch.dtype) -> Any:
        """The outputs that are judged, by name and as rows (N, C), or all of all batches in a list."""
        seen: list[dict[str, torch.Tensor]] = []
        for index in self.sample or range(self._rounds()):
            case = self._case(index)
            seen.append(self._judged(run(case), case.kwargs.get("attention_mask")))
            kept = sum(tensor.nbytes for tensor in seen[0].values())
            if len(seen) >= max(2, SAMPLE_BYTES // max(1, kept)):
                break
        if self._judge(seen[0]) is None:
            return [tensor for batch in seen for tensor in batch.values()]
        return {name: torch.cat([batch[name] for batch in seen]) for name in seen[0]}

    def sampled(self) -> tuple[int, int | None]:
        return self._rounds(), self.reader.batches

    def unseen(self) -> Self | None:
        return self.judged_after(*self.sampled())

    def compare(self, reference: Any, candidate: Any) -> Quality:
        if isinstance(reference, list):
            return accuracy.relative_error(reference, candidate)
        judge = self._judge(reference)
        assert judge is not None
        before, after = (torch.cat([rows[name] for name in judge.outputs]) for rows in (reference, candidate))
        if before.shape[-1] == 1:  # one number is no choice between classes
            return accuracy.relative_error([before], [after])
        return judge.compare(before, after)

    def files(self, *, weights: bool) -> dict[str, Path]:
        files = model_files(self.folder, weights=weights)
        return {name: path for name, path in files.items() if path != self.eval_text}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "architecture": self.architecture,
            "batch": self.batch,
            "tokens": self.reader.tokens,
            "eval_text": str(self.eval_text) if self.eval_text else None,
            "inputs": {
                name: [str(value.dtype).removeprefix("torch."), *value.shape]
                for name, value in self.reader.inputs(0).items()
            },
            "layout": self.layout and self.layout.as_dict(),
        }

    def _case(self, index: int, *, calibration: bool = False) -> Case:
        inputs = self.reader.inputs(index, calibration=calibration)
        return Case(name="forward", kwargs={name: value.to(self.device) for name, value in inputs.items()})

    def _judge(self, output: dict[str, Any]) -> Judge | None:
        return next((judge for judge in self.judges if output.keys() >= set(judge.outputs)), None)

    def _judged(
        self, output: dict[str, torch.Tensor], mask_BT: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        judge = self._judge(output)
        if judge is None:
            return {name: _kept(tensor) for name, tensor in output.items()}
        rows = {}
        for name in judge.outputs:
            values = output[name]
            if mask_BT is not None and values.ndim == 3 and values.shape[:2] == mask_BT.shape:
                values = values[mask_BT.bool()]  # what stands for padding answers nothing
            rows[name] = _kept(values.reshape(-1, values.shape[-1]))
        return rows

    def _rounds(self) -> int:
        """Batches of the metric's sample."""
        operations = 2.0 * parameter_count(self.folder) * self.reader.positions * self.batch
        wanted = min(SAMPLE_ROWS / self.batch, SAMPLE_OPERATIONS / max(operations, 1.0))
        return batches_to_judge(wanted, self.reader.batches)


def open_text_model(folder: Path) -> TextModel:
    """Return a folder's classifier of text on transformers' own code, eager and in float32.

    Its calls take 1 or 8 rows of tokens in powers of two, so that short texts are not padded to the longest.
    Raises `ModelError` for a model that does not answer row by row for whole texts.
    """
    workload = ForwardWorkload(folder)
    whole = workload.whole()
    if whole is None or whole.tokenwise:
        raise ModelError(
            f"{folder} cannot be served: its rows cannot be answered for apart",
            found=f"{workload.architecture} without pad_token_id" if whole is None else workload.architecture,
            allowed="a classifier of text; a decoder that classifies needs pad_token_id in config.json",
        )
    longest = whole.cut or UNKNOWN_LIMIT
    tokens = [*(2**power for power in range(5, longest.bit_length()) if 2**power < longest), longest]
    shapes = tuple((rows, T) for T in tokens for rows in (1, workload.batch))
    model, reads = workload.build(), list(workload.reader.inputs(0))

    def run(case: Case) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return model(**case.kwargs)

    return TextModel(run, replace(whole, shapes=shapes), folder, reads)


class Forward(nn.Module):
    """A model of transformers as a plain module: forward(name=tensor, …) → the tensors of its output by name."""

    def __init__(self, model: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.constants = model, constants

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.model(**inputs, **self.constants)
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def _class(config: dict[str, Any]) -> Any:
    return model_class(next(iter(config.get("architectures") or []), None))


def _reads_last_token(model: type, config: dict[str, Any]) -> bool:
    """Check for a decoder that classifies by a row's last token, which transformers finds by the padding token."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return issubclass(model, GenericForSequenceClassification) and config.get("pad_token_id") is not None


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
