"""A Hugging Face folder's tensors, memory-mapped, checked against the configuration and converted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.families import FAMILIES
from torchwright.errors import ModelError
from torchwright.kernels.pack import finite
from torchwright.workloads.huggingface import read_object

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""From a weight (N, K) and a bias (N,) or None, in the model's dtype, to a module that maps (T, K) to (T, N)."""
INDEX = "model.safetensors.index.json"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint:
    """The tensors of a folder's safetensors files, by name.

    Raises `ModelError`, naming the file and the tensor, for a shard that is missing, cut short or damaged, and a tensor
    that is missing, of another shape or of a type that is no plain float.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._files = self._index()

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it lies in the file; copy it before `close`, which lets go of the file's memory."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(
                f"the weights in {self.folder} lack the tensor '{name}'",
                found=f"{len(self._files)} tensors in {len(set(self._files.values()))} files",
                next="check that config.json and the *.safetensors belong together",
            )
        try:
            tensor = self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, f"'{name}': {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"the tensor '{name}' in {path} has another shape than config.json says",
                found=str(list(tensor.shape)),
                allowed=str(list(shape)),
                next="check that config.json and the *.safetensors belong together",
            )
        if tensor.dtype not in READABLE:
            raise ModelError(
                f"the tensor '{name}' in {path} holds {tensor.dtype}",
                allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in READABLE),
                next="take the model's original, unquantized checkpoint",
            )
        return tensor

    def close(self) -> None:
        """Unmap all files; they open again when they are read."""
        self._open.clear()

    def _index(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if index.is_file():
            names = read_object(index).get("weight_map")
            if not isinstance(names, dict):
                raise _damaged(index, "no 'weight_map' from tensors to files")
            return {name: self.folder / str(file) for name, file in names.items()}
        files = [self.folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{self.folder} has no *.safetensors",
                found=", ".join(sorted(p.name for p in self.folder.iterdir())[:6]),
                next="convert the weights to safetensors with transformers' save_pretrained",
            )
        return {name: path for path in files for name in self._file(path).keys()}  # noqa: SIM118

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            if not path.is_file():
                raise ModelError(
                    f"{path} is not there",
                    found=f"{INDEX} names it",
                    next="fetch the model again; a download may have stopped half way",
                )
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise _damaged(path, str(error)) from error
        return self._open[path]


class DecoderParts(Protocol):
    """What a `Decoder` is built from, wherever it comes from."""

    device: torch.device
    """Where the decoder will run; the parts may lie on a CPU until they are moved there."""

    def embedding(self) -> torch.Tensor: ...
    def head(self, embedding_VE: torch.Tensor) -> nn.Module: ...
    def final_norm(self) -> torch.Tensor: ...
    def norm(self, layer: int, part: str) -> torch.Tensor | None: ...
    def linear(self, layer: int, part: str) -> nn.Module: ...
    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]: ...
    def router(self, layer: int) -> torch.Tensor: ...
    def release(self) -> None: ...


class DecoderWeights:
    """A decoder's parts from a checkpoint, in the model's `dtype`; linear layers as `make_linear` makes them."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        device: torch.device,
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded` says that `make_linear` puts weights on a grid, which has no place for NaN."""
        self.config, self.checkpoint, self.dtype, self.make_linear = config, checkpoint, dtype, make_linear
        self.device, self.rounded = device, rounded
        self.names = FAMILIES[config.architecture].names

    def embedding(self) -> torch.Tensor:
        """(V, E)."""
        config = self.config
        return self._stack(["model.embed_tokens.weight"], [(config.vocabulary, config.model)])

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        """The output layer (V, E); a tied one shares the embedding's tensor."""
        name = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"
        shape = tuple(embedding_VE.shape)
        weight = embedding_VE if self.config.tied else self._stack([name], [shape])
        return self._made([name], [shape], weight, None)

    def final_norm(self) -> torch.Tensor:
        return self._norm("model.norm.weight", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        """pre_attention, post_attention, pre_mlp or post_mlp (E,), q_norm or k_norm; None where the family has none."""
        config, name = self.config, getattr(self.names, part)
        if name is None:
            return None
        size = config.model
        if part in ("q_norm", "k_norm"):
            if config.qk_norm == "none":
                return None
            heads = config.heads if part == "q_norm" else config.kv_heads
            size = config.head_dim * (1 if config.qk_norm == "head" else heads)
        return self._norm(f"model.layers.{layer}.{name}.weight", size)

    def linear(self, layer: int, part: str) -> nn.Module:
        """qkv, o, gate_up or down of a layer: (N, K) with query, key and value, or gate and up, one below the other."""
        config, names = self.config, self.names
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        F = config.feed_forward
        files, rows, columns, bias = {
            "qkv": (names.qkv, (q, kv, kv), config.model, config.qkv_bias),
            "o": ((names.o,), (config.model,), q, config.o_bias),
            "gate_up": (names.gate_up, (F, F), config.model, config.mlp_bias),
            "down": ((names.down,), (config.model,), F, config.mlp_bias),
        }[part]
        return self._linear(layer, files, rows, columns, bias)

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert."""
        assert self.config.experts
        F, E = self.config.experts.feed_forward, self.config.model
        gate_up = [name.format(expert) for name in self.names.expert_gate_up]
        down = self.names.expert_down.format(expert)
        return self._linear(layer, gate_up, (F, F), E, False), self._linear(layer, [down], (E,), F, False)

    def router(self, layer: int) -> torch.Tensor:
        """(experts, E): a plain tensor, because a rounded router sends tokens elsewhere and saves nothing."""
        assert self.config.experts
        name = f"model.layers.{layer}.{self.names.router}.weight"
        return self._stack([name], [(self.config.experts.count, self.config.model)])

    def release(self) -> None:
        """Let go of the files' memory, called after each layer; parts given before stay good."""
        self.checkpoint.close()

    def _linear(
        self, layer: int, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> nn.Module:
        if len(names) == 1:
            rows = (sum(rows),)
        full = [f"model.layers.{layer}.{name}" for name in names]
        weights, shapes = [f"{name}.weight" for name in full], [(row, columns) for row in rows]
        offsets = self._stack([f"{name}.bias" for name in full], [(row,) for row in rows]) if bias else None
        return self._made(weights, shapes, self._stack(weights, shapes), offsets)

    def _made(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
    ) -> nn.Module:
        """The linear layer of a weight that these tensors make up, one below the other."""
        if self.rounded:
            for name, part in zip(names, weight_NK.split([shape[0] for shape in shapes]), strict=True):
                finite(part, name)
        return self.make_linear(weight_NK, bias_N)

    def _stack(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The tensors one below the other, in the model's dtype and in memory of their own."""
        tensors = [self.checkpoint.read(name, shape) for name, shape in zip(names, shapes, strict=True)]
        rows = [len(tensor) for tensor in tensors]
        out = torch.empty(sum(rows), *shapes[0][1:], dtype=self.dtype)
        for part, tensor in zip(out.split(rows), tensors, strict=True):
            part.copy_(tensor)
        return out

    def _norm(self, name: str, size: int) -> torch.Tensor:
        """float32, whatever the model's dtype: the norm computes in it, and 1 + w would lose digits in bfloat16."""
        return self.checkpoint.read(name, (size,)).float() + self.config.norm_offset


def plain_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Linear:
    """PyTorch's own linear layer around the given tensors."""
    N, K = weight_NK.shape
    linear = nn.Linear(K, N, bias=bias_N is not None, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N, requires_grad=False)
    return linear


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read",
        found=reason.strip(),
        next="fetch the file again; a download may have stopped half way",
    )
