"""Running a language model on the native decoder, whose packed weights are plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

from torchwright.optimization.engines.base import MODEL, Kept, Ready, ShippingForm
from torchwright.optimization.engines.eager import Eager


class NativeEngine(Eager):
    """Calls a `NativeModel`."""

    name: ClassVar[str] = "native"
    how: ClassVar[str] = "native decoder"
    compiles: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {"native": cls.name}

    def keep(self, folder: Path) -> str | None:
        cast(Any, self.model).save(folder)

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        from torchwright.models.decoder.native import NativeModel

        model = NativeModel.load(kept.path, kept.path / MODEL, kept.device)
        model.loaded.threads = kept.threads
        return Ready(how=cls.how, run=cls(model), answers=model.loaded)
