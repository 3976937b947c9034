"""The head of a run, of either method: how it begins, and how its files are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchwright.train.draft.config import MOST_TOKENS, DraftRun
from torchwright.train.draft.files import file_tensors, new_head, started_head, write_head
from torchwright.train.draft.head import EagleHead
from torchwright.train.draft.mtp_files import mtp_head, mtp_tensors, write_merged, write_mtp
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.shape import frequent_tokens
from torchwright.train.draft.target import TargetModel
from torchwright.train.run.runtime.corpus import Corpus
from torchwright.train.run.runtime.processes import on_first


class RunHead:
    """A head, and its folders."""

    def __init__(self, run: DraftRun, folder: Path, target: TargetModel, corpus: Corpus) -> None:
        """`folder` is the run file's. Raises `ModelError` or `RunError` for a head that does not fit the target."""
        self._target = target
        self._dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
        self._config: dict[str, Any] = {}
        self.head: EagleHead | MtpHead
        self.begun: str | None = None
        """The origin of an MTP layer's first weights, in words."""
        section = run.head
        start = None if section.start is None else located(section.start, folder)
        if section.method == "mtp":
            self.head, self.begun = mtp_head(start, target, self._dtype, run.seed)
        elif start is not None:
            self.head, self._config = started_head(start, target)
        else:
            config, wanted = target.decoder.config, section.vocabulary or MOST_TOKENS
            ids_D = on_first(
                lambda: frequent_tokens(corpus.train.values(), config.vocabulary, wanted, config.eos)
            )
            self.head, self._config = new_head(section, ids_D, target, run.seed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the head's file; where the head is sharded every process takes part."""
        if isinstance(self.head, MtpHead):
            return mtp_tensors(self.head, self._dtype)
        return file_tensors(self.head, self._target, self._dtype)

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write the head's folder."""
        if isinstance(self.head, MtpHead):
            write_mtp(tensors, self._target, folder)
        else:
            write_head(tensors, self._config, folder)

    def write_merged(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write a copy of the target with its MTP layer in it."""
        write_merged(tensors, self._target, folder)


def located(name: str, folder: Path) -> str:
    """A model by a path that starts from the run file's folder, or by any other name."""
    return str(folder / name) if (folder / name).exists() else name
