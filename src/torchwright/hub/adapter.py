"""A checkpoint with low-rank adapters in its weights, from the files that peft and `torchwright train` write.

    W  becomes  W + s · B A                    LoRA (Hu et al., 2021); s = alpha / r, or alpha / √r (`use_rslora`)
    with DoRA   m · (W + s · B A) / ‖W + s · B A‖, a norm for each row (Liu et al., 2024)

`AdaptedCheckpoint` merges. Each matrix is added up in float32 when it is read, and rounded once to the type that the
folder keeps it in: the same numbers as a merged folder's. `AdapterFile` gives the pairs of matrices themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from torchwright.core.errors import ModelError
from torchwright.core.regular_file import read_regular
from torchwright.hub.adapter_files import CONFIG, WEIGHTS
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.files import TensorFiles, damaged
from torchwright.hub.folder import read_object
from torchwright.hub.tensor_names import file_names
from torchwright.hub.weight import Plain, Weight

PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""peft's names for an adapter's tensors."""
MERGE = "`torchwright serve FOLDER --adapter DIR`, without a name, merges it into the weights"
UNREAD = (
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
)
"""Settings of peft's that change what the tensors mean, and are not read here."""
REPLACES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which peft, loading an adapter, takes a part out of the model's weights."""


PLAIN_PATTERN = re.compile(r"\^?[\w.-]+")
"""Keys of `alpha_pattern` whose characters mean themselves in a regular expression, but for the dot."""


class MergedAlone(ModelError):
    """An adapter that can be merged into a model's weights, and not be added to single rows next to them."""


class AdapterSettings:
    """An adapter's adapter_config.json.

    Raises `ModelError`, naming the file, for another kind of adapter than LoRA and for settings that are not read here.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        if not self.path.is_file():
            raise ModelError(f"{folder} has no {CONFIG}", allowed=f"a folder of peft's: {CONFIG}, {WEIGHTS}")
        self._fields = settings = Fields(self.path, read_object(self.path))
        if settings.text("peft_type", "LORA") != "LORA":
            raise settings.wrong("peft_type", "LORA")
        if settings.text("bias", "none") != "none":
            raise settings.wrong("bias", "none")
        for key in UNREAD:
            if settings.data.get(key):
                raise settings.wrong(key, "nothing, here")
        start = settings.data.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(REPLACES_WEIGHTS):
            raise ModelError(
                f"{self.path}: the adapter belongs to other weights than the model's own, which peft makes of them",
                found=f"init_lora_weights {start}",
                next="save it by peft's save_pretrained(…, path_initial_model_for_weight_conversion=…), as plain LoRA",
            )

    @property
    def dora(self) -> bool:
        """Check whether rows are normalized once the product is added (DoRA)."""
        return self._fields.flag("use_dora", False)

    def check_rows(self) -> None:
        """Raise `MergedAlone` for DoRA, which single rows cannot have."""
        if self.dora:
            raise MergedAlone(
                f"{self.path}: DoRA normalizes the merged weight, which requests with other adapters share",
                next=MERGE,
            )

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / r; `alpha_pattern` names layers by the end of their names, or by the whole behind a `^`.

        The first name that fits counts, as with peft. Raises `ModelError` for other regular expressions.
        """
        alpha = self._fields.number("lora_alpha")
        pattern = self._fields.section("alpha_pattern")
        if strange := [key for key in pattern.data if not PLAIN_PATTERN.fullmatch(key)]:
            raise pattern.wrong(
                strange[0], "a layer's name, or the end of one: no other regular expression, here"
            )
        for key in pattern.data:
            if f".{module}".endswith(f".{key}") or key == f"^{module}":
                alpha = pattern.number(key)
                break
        return alpha / (math.sqrt(rank) if self._fields.flag("use_rslora", False) else rank)


