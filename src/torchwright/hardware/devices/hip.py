"""HIP: the name that users look for AMD's GPUs under. PyTorch for ROCm calls them cuda, and so do we."""

from __future__ import annotations

import torch

from torchwright.hardware.devices.accelerator import Accelerator


class HIP(Accelerator):
    """A signpost to `cuda`: PyTorch has no device called hip, in any build."""

    name = "hip"
    remedy = (
        "use --device cuda with a ROCm build of PyTorch (https://pytorch.org/get-started), or --device cpu"
    )

    @classmethod
    def unavailable(cls) -> str | None:
        if torch.version.hip:
            return f"PyTorch {torch.__version__} for ROCm {torch.version.hip} calls AMD's cards cuda"
        return f"PyTorch calls AMD's cards cuda, and PyTorch {torch.__version__} is built without ROCm"
