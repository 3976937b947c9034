"""Torchwright: give any PyTorch model back faster, within an accuracy budget, and prove it.

    import torchwright as tw
    result = tw.optimize(model, (x,), max_drop=0.01)    # x is one example input
    result.model(x); result.speedup; print(result); result.save("out")
    fast = tw.load("out").model
    tw.verify("out"); tw.bench("out")
    model = tw.load_decoder("path/to/folder", quantize="w8a8"); model.generate("Once upon a time")
    tw.load_speech("path/to/whisper").transcribe("talk.mp3").text
    tw.load_segmenter("path/to/sam").segment("cat.jpg", points=[(400, 650)])
    tw.load_diffuser("path/to/pipeline").draw("a red bicycle", seed=1).pixels_HW3
    tw.export(model, (x,), to="onnx").run(x)
    step = tw.compile_numpy(numpy_function)
    loss = tw.sequence_parallel(model, mesh)(input_ids=ids, labels=labels)

Importing this package does not import torch. Each name below is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchwright.core.process.forks import guard_forks

if TYPE_CHECKING:
    from torchwright.core.errors import TorchwrightError
    from torchwright.exporter.export import export
    from torchwright.models.decoder.load import load_decoder
    from torchwright.models.decoder.seq2seq.load import load_seq2seq
    from torchwright.models.diffusion.load import load_diffuser
    from torchwright.models.segment.load import load_class_segmenter, load_segmenter
    from torchwright.models.speech.load import load_speech
    from torchwright.optimization.api import bench, optimize, verify
    from torchwright.optimization.artifact.load import load
    from torchwright.optimization.numpy import compile_numpy
    from torchwright.train.sequence import sequence_parallel

__all__ = [
    "TorchwrightError",
    "bench",
    "compile_numpy",
    "export",
    "load",
    "load_class_segmenter",
    "load_decoder",
    "load_diffuser",
    "load_segmenter",
    "load_seq2seq",
    "load_speech",
    "optimize",
    "sequence_parallel",
    "verify",
]

# `load` has its own home: what answers first must not wait for the search's imports.
_HOMES = {
    "optimize": "torchwright.optimization.api",
    "verify": "torchwright.optimization.api",
    "bench": "torchwright.optimization.api",
    "load": "torchwright.optimization.artifact.load",
    "load_decoder": "torchwright.models.decoder.load",
    "load_diffuser": "torchwright.models.diffusion.load",
    "load_seq2seq": "torchwright.models.decoder.seq2seq.load",
    "load_class_segmenter": "torchwright.models.segment.load",
    "load_segmenter": "torchwright.models.segment.load",
    "load_speech": "torchwright.models.speech.load",
    "export": "torchwright.exporter.export",
    "compile_numpy": "torchwright.optimization.numpy",
    "sequence_parallel": "torchwright.train.sequence",
    "TorchwrightError": "torchwright.core.errors",
}


guard_forks()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torchwright' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
