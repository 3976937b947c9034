"""A decoder's parts as an artifact keeps them: packed for the kernels, in one memory-mapped file.

decoder.safetensors   every tensor of the decoder under its module's name
decoder.json          the form of each packed layer, for which kind of device, and the type of cached keys and values
"""

from __future__ import annotations

import json
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_json
from torchwright.hardware.kernels.cpu.memory import HUGE, lasting, read
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.linear import PackedForm, PackedLinear
from torchwright.hub.folder import read_config
from torchwright.hub.language_part import language_part
from torchwright.hub.tensor_header import read_header
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.load import KV_DTYPES, stop_ids
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.weights import DecoderParts, plain_linear

TENSORS, FORMS = "decoder.safetensors", "decoder.json"
HOLDERS = {"gate_up": "mlp.", "down": "mlp.", "input_gate": "", "input_out": ""}
"""The place of a linear layer in its layer; those not named are in its attention or token mixer."""
ATTENTION = "attention."
MIXERS = ("mamba_in", "mamba_out", "decay")
NORMS = {part: f"{ATTENTION}{part}" for part in ("q_norm", "k_norm", "query_norm", "latent_norm")}


def write_packed(model: LoadedDecoder, folder: Path) -> None:
    """Keep a decoder whose linear layers are packed."""
    forms: dict[str, dict[str, Any]] = {}
    for name, module in model.decoder.named_modules():
        if isinstance(module, PackedLinear):
            forms[name] = module.form.as_dict()
    kv = next(name for name, dtype in KV_DTYPES.items() if dtype == model.kv_dtype)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.decoder.state_dict().items()}
    save_file(tensors, folder / TENSORS)
    described = {"kv": kv, "for_gpu": gpu.takes(model.device), "layers": forms}
    (folder / FORMS).write_text(json.dumps(described, indent=1), encoding="utf-8")


def read_packed(folder: Path, model_folder: Path, device: str = "cpu") -> LoadedDecoder:
    """The decoder that `write_packed` kept: packed weights copied into huge pages, the rest read as it is used.

    `model_folder` holds config.json and the tokenizer; `device` is where it was packed for. Raises `ArtifactError` for
    files that are damaged or that do not fit the configuration or the device.
    """
    try:
        described = read_json(folder / FORMS)
        forms = {name: PackedForm.from_dict(form) for name, form in described["layers"].items()}
        kv_dtype = KV_DTYPES[described["kv"]]
        config = decoder_config(language_part(read_config(model_folder)), model_folder / "config.json")
        for_gpu = bool(described.get("for_gpu"))
        place = torch.device(device)
        if forms and for_gpu != gpu.takes(place):
            raise ValueError(f"its weights are packed for a {'GPU' if for_gpu else 'CPU'}, not for {device}")
        with closing(_PackedWeights(config, forms, folder / TENSORS, place)) as weights:
            decoder = Decoder(config, weights).eval()
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ArtifactError(
            f"the decoder in {folder} cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error
    return LoadedDecoder(decoder, model_folder, kv_dtype=kv_dtype, stop=stop_ids(config, model_folder))


class _PackedWeights(DecoderParts):
    """Gives a `Decoder` its parts by the names that they have in its own state dict."""

    def __init__(
        self, config: DecoderConfig, forms: dict[str, PackedForm], path: Path, device: torch.device
    ) -> None:
        self._config, self._forms, self._path, self.device = config, forms, path, device
        self._file: Any = None
        self._offsets = {name: tensor.begin for name, tensor in read_header(path).items()}
        self._bytes = FileIO(path)

    def embedding(self) -> torch.Tensor:
        """Mapped: of its rows, only those of tokens that occur are read."""
        return self._open().get_tensor("embedding")

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        return self._layer("head")

    def final_norm(self) -> torch.Tensor:
        return self._read("norm")

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        return self._optional(f"layers.{layer}.{NORMS.get(part, part)}")

    def linear(self, layer: int, part: str) -> nn.Module:
        return self._layer(f"layers.{layer}.{HOLDERS.get(part, self._mixer(part))}{part}")

    def recurrent(self, layer: int, part: str) -> torch.Tensor | None:
        return self._optional(f"layers.{layer}.{self._mixer('mamba_in')}{part}")

    def sinks(self, layer: int) -> torch.Tensor:
        return self._read(f"layers.{layer}.attention.sinks")

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        at = f"{self._routed(layer)}.experts.{expert}"
        return self._layer(f"{at}.gate_up"), self._layer(f"{at}.down")

    def router(self, layer: int) -> torch.Tensor:
        return self._read(f"{self._routed(layer)}.router")

    def router_bias(self, layer: int) -> torch.Tensor:
        return self._read(f"{self._routed(layer)}.router_bias")

    def expert_bias(self, layer: int) -> torch.Tensor | None:
        return self._optional(f"{self._routed(layer)}.bias")

    def shared(self, layer: int) -> tuple[nn.Module, nn.Module]:
        at = f"layers.{layer}.mlp.shared"
        return self._layer(f"{at}.gate_up"), self._layer(f"{at}.down")

    def shared_gate(self, layer: int) -> nn.Module:
        return self._layer(f"layers.{layer}.mlp.shared_gate")

    def from_latent(self, layer: int, part: str) -> HeadLinears:
        latent, at = self._config.latent, f"layers.{layer}.{ATTENTION}{part}"
        assert latent
        features = latent.rank if part == "keys" else latent.value
        return HeadLinears.from_tensors(
            features, self._optional(f"{at}.packed"), self._optional(f"{at}.weight")
        )

    def vector(self, layer: int, part: str) -> torch.Tensor:
        at = f"{self._routed(layer)}.scale" if part == "expert_scale" else f"layers.{layer}.{part}"
        return self._read(at)

    def layer_inputs(self) -> tuple[torch.Tensor, nn.Module, torch.Tensor]:
        """The table is mapped, as the embedding is."""
        table_VI = self._open().get_tensor("inputs.table")
        return table_VI, self._layer("inputs.project"), self._read("inputs.norm")

    def _mixer(self, part: str) -> str:
        """The place of a token mixer: a recurrent part is a layer's attention, or lies next to it."""
        return "mixer." if self._config.parallel is not None and part in MIXERS else ATTENTION

    def _routed(self, layer: int) -> str:
        """The place of a layer's experts: they are its feed-forward block, or lie next to it."""
        return f"layers.{layer}.{'mlp' if self._config.layer_inputs is None else 'experts'}"

    def release(self) -> None:
        """Let go of what was read of the file, which would count twice."""
        self._file = None

    def close(self) -> None:
        self.release()
        self._bytes.close()

    def _open(self) -> Any:
        if self._file is None:
            self._file = safe_open(self._path, framework="pt").__enter__()
        return self._file

    def _read(self, name: str) -> torch.Tensor:
        mapped = self._open().get_tensor(name)
        if mapped.nbytes < HUGE:
            return lasting(mapped)
        return read(self._bytes, self._offsets[name], tuple(mapped.shape), mapped.dtype)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._read(name) if name in self._offsets else None

    def _layer(self, name: str) -> nn.Module:
        if name not in self._forms:  # one that no scheme rounds, of a model in float32
            return plain_linear(self._read(f"{name}.weight"), self._optional(f"{name}.bias"))
        found: dict[str, Any] = {
            part: self._read(f"{name}.{part}")
            for part in ("packed", "scale", "bias")
            if f"{name}.{part}" in self._offsets
        }
        return PackedLinear.from_packed(self._forms[name], found, for_gpu=gpu.takes(self.device))
