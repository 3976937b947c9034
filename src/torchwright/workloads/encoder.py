"""Sentence encoders of a Hugging Face or sentence-transformers folder: BERT-like models, and decoders that embed."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import ArtifactError, ModelError, WorkloadError
from torchwright.core.json_file import decode_json
from torchwright.core.records import Quality
from torchwright.core.regular_file import read_regular
from torchwright.hub.folder import LARGEST_OBJECT, model_files, read_config
from torchwright.workloads import accuracy
from torchwright.workloads.base import CALIBRATION_BATCHES, Case, Optimized, Run, Served, batches_to_judge
from torchwright.workloads.encoding import TextEmbedder
from torchwright.workloads.huggingface import load_model, parameter_count
from torchwright.workloads.rows import RowShapes, RowsWorkload
from torchwright.workloads.sentences import Sentences
from torchwright.workloads.texts import own_text

SAMPLE_SENTENCES = 512
EAGER_ROWS = 32
"""Rows of a call of a model that is not optimized, as many as `torchwright optimize` takes by default."""
UNKNOWN_LIMIT = 512
"""Tokens of a text at most, where neither configuration nor tokenizer knows a limit."""
MODEL_TYPES = (
    *(
        "albert",
        "bert",
        "camembert",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "modernbert",
    ),
    *("mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl"),
)
"""Encoders by the model_type of their config; a sentence-transformers folder may hold others."""
Mode = Literal["mean", "cls", "max", "lasttoken"]


class EncoderWorkload(RowsWorkload):
    """A sentence encoder: one batch of sentences of different lengths, padded to the longest.

    Sentences are those of the evaluation text, cut at `tokens`, the longest row that the optimized model takes; the
    text's longest one is in the timed batch. Metric: mean cosine to the original's embeddings over
    several hundred sentences. Pooling and normalisation are those that a sentence-transformers folder names; a plain
    folder is pooled by the mean over its tokens, as sentence-transformers itself does.
    """

    name = "encoder"
    supports = (
        "BertModel, RobertaModel, MPNetModel, DistilBertModel, XLMRobertaModel and their kind, and what a "
        "sentence-transformers folder holds"
    )
    opens = frozenset({"eval_text"})
    sample_operations: float = 1e12
    """The metric's sample is cut to what these operations pay for, 2 per parameter and token, but never below 2
    batches."""

    def __init__(
        self, folder: str | Path, *, batch: int = 32, tokens: int = 64, eval_text: str | Path | None = None
    ) -> None:
        self.folder, self.label = Path(folder), str(folder)
        for option, value in (("batch", batch), ("tokens", tokens)):
            if value < 1:
                raise WorkloadError(f"{option}={value}", allowed="1 or more")
        self.batch = batch
        self.pipeline = read_pipeline(self.folder)
        limit = self.pipeline.limit
        if limit is not None and tokens > limit:
            tokens = limit
        self.tokens = tokens
        self.eval_text = own_text(eval_text)
        self.sentences = Sentences(
            self.eval_text,
            self.pipeline.folder,
            batch=batch,
            tokens=tokens,
            pad=self.pipeline.pad,
            prompt=self.pipeline.prompt,
        )

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        if embeds(folder):
            return True
        names = config.get("architectures") or []
        return config.get("model_type") in MODEL_TYPES and any(
            re.fullmatch(r"\w+?(Model|ForMaskedLM)", name) for name in names
        )

    def build(self) -> nn.Module:
        pipeline = self.pipeline
        model: Any = load_model(pipeline.folder, "AutoModel")
        model.config.use_cache = False  # a decoder would keep keys and values that nobody reads
        return SentenceEncoder(model, pipeline.mode, pipeline.normalize).eval()

    def whole(self) -> RowShapes:
        return RowShapes(
            shapes=((self.batch, self.sentences.longest),),
            pad=self.pipeline.pad,
            prompt=self.pipeline.prompt,
            cut=self.pipeline.limit,
            part=self.pipeline.folder.relative_to(self.folder).as_posix(),
        )

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        super().check(description)
        if not description.get("layout"):
            raise ArtifactError("an encoder does not say in which shapes it runs")

    @classmethod
    def answerer(cls, optimized: Optimized) -> TextEmbedder:
        layout = RowShapes.from_dict(optimized.description["layout"])
        return TextEmbedder(optimized.run, layout, optimized.folder, optimized.device)

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "reader"

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(name="encode", args=self._batch(0))]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        return [
            Case(name="encode", args=self._batch(index, calibration=True))
            for index in range(CALIBRATION_BATCHES)
        ]

    def calibrates_apart(self) -> bool:
        return True

    def observe(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """Embeddings (N, E) of every sampled sentence, in batches of the one shape that is timed."""
        return torch.cat(
            [
                run(Case(name="encode", args=self._batch(i))).float().cpu()
                for i in self.sample or range(self._rounds())
            ]
        )

    def sampled(self) -> tuple[int, int | None]:
        return self._rounds(), self.sentences.batches

    def unseen(self) -> Self | None:
        return self.judged_after(*self.sampled())

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.cosine(reference, candidate)

    def files(self, *, weights: bool) -> dict[str, Path]:
        files = model_files(self.folder, weights=weights, parts=self.pipeline.parts)
        return {name: path for name, path in files.items() if path != self.eval_text}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "batch": self.batch,
            "tokens": self.tokens,
            "eval_text": str(self.eval_text) if self.eval_text else None,
            "pooling": self.pipeline.mode,
            "normalize": self.pipeline.normalize,
            "layout": self.layout and self.layout.as_dict(),
        }

    def _rounds(self) -> int:
        """Batches of the metric's sample."""
        parameters = parameter_count(self.pipeline.folder, self.pipeline.vocabulary)
        operations = 2.0 * parameters * self.batch * self.sentences.longest
        wanted = min(SAMPLE_SENTENCES / self.batch, self.sample_operations / max(operations, 1.0))
        return batches_to_judge(wanted, self.sentences.batches)

    def _batch(self, index: int, *, calibration: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        ids_BT, mask_BT = self.sentences.batch(index, calibration=calibration)
        return ids_BT.to(self.device), mask_BT.to(self.device)


def open_text_encoder(folder: Path) -> TextEmbedder:
    """Return a folder's sentence encoder on transformers' own code, eager and in float32.

    Its calls take 1 or `EAGER_ROWS` rows of tokens in powers of two, so that short texts are not padded to the longest.
    Raises `ModelError` as `read_pipeline` and loading do.
    """
    workload = EncoderWorkload(folder)
    whole, model = workload.whole(), workload.build()
    longest = whole.cut or UNKNOWN_LIMIT
    tokens = [*(2**power for power in range(4, longest.bit_length()) if 2**power < longest), longest]
    shapes = tuple((rows, T) for T in tokens for rows in (1, EAGER_ROWS))

    def run(case: Case) -> torch.Tensor:
        with torch.inference_mode():
            return model(*case.args)

    return TextEmbedder(run, replace(whole, shapes=shapes), folder)


class SentenceEncoder(nn.Module):
    """A transformers encoder with its pooling: forward(ids_BT, mask_BT) → embeddings (B, E) in float32."""

    def __init__(self, model: nn.Module, mode: Mode, normalize: bool) -> None:
        super().__init__()
        self.model, self.normalize = model, normalize
        self.mode: Mode = mode

    def forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        # transformers leaves a mask of ones out when it runs eagerly, but never while it is traced or exported.
        hidden_BTE = self.model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state.float()
        if self.mode == "cls":
            pooled_BE = hidden_BTE[:, 0]
        elif self.mode == "lasttoken":
            pooled_BE = hidden_BTE[torch.arange(len(hidden_BTE)), mask_BT.sum(1) - 1]
        elif self.mode == "max":
            pooled_BE = hidden_BTE.masked_fill(mask_BT[..., None] == 0, -1e9).amax(1)
        else:
            weights_BT1 = mask_BT[..., None].float()
            pooled_BE = (hidden_BTE * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(pooled_BE, dim=-1) if self.normalize else pooled_BE


def embeds(folder: Path) -> bool:
    """Check whether a sentence-transformers folder holds an embedding model, as opposed to a cross-encoder."""
    if not (folder / "modules.json").is_file():
        return False
    said = _json(folder / "config_sentence_transformers.json", optional=True)
    return said.get("model_type") != "CrossEncoder"


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """A folder's settings for turning a text into an embedding."""

    folder: Path
    """The subfolder of the transformer and the tokenizer."""
    mode: Mode = "mean"
    normalize: bool = False
    parts: tuple[str, ...] = ()
    """Folders of its modules inside the folder."""
    prompt: str = ""
    limit: int | None = None
    pad: int = 0
    vocabulary: int = 0


def read_pipeline(folder: Path) -> EmbeddingSettings:
    """The pipeline of a sentence-transformers folder (modules.json) or of a plain Hugging Face folder.

    Raises `ModelError` for a missing or unreadable file, and for modules other than Transformer, Pooling (by a `Mode`)
    and Normalize.
    """
    if not (folder / "modules.json").is_file():
        config = read_config(folder)
        return EmbeddingSettings(
            folder=folder,
            limit=text_limit(folder, config),
            pad=pad_token(config),
            vocabulary=_vocabulary(config),
        )
    modules = _json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise ModelError(f"{folder / 'modules.json'} is not a list of modules")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{folder} is a sentence-transformers pipeline that this workload cannot run",
            found=" → ".join(kinds),
            allowed="Transformer → Pooling, with or without Normalize",
        )
    for module in modules:
        if not (folder / str(module.get("path", ""))).resolve().is_relative_to(folder.resolve()):
            raise ModelError(
                f"{folder / 'modules.json'} points outside its folder", found=str(module["path"])
            )
    inner = folder / str(modules[0].get("path", ""))
    config = read_config(inner)
    pooling = _json(folder / modules[1].get("path", "1_Pooling") / "config.json")
    prompts = _json(folder / "config_sentence_transformers.json", optional=True)
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "", "")
    if prompt and not pooling.get("include_prompt", True):
        raise ModelError(f"{folder} leaves its prompt out of the pooling, which this workload cannot do")
    return EmbeddingSettings(
        folder=inner,
        mode=_mode(folder, pooling),
        normalize=len(kinds) == 3,
        parts=tuple(str(module.get("path", "")) for module in modules),
        prompt=prompt,
        limit=text_limit(inner, config),
        pad=pad_token(config),
        vocabulary=_vocabulary(config),
    )


