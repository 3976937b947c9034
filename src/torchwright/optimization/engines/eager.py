"""Running a model as it is. Imports nothing of the compiler: loading must be quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torchwright.optimization.engines.base import Engine, Kept, Ready, ShippingForm

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target
    from torchwright.workloads.base import Case


class Eager(Engine):
    """Calls the model as it is."""

    name: ClassVar[str] = "eager"
    how: ClassVar[str] = "eager"
    compiles: ClassVar[bool] = False

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        for ending in target.settings.endings:
            ending()
        return cls(target.model)

    def __call__(self, case: Case) -> Any:
        return self.model(*case.args, **case.kwargs)

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {own: cls.name} if own == "rebuild" else {"graphs": cls.name, own: cls.name}

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        return kept.graphs(compiled=False)
