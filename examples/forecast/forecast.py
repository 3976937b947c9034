"""A workload in a package of its own: forecasters that read a window of a series and say how it goes on.

A folder holds `config.json` (`"architectures": ["Forecaster"]`, `hidden`, `window`, `horizon`), the weights in
`model.safetensors`, and `series.json`, a list of numbers on which the model is judged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Quality
from torchwright.workloads import accuracy
from torchwright.workloads.base import Case, Run, Workload

CONFIG, WEIGHTS, SERIES = "config.json", "model.safetensors", "series.json"


class Forecaster(nn.Module):
    """forward(x_BT) → the next `horizon` values (B, H), from the last `window` ones."""

    def __init__(self, hidden: int, window: int, horizon: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(window, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, horizon),
        )

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BT)


class ForecastWorkload(Workload):
    """A forecaster: one batch of windows of its series. Metric: the relative error of what it says comes next."""

    name = "forecast"
    supports = "Forecaster"

    def __init__(self, folder: str | Path, *, batch: int = 32) -> None:
        self.folder, self.label, self.batch = Path(folder), str(folder), batch
        if batch < 1:
            raise WorkloadError(f"batch={batch}", allowed="1 or more")
        config = self._read(CONFIG)
        try:
            self.sizes = {key: int(config[key]) for key in ("hidden", "window", "horizon")}
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.folder / CONFIG} lacks a size", found=repr(error)) from error

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return "Forecaster" in (config.get("architectures") or [])

    @classmethod
    def example(cls, folder: Path) -> Self:
        sizes = {"hidden": 64, "window": 16, "horizon": 4}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Forecaster(**sizes)
        (folder / CONFIG).write_text(json.dumps({"architectures": ["Forecaster"], **sizes}))
        (folder / SERIES).write_text(json.dumps([math.sin(0.3 * t) + 0.1 * (t % 7) for t in range(400)]))
        save_file(model.state_dict(), folder / WEIGHTS)
        return cls(folder, batch=8)

    def build(self) -> nn.Module:
        model = Forecaster(**self.sizes)
        try:
            model.load_state_dict(load_file(self.folder / WEIGHTS))
        except (OSError, RuntimeError) as error:
            raise ModelError(f"{self.folder / WEIGHTS} cannot be read", found=str(error)) from error
        return model.eval().requires_grad_(False)

    def called_as_is(self) -> bool:
        return True

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(name="forecast", args=(self._windows()[0],))]

    def observe(self, run: Run, dtype: torch.dtype) -> list[torch.Tensor]:
        return [run(Case(name="forecast", args=(x_BT,))).float().cpu() for x_BT in self._windows()]

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.relative_error(reference, candidate)

    def files(self, *, weights: bool) -> dict[str, Path]:
        return {name: self.folder / name for name in (CONFIG, SERIES, *([WEIGHTS] if weights else []))}

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "model": self.label, "batch": self.batch}

    def _windows(self) -> list[torch.Tensor]:
        """Batches (B, T) of the series, the first one as often as it takes to fill one."""
        x_NT = torch.tensor(self._read(SERIES)).unfold(0, self.sizes["window"], 1)
        if len(x_NT) < self.batch:
            x_NT = x_NT.repeat(-(-self.batch // len(x_NT)), 1)
        return list(x_NT[: len(x_NT) // self.batch * self.batch].to(self.device).split(self.batch))

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.folder / name} cannot be read", found=str(error)) from error
