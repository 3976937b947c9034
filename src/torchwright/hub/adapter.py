"""A checkpoint with low-rank adapters in its weights, from the files that peft and `torchwright train` write.

    W  becomes  W + s · B A                    LoRA (Hu et al., 2021); s = alpha / r, or alpha / √r (`use_rslora`)
    with DoRA   m · (W + s · B A) / ‖W + s · B A‖, a norm for each row (Liu et al., 2024)

Each matrix is added up in float32 when it is read, and rounded once to the type that the folder keeps it in: the same
numbers as a merged folder's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.files import TensorFiles
from torchwright.hub.folder import read_object
from torchwright.hub.weight import Plain, Weight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""peft's names for an adapter's tensors."""
UNREAD = ("fan_in_fan_out", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens")
"""Settings of peft's that change what the tensors mean, and are not read here."""


class AdaptedCheckpoint(Checkpoint):
    """The tensors of a folder with those of `adapter`, another folder, added to them.

    Raises `ModelError`, naming the file, for a quantized checkpoint, another kind of adapter than LoRA, and tensors
    that do not fit.
    """

    def __init__(self, folder: Path, config: dict[str, Any], adapter: Path) -> None:
        super().__init__(folder, config)
        if self.quantized:
            raise ModelError(
                f"{folder} is quantized ({self.format}), and adapters are added to float weights",
                next="take the model's original checkpoint, and --quantize for what becomes of it",
            )
        path = adapter / CONFIG
        if not path.is_file():
            raise ModelError(f"{adapter} has no {CONFIG}", allowed=f"a folder of peft's: {CONFIG}, {WEIGHTS}")
        self._settings = Fields(path, read_object(path))
        self._files = TensorFiles(adapter)
        self._check()
        self._left = {_module(name, path) for name in self._files.names()}

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        found = super().weight(name, shape)
        module = name.removesuffix(".weight")
        if f"{PREFIX}{module}.{A}" not in self._files:
            return found
        self._left.discard(module)
        return Plain(self._merged(module, found.rows(0, shape[0])))

    def close(self) -> None:
        super().close()
        self._files.close()

    def finish(self) -> None:
        """Raises `ModelError` where the adapter has a layer that was not asked for: it is of another model."""
        if self._left:
            raise ModelError(
                f"the adapter {self._files.folder} changes layers that the model in {self.folder} does not have",
                found=", ".join(sorted(self._left)[:3]),
                next="name the model that it was trained on",
            )

    def _check(self) -> None:
        settings, data = self._settings, self._settings.data
        if settings.text("peft_type", "LORA") != "LORA":
            raise settings.wrong("peft_type", "LORA")
        if settings.text("bias", "none") != "none":
            raise settings.wrong("bias", "none")
        for key in UNREAD:
            if data.get(key):
                raise settings.wrong(key, "nothing, here")

    def _merged(self, module: str, weight_NK: torch.Tensor) -> torch.Tensor:
        a_RK, b_NR = self._tensor(module, A), self._tensor(module, B)
        if (
            a_RK.dim() != 2
            or b_NR.shape != (len(weight_NK), len(a_RK))
            or a_RK.shape[1:] != weight_NK.shape[1:]
        ):
            raise ModelError(
                f"the adapter of '{module}' in {self._files.folder} does not fit its weight",
                found=f"A {list(a_RK.shape)}, B {list(b_NR.shape)}",
                allowed=f"A [r, {weight_NK.shape[1]}], B [{len(weight_NK)}, r]",
            )
        full_NK = weight_NK.float() + self._scale(module, len(a_RK)) * (b_NR @ a_RK)
        if self._settings.flag("use_dora", False):
            full_NK *= (self._tensor(module, MAGNITUDE) / full_NK.norm(dim=1))[:, None]
        return full_NK.to(weight_NK.dtype)

    def _tensor(self, module: str, part: str) -> torch.Tensor:
        return self._files.get(f"{PREFIX}{module}.{part}").float()

    def _scale(self, module: str, rank: int) -> float:
        """alpha / r; `alpha_pattern` names layers by the end of their names."""
        alpha = self._settings.number("lora_alpha")
        pattern = self._settings.section("alpha_pattern")
        for key in pattern.data:
            if module == key or module.endswith(f".{key}"):
                alpha = pattern.number(key)
        return alpha / (math.sqrt(rank) if self._settings.flag("use_rslora", False) else rank)


def _module(name: str, path: Path) -> str:
    """The layer of an adapter's tensor."""
    for part in (A, B, MAGNITUDE):
        if name.startswith(PREFIX) and name.endswith(f".{part}"):
            return name.removeprefix(PREFIX).removesuffix(f".{part}")
    raise ModelError(
        f"the adapter beside {path} holds a tensor that is not read here",
        found=name[:200],
        allowed=f"{PREFIX}LAYER.{A}, .{B} or .{MAGNITUDE}",
    )
