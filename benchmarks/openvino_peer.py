"""OpenVINO as a contender, in whatever interpreter has openvino, nncf, torch and transformers.

Started by vision_cpu.py. Answers every line on standard input with one line of JSON: first what it built, then the
seconds of one call for every `turn`. Outputs go to FOLDER/PRECISION.pt.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import torch

import modules


def main() -> None:
    name, batch, precision, folder, threads = sys.argv[1:6]
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    import openvino as ov  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(int(threads))
    model, inputs = modules.make(modules.VISION[name], int(batch))
    state = Path(folder) / "state.pt"
    model.load_state_dict(torch.load(state, weights_only=True))
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
        attention = any(
            word in str(node.target) for node in program.graph.nodes for word in ("attention", "softmax")
        )
        kind = nncf.ModelType.TRANSFORMER if attention else None
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
    print(
        json.dumps({"ready_s": time.perf_counter() - begun, "version": ov.__version__}),
        file=answers,
        flush=True,
    )
    for _ in sys.stdin:
        request.infer(arrays)
        start = time.perf_counter()
        calls = 0
        while calls == 0 or time.perf_counter() - start < 0.02:
            request.infer(arrays)
            calls += 1
        seconds = (time.perf_counter() - start) / calls
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
