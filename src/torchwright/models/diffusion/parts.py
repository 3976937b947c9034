"""A pipeline's components: as one module that computes, and as stand-ins that a pipeline asks in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from torchwright.core.errors import ModelError, first_line
from torchwright.core.quiet import quiet_import
from torchwright.hub.folder import read_config
from torchwright.models.diffusion.folder import FAMILIES, PipelineFolder
from torchwright.models.diffusion.picture import INSTALL
from torchwright.workloads.huggingface import quiet_transformers

DENOISERS = frozenset(family.denoiser for family in FAMILIES.values())
IDENTIFIERS = ("timestep", "img_ids", "txt_ids", "guidance")
"""Inputs that are numbers of steps or places: bfloat16 has nothing between 980 and 984."""
Ask = Callable[..., Any]
"""Calls a part: (part, *args, **kwargs), as `PipelineModules` does."""


class PipelineModules(nn.Module):
    """Text encoders, denoiser and VAE as one module.

    `forward("transformer", …)` returns the denoiser's output for a step, and `forward("text_encoder", …)` the encoder's
    outputs by name. `forward("vae", latents)` returns pictures (B, 3, H, W) or films (B, 3, F, H, W) from -1 to 1.
    """

    def __init__(self, components: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in components.items():
            self.add_module(name, module)

    def forward(self, part: str, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.get_submodule(part)
        if part == "vae":
            return module.decode(*args, return_dict=False)[0]
        if part in DENOISERS:
            return module(*args, return_dict=False, **kwargs)[0]
        return {name: value for name, value in module(*args, **kwargs).items() if _is_tensors(value)}


def build_parts(folder: PipelineFolder) -> PipelineModules:
    """The components that compute, in float32 and eval mode, from safetensors alone.

    Raises `ModelError`, naming the component, for weights that do not fit.
    """
    components = {name: _load(folder, name) for name in folder.models}
    parts = PipelineModules(components).eval()
    for parameter in parts.parameters():
        parameter.requires_grad_(False)
    for module in parts.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float64:
                module._buffers[name] = buffer.float()  # CogVideoX's places, which its weights lack
    return parts


def empty_parts(folder: PipelineFolder) -> PipelineModules:
    """The same with whatever weights their classes begin with: without data under a mode that makes none."""
    return PipelineModules({name: _empty(folder, name) for name in folder.models}).eval()


def find_class(library: str, name: str, base: str) -> Any:
    """A class of diffusers or transformers that derives from `base`; raises `ModelError` for anything else."""
    with quiet_import(), quiet_transformers():
        try:
            import diffusers
        except ImportError as error:
            raise ModelError(
                "pipelines are opened with diffusers, which cannot be imported here",
                found=first_line(error),
                next=INSTALL,
            ) from error
        import transformers

        found = getattr({"diffusers": diffusers, "transformers": transformers}[library], name, None)
    bases = [cls.__name__ for cls in found.__mro__] if inspect.isclass(found) else []
    if base not in bases:
        raise ModelError(f"{library} has no {base} of the name {name[:80]}")
    return found


BASES = {"diffusers": "ModelMixin", "transformers": "PreTrainedModel"}


def _class_of(folder: PipelineFolder, name: str) -> Any:
    """A component's class; raises `ModelError` for a configuration of which none should be made."""
    library, kind = folder.components[name]
    read_config(folder.path / name)
    return find_class(library, kind, BASES[library])


def _load(folder: PipelineFolder, name: str) -> nn.Module:
    library, kind = folder.components[name]
    if not any((folder.path / name).glob("*.safetensors")):
        raise ModelError(
            f"{folder.path / name} has no *.safetensors", next="other files of weights are not opened"
        )
    cls = _class_of(folder, name)
    options: dict[str, Any] = (
        {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
        if library == "diffusers"
        else {"dtype": torch.float32, "trust_remote_code": False}
    )
    try:
        with quiet_transformers():
            model, loaded = cls.from_pretrained(
                folder.path / name,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise ModelError(
            f"{library} cannot load {folder.path / name}",
            found=f"{type(error).__name__}: {first_line(error)}",
            next="check that config.json and the *.safetensors belong together",
        ) from error
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {folder.path / name} are not those of {kind}",
            found=f"{len(missing)} missing, such as {missing[0]}",
        )
    return model


def _empty(folder: PipelineFolder, name: str) -> nn.Module:
    """A component on the current device, with whatever weights its class begins with."""
    library, kind = folder.components[name]
    cls = _class_of(folder, name)
    try:
        with quiet_transformers():
            if library == "diffusers":
                return cls.from_config(cls.load_config(folder.path / name, local_files_only=True))
            config = cls.config_class.from_pretrained(folder.path / name, local_files_only=True)
            return cls._from_config(config)
    except Exception as error:
        raise ModelError(
            f"{library} makes no {kind} of {folder.path / name}",
            found=f"{type(error).__name__}: {first_line(error)}",
        ) from error


def stand_ins(folder: PipelineFolder, ask: Ask, device: str) -> dict[str, nn.Module]:
    """Components for diffusers' pipeline that have no data, and ask `ask` for whatever they would compute."""
    with torch.device("meta"):
        modules = {name: _empty(folder, name) for name in folder.models}
    for name, module in modules.items():
        _fill_buffers(folder.path / name, module)
    return {name: _stand_in(module, name, ask, device) for name, module in modules.items()}


def _fill_buffers(path: Path, module: nn.Module) -> None:
    """Read the buffers of the module itself that its weights hold: a pipeline computes with some of a VAE."""
    wanted = {name for name in module.state_dict() if name in module._buffers}
    for file in sorted(path.glob("*.safetensors")) if wanted else ():
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in wanted & set(tensors.keys()):
                    module._buffers[name] = tensors.get_tensor(name)
        except Exception as error:
            raise ModelError(f"{file} cannot be read", found=first_line(error)) from error


def _stand_in(module: nn.Module, part: str, ask: Ask, device: str) -> nn.Module:
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = kwargs.pop("return_dict", True)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        output = ask(part, *args, **kwargs)
        if part in DENOISERS and not whole:
            return (output,)
        return PipelineOutput({"sample": output} if part in DENOISERS else output)

    def decode(_: nn.Module, latents: torch.Tensor, time: torch.Tensor | None = None, **kwargs: Any) -> Any:
        output = ask(part, latents) if time is None else ask(part, latents, time)
        return PipelineOutput({"sample": output}) if kwargs.get("return_dict", True) else (output,)

    cls: Any = type(module)
    # A pipeline reads more of a model than its configuration; the parameters here have no data, and no device.
    changed = {
        "forward": forward,
        "device": property(lambda _: torch.device(device)),
        "dtype": property(lambda _: torch.float32),
        "__module__": cls.__module__,
    }
    if part == "vae":
        changed["decode"] = decode
    module.__class__ = type(cls.__name__, (cls,), changed)
    return module.eval()


class PipelineOutput(dict[str, Any]):
    """A model's outputs by name, by attribute, and by number, as pipelines of diffusers ask for them."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _is_tensors(value: Any) -> bool:
    """Check whether `value` is a tensor or a tuple of tensors."""
    items = value if isinstance(value, tuple) else (value,)
    return all(isinstance(item, torch.Tensor) for item in items)
