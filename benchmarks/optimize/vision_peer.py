"""OpenVINO as a contender of vision.py, in an interpreter that has openvino, nncf, torch and transformers.

Arguments: NAME BATCH PRECISION FOLDER THREADS. Each question is answered by the seconds of one call. FOLDER holds
weights and inputs, and gets the outputs as PRECISION.pt.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import peers
from benchmarks.models import shapes


def start() -> tuple[dict[str, Any], Callable[[], float]]:
    name, batch, precision, folder, threads = sys.argv[1:6]
    import openvino as ov  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(int(threads))
    model, inputs = shapes.make(shapes.VISION[name], int(batch))
    model.load_state_dict(torch.load(Path(folder) / "state.pt", weights_only=True))
    inputs = torch.load(Path(folder) / "inputs.pt", weights_only=True)
    begun = time.perf_counter()
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs))
    converted = ov.convert_model(program)
    converted.reshape(list(inputs[0].shape))
    arrays = [x.numpy() for x in inputs]
    if precision == "int8":
        import nncf  # pyright: ignore[reportMissingImports]

        nncf.set_log_level(logging.ERROR)
        operators = " ".join(str(node.target) for node in program.graph.nodes)
        attends = "attention" in operators or "softmax" in operators
        kind = nncf.ModelType.TRANSFORMER if attends else None
        converted = nncf.quantize(converted, nncf.Dataset([arrays[0]]), subset_size=1, model_type=kind)
    settings = {
        "INFERENCE_NUM_THREADS": int(threads),
        "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
    output = torch.tensor(request.infer(arrays)[0].astype("float32"))
    torch.save(output, Path(folder) / f"{precision}.pt")
    request.infer(arrays)

    def turn() -> float:
        request.infer(arrays)
        begun, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - begun < 0.02:
            request.infer(arrays)
            calls += 1
        return (time.perf_counter() - begun) / calls

    return {"ready_s": time.perf_counter() - begun, "version": ov.__version__}, turn


if __name__ == "__main__":
    peers.serve(start)
