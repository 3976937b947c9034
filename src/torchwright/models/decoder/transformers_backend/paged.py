"""A causal language model of transformers as a `PagedModel`: tokens of many sequences in one forward call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.pages import PageShape
from torchwright.models.decoder.rope import BY_LENGTH
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.shown import Embedded
from torchwright.models.decoder.states import StateShape
from torchwright.models.decoder.transformers_backend.attention import (
    CannotPage,
    PagedAttentionFunctions,
    Pass,
)

SHAPE_TOKENS = 4
"""Tokens of the pass that finds what each attention call keeps."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """A `PagedConfig` of a model of transformers."""

    architecture: str
    vocabulary: int
    context: int
    bos: int | None
    page_shapes: tuple[PageShape, ...]
    state_shapes: tuple[StateShape, ...] = ()
    """Models with states of their own are not paged."""
    varies_by_length: bool = False
    """Models whose keys depend on a prompt's length are not paged."""

    def restarts_at(self, prompt_tokens: int, length: int) -> bool:
        return False


class TransformersModel(PagedModel):
    """A model of transformers whose attention runs over pages.

    Raises `CannotPage` for a model whose attention transformers does not let be replaced, or keeps more than keys and
    values. Whether the rest of the model mixes tokens is for `check.py`.
    """

    def __init__(self, model: Any, *, context: int, bos: int | None) -> None:
        super().__init__()
        if kinds := sorted(_rope_kinds(model.config) & set(BY_LENGTH)):
            raise CannotPage(f"its rotary embedding ({kinds[0]}) depends on the length of the text")
        table: Any = model.get_input_embeddings()
        if not isinstance(getattr(table, "weight", None), torch.Tensor):
            raise CannotPage("it has no embedding table")
        self.model = model
        self.embedding = table.weight
        takes = inspect.signature(model.forward).parameters
        if "position_ids" not in takes:
            raise CannotPage("it takes no positions")
        self._keeps_rows = "logits_to_keep" in takes
        self._functions = PagedAttentionFunctions(model)
        self.picture_arguments: Callable[[Embedded], dict[str, Any]] | None = None
        """Turns embeddings of pictures into arguments of the forward call (`pictures.py`); None for text alone."""
        with self.paged():
            ids = torch.arange(SHAPE_TOKENS, device=table.weight.device)
            self._run(None, {"input_ids": ids[None], "position_ids": ids[None]})
        self.config = TransformersConfig(
            architecture=type(model).__name__,
            vocabulary=model.config.get_text_config().vocab_size,
            context=context,
            bos=bos,
            page_shapes=tuple(self._functions.shapes),
        )

    @property
    def on_kernels(self) -> bool:
        return False

    def forward(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Logits (T, V) of all tokens."""
        return self._logits(batch, cache)

    def answer(self, batch: Batch, cache: PagedCache, rows_N: torch.Tensor) -> Logits:
        """See `PagedModel.answer`."""
        if self._keeps_rows:
            return Logits(self._logits(batch, cache, logits_to_keep=rows_N))
        return Logits(self._logits(batch, cache)[rows_N])

    def logits(self, states_NE: torch.Tensor) -> torch.Tensor:
        """What `forward` returned: a model's logits may be more than its output layer's numbers."""
        return states_NE

    @contextmanager
    def paged(self) -> Iterator[None]:
        """Within the block the model attends over pages; outside it has its own attention."""
        own = self.model.config.get_text_config()._attn_implementation
        self._attend_by(self._functions.name)
        try:
            yield
        finally:
            self._attend_by(own)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def stay_paged(self) -> None:
        """Attend over pages from now on."""
        self._attend_by(self._functions.name)

    def _attend_by(self, name: str) -> None:
        """Let the language model attend by a function of transformers' table; an encoder of pictures keeps its own."""
        within = self.model.config.get_text_config() is not self.model.config
        self.model.set_attn_implementation({"text_config": name} if within else name)

    def _logits(self, batch: Batch, cache: PagedCache, **options: Any) -> torch.Tensor:
        positions = batch.positions_T[None] if batch.axes_AT is None else batch.axes_AT[:, None]
        tokens = {"input_ids": batch.ids_T[None], "position_ids": positions}
        if batch.pictures is not None and self.picture_arguments is not None:
            tokens |= self.picture_arguments(
                Embedded(batch.pictures.embeddings_NE, tuple(batch.pictures.deep))
            )
        return self._run(Pass(batch, cache.layers), tokens | options).logits[0].float()

    @torch.inference_mode()
    def _run(self, work: Pass | None, tokens: dict[str, Any]) -> Any:
        # Without a mask, transformers looks for packed sequences in the positions.
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
        self._functions.begin(work)
        output = self.model(**tokens, use_cache=False)
        self._functions.finish()
        return output


def _rope_kinds(config: Any) -> set[str]:
    """Return the kinds of rotary embeddings that a configuration names anywhere."""
    found: set[str] = set()
    pending = [config.to_dict()]
    while pending:
        section = pending.pop()
        for key, value in section.items():
            if isinstance(value, dict):
                pending.append(value)
            elif key in ("rope_type", "type") and isinstance(value, str):
                found.add(value)
    return found
