"""Running a model as it is. Imports nothing of the compiler: loading must be quick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwright.workloads.base import Case


class EagerRunner:
    """Calls the model as it is."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    def __call__(self, case: Case) -> Any:
        return self.model(*case.args, **case.kwargs)
