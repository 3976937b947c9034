"""Well-known devices and their links, as published. Peak rates are dense; bandwidth of links is one direction.

Efficiencies are what large operations reach of the peak inside a training step. Those of the H100 are fitted to two
published rows and no more (`docs/plan-layout.md`, "Checked against"); the others are taken over from it.
"""

from __future__ import annotations

from typing import Any

GIB, GB, TB, TFLOPS = 2**30, 1e9, 1e12, 1e12

_HOPPER = {"float32": 494.7 * TFLOPS, "bfloat16": 989.4 * TFLOPS, "float8": 1978.9 * TFLOPS}
_NVLINK4 = {"name": "NVLink", "bandwidth": 450 * GB, "latency": 2e-6}
_NDR = {"name": "400 Gb/s RDMA", "bandwidth": 50 * GB, "latency": 8e-6}

DEVICES: dict[str, dict[str, Any]] = {
    "h100": {
        "memory": 80 * GIB,
        "memory_bandwidth": 3.35 * TB,
        "flops": _HOPPER,
        "links": [_NVLINK4, _NDR],
        "source": "NVIDIA H100 Tensor Core GPU data sheet (SXM)",
    },
    "h100-96gb": {
        "memory": 95 * GIB,
        "memory_bandwidth": 2.4 * TB,
        "flops": _HOPPER,
        "matmul_efficiency": 0.46,
        "float8_efficiency": 0.38,
        "attention_efficiency": 0.30,
        "links": [_NVLINK4, _NDR],
        "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (HBM2e, 96 GB, 500 W)",
    },
    "h200": {
        "memory": 141 * GB,
        "memory_bandwidth": 4.8 * TB,
        "flops": _HOPPER,
        "links": [_NVLINK4, _NDR],
        "source": "NVIDIA H200 Tensor Core GPU data sheet (SXM)",
    },
    "b200": {
        "memory": 180 * GB,
        "memory_bandwidth": 8.0 * TB,
        "flops": {"float32": 1125 * TFLOPS, "bfloat16": 2250 * TFLOPS, "float8": 4500 * TFLOPS},
        "links": [{"name": "NVLink", "bandwidth": 900 * GB, "latency": 2e-6}, _NDR],
        "source": "NVIDIA DGX B200 data sheet",
    },
    "a100": {
        "memory": 80 * GIB,
        "memory_bandwidth": 2.04 * TB,
        "flops": {"float32": 156 * TFLOPS, "bfloat16": 312 * TFLOPS},
        "matmul_efficiency": 0.80,
        "links": [
            {"name": "NVLink", "bandwidth": 300 * GB, "latency": 2e-6},
            {"name": "200 Gb/s RDMA", "bandwidth": 25 * GB, "latency": 8e-6},
        ],
        "source": "NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB)",
    },
    "tpu-v4": {
        "memory": 32 * GIB,
        "memory_bandwidth": 1.2 * TB,
        "flops": {"bfloat16": 275 * TFLOPS},
        "matmul_efficiency": 0.80,
        "links": [{"name": "ICI", "bandwidth": 135 * GB, "latency": 1e-6}],
        "source": "Jouppi et al., TPU v4 (arXiv 2304.01433): six links of 50 GB/s both ways, three axes",
    },
}
"""Name → fields of `Device` and its links, the innermost first; `Cluster` says how many devices share each."""