def _mode(folder: Path, pooling: dict[str, Any]) -> Mode:
    names = {
        "mean_tokens": "mean",
        "cls_token": "cls",
        "max_tokens": "max",
    }  # the others are named as they are
    flags = {
        key.removeprefix("pooling_mode_"): on
        for key, on in pooling.items()
        if key.startswith("pooling_mode_")
    }
    asked = [names.get(key, key) for key, on in flags.items() if on]
    if "pooling_mode" in pooling:
        asked = [str(pooling["pooling_mode"])]
    for mode in typing.get_args(Mode):
        if asked == [mode]:
            return mode
    raise ModelError(
        f"{folder} pools in a way that this workload cannot",
        found=", ".join(asked) or "none",
        allowed=", ".join(typing.get_args(Mode)),
    )


def text_limit(folder: Path, config: dict[str, Any]) -> int | None:
    """The model's own longest text in tokens: what sentence-transformers says, the tokenizer, or the positions."""
    said = _json(folder / "sentence_bert_config.json", optional=True).get("max_seq_length")
    tokenizer = _json(folder / "tokenizer_config.json", optional=True).get("model_max_length")
    positions = config.get("max_position_embeddings")
    if positions and config.get("model_type") in (
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "mpnet",
    ):
        positions -= pad_token(config) + 1  # these count positions from the padding token's id on
    limits = [int(value) for value in (said, tokenizer, positions) if value and value < 1e9]
    return min(limits) if limits else None


def pad_token(config: dict[str, Any]) -> int:
    pad = config.get("pad_token_id")
    return pad if isinstance(pad, int) and pad >= 0 else 0


def _vocabulary(config: dict[str, Any]) -> int:
    return int(config.get("vocab_size") or 0)


def _json(path: Path, *, optional: bool = False) -> Any:
    if optional and not path.is_file():
        return {}
    try:
        return decode_json(read_regular(path, LARGEST_OBJECT))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read", found=str(error)) from error
