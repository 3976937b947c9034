# pyright: basic, reportMissingImports=false
"""A Hugging Face folder with its weights in bfloat16, or quantized as vLLM and transformers load it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import overridden
from torchwright.core.scheme import GROUPS
from torchwright.exporter.base import ExportTarget, Run, Written
from torchwright.exporter.formats import stored_names
from torchwright.exporter.targets.compressed import LinearFormat
from torchwright.hub.checkpoint import QUANTIZATION, Checkpoint
from torchwright.hub.folder import copy_files, model_files, read_config
from torchwright.workloads.huggingface import load_model, quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

    from torchwright.exporter.subject import Subject
    from torchwright.optimization.engines.dispatch.spec import CallSpec

WEIGHTS = "model.safetensors"
AUTO = "AutoModelForCausalLM"
LAYOUTS = {"bf16": None, "w8a8": LinearFormat(bits=8, inputs=True), "w4a16": LinearFormat(bits=4, group=128)}
ELSEWHERE = (
    "run on what Torchwright reads, activations unrounded: `pip install compressed-tensors` for transformers"
)


class SafetensorsFolder(ExportTarget):
    """A model folder for transformers and vLLM: bfloat16, or compressed-tensors of 8 bits (W8A8) or 4 (W4A16)."""

    name: ClassVar[str] = "safetensors"
    runtime: ClassVar[str] = "transformers"
    libraries: ClassVar[tuple[str, ...]] = ("transformers", "compressed-tensors")
    tolerances: ClassVar[dict[str, float]] = {"bf16": 0.03, "w8a8": 0.1, "w4a16": 0.3}
    rounding: ClassVar[dict[str, float]] = {"bf16": 0.01, "w8a8": 0.02, "w4a16": 0.2}
    formats: ClassVar[dict[str, str]] = {"w8a8": "w8a8", "w4a16": "w4a16"}
    skips: ClassVar[bool] = True

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        if subject.folder is None:
            raise RefusedTechnique(
                "a folder of safetensors is written from one", found=f"{subject.name}, which comes from none"
            )
        config = read_config(subject.folder)
        layout, skip = _of_recipe(LAYOUTS[precision], subject)
        linears = _linears(subject)
        found: dict[str, Tensor] = {}
        left: list[str] = []
        for name, tensor in Checkpoint(subject.folder, config).tensors(torch.float32):
            layer = name.removesuffix(".weight")
            if layout is None or layer not in linears:
                found[name] = tensor.to(torch.bfloat16)
            elif layer in skip or not layout.fits(tensor.shape):
                found[name] = tensor.to(torch.bfloat16)
                left.append(layer)
            else:
                found |= {f"{layer}.{part}": value for part, value in layout.tensors(tensor).items()}
        quantized = sum(name.endswith(".weight_scale") for name in found)
        if layout is not None and not quantized:
            raise RefusedTechnique(f"no linear layer of {subject.name} can be kept as {precision}")
        config = {key: value for key, value in config.items() if key != QUANTIZATION} | {"dtype": "bfloat16"}
        if layout is not None:
            config[QUANTIZATION] = layout.config(["lm_head", *left])
        copy_files(model_files(subject.folder, weights=False), folder)
        save_file(
            {name: value.contiguous() for name, value in found.items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        notes = tuple(f"kept in bfloat16: {name}" for name in left)
        if layout is not None and not _by_transformers():
            notes += (ELSEWHERE,)
        return Written(
            operators={
                f"linear layers in {precision}": quantized or len(linears),
                "other tensors in bfloat16": sum(name.rpartition(".")[0] not in linears for name in found),
            },
            notes=notes,
        )

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        torch.set_num_threads(threads)
        plain = QUANTIZATION not in read_config(folder)
        model = _transformers(folder) if plain or _by_transformers() else load_model(folder, AUTO)

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return [model(input_ids=tensors[0], use_cache=False).logits.float()]

        return run

    @classmethod
    def weights(cls, folder: Path) -> dict[str, Tensor]:
        return dict(Checkpoint(folder, read_config(folder)).tensors(torch.float32))

    @classmethod
    def settings(cls, folder: Path) -> dict[str, Any]:
        return read_config(folder)


def _of_recipe(layout: LinearFormat | None, subject: Subject) -> tuple[LinearFormat | None, set[str]]:
    """The layout with the recipe's size of groups, and what it keeps wider, by the folder's names."""
    if layout is None or subject.format is None or subject.folder is None:
        return layout, set()
    group = (subject.format.group or GROUPS[0]) if layout.group else None
    return replace(layout, group=group), stored_names(subject.format.skip, subject.folder)


def _linears(subject: Subject) -> set[str]:
    """Names of the linear layers between embeddings and logits, as the folder has them."""
    prefix = "model."  # of `PromptLogits`
    names = {
        name.removeprefix(prefix)
        for name, module in subject.original.named_modules()
        if overridden(module, (nn.Linear,)) is None
    }
    return names - {"lm_head"}


def _transformers(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _by_transformers() -> bool:
    return importlib.util.find_spec("compressed_tensors") is not None