class AdapterFile:
    """An adapter's pairs of matrices in memory, as one read of its files found them.

    Raises `ModelError`, naming the file, for files that are damaged, larger than `most_bytes` or not read here.
    Raises `MergedAlone` for DoRA.
    """

    def __init__(self, folder: Path, model_type: object, *, most_bytes: int) -> None:
        self.folder, self.settings = folder, AdapterSettings(folder)
        self.settings.check_rows()
        path = folder / WEIGHTS
        try:
            self._tensors = load(read_regular(path, most_bytes))
        except (OSError, ValueError, SafetensorError) as error:
            raise damaged(path, str(error)) from error
        modules = {f"{_module(name, self.settings.path)}.weight" for name in self._tensors}
        named = file_names(sorted(modules), model_type)
        self._left = {usual: name.removesuffix(".weight") for usual, name in named.items()}
        """The model's name of each layer that was not taken yet → the file's."""
        if not self._left:
            raise ModelError(f"{path} has no tensors, so the adapter changes nothing")

    def take(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return A (r, K) and the scaled B (N, r) of a weight (N, K) in float32, None where it has no adapter."""
        module = self._left.pop(name, None)
        if module is None:
            return None
        found = [self._tensors.get(f"{PREFIX}{module}.{part}") for part in (A, B)]
        a_RK, b_NR = (torch.empty(0) if part is None else part for part in found)
        _check_fit(module, self.folder, a_RK, b_NR, shape)
        a_RK, b_NR = a_RK.float(), self.settings.scale(module, len(a_RK)) * b_NR.float()
        if not (a_RK.isfinite().all() and b_NR.isfinite().all()):
            raise ModelError(f"the adapter of '{module}' in {self.folder} has numbers that are not finite")
        return a_RK, b_NR

    def finish(self, allowed: str) -> None:
        """Raise `MergedAlone` where a layer was not taken; nothing of an adapter is left out silently."""
        if self._left:
            raise MergedAlone(
                f"the adapter {self.folder} changes layers that no request can have changed for itself",
                found=", ".join(sorted(self._left.values())[:3]),
                allowed=allowed,
                next=f"{MERGE}, if the layers are this model's",
            )


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
                next="take the model's original checkpoint, and --quantize the merged weights; or leave its "
                "weights as they are, by `torchwright generate --adapter DIR` or `serve --adapter NAME=DIR`",
            )
        self._settings = AdapterSettings(adapter)
        self._files = TensorFiles(adapter)
        modules = {f"{_module(name, self._settings.path)}.weight" for name in self._files.names()}
        named = file_names(sorted(modules), config.get("model_type"))
        self._modules = {usual: name.removesuffix(".weight") for usual, name in named.items()}
        """The model's name of each layer with an adapter → the file's."""
        self._left = {*self._modules.values()}

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        found = super().weight(name, shape)
        module = self._modules.get(name)
        if module is None or f"{PREFIX}{module}.{A}" not in self._files:
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

    def _merged(self, module: str, weight_NK: torch.Tensor) -> torch.Tensor:
        a_RK, b_NR = self._tensor(module, A), self._tensor(module, B)
        _check_fit(module, self._files.folder, a_RK, b_NR, weight_NK.shape)
        full_NK = weight_NK.float() + self._settings.scale(module, len(a_RK)) * (b_NR @ a_RK)
        if self._settings.dora:
            full_NK *= (self._tensor(module, MAGNITUDE) / full_NK.norm(dim=1))[:, None]
        return full_NK.to(weight_NK.dtype)

    def _tensor(self, module: str, part: str) -> torch.Tensor:
        return self._files.get(f"{PREFIX}{module}.{part}").float()


def _check_fit(
    module: str, folder: Path, a_RK: torch.Tensor, b_NR: torch.Tensor, shape: Sequence[int]
) -> None:
    """Raise `ModelError` for a pair of matrices that is not of a weight of this shape."""
    N, K = shape
    float_ = a_RK.is_floating_point() and b_NR.is_floating_point()
    if not (float_ and a_RK.dim() == 2 and len(a_RK) and a_RK.shape[1] == K and b_NR.shape == (N, len(a_RK))):
        raise ModelError(
            f"the adapter of '{module}' in {folder} does not fit its weight",
            found=f"A {list(a_RK.shape)} of {a_RK.dtype}, B {list(b_NR.shape)} of {b_NR.dtype}",
            allowed=f"A [r, {K}], B [{N}, r], floating point",
        )


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
