"""NPU: Huawei's Ascend processors, by the package torch_npu. Nobody has run it here."""

from __future__ import annotations

from torchwright.hardware.devices.accelerator import Accelerator


class NPU(Accelerator):
    """The current Ascend processor."""

    name = "npu"
    package = "torch_npu"
    uncompiled = "Inductor, which compiles here, makes no code for npu"
    remedy = "install CANN and the torch_npu of this PyTorch's version, or use --device cpu"
