"""Prediction of a server's memory and speed before anything is loaded, from file headers and config.json.

No torch here: the figures are there at once. They are predictions; the engine's own follow when it is ready.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.core.paths import cache_folder
from torchwright.core.scheme import ASKED, BF16, Scheme, read_scheme
from torchwright.hub.architectures import recognize
from torchwright.hub.context import longest_context
from torchwright.hub.fields import Fields
from torchwright.hub.folder import MTP, find_object, read_config, resolve
from torchwright.hub.language_part import language_part, loaded_tensors
from torchwright.hub.mtp import is_mtp_layer
from torchwright.hub.tensor_header import read_header
from torchwright.hub.trained import trained_scheme
from torchwright.serve.folder import ServeTarget
from torchwright.serve.options import KV_SHARE, EngineOptions, check_context

PROMPT = 512
"""Tokens of the prompt whose time to first token is predicted."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
SECTIONS = ("rope_scaling", "rope_parameters")
"""Fields of every native family that are integers, and those that are objects; null counts as absent."""
KV_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
KEEPS = ("awq", "gptq", "gguf", "compressed-tensors", "torchao", "fp8", "mxfp4")
"""Formats whose numbers stay as they are where a layout has them (models/decoder/repack.py)."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The figures, in bytes, tokens and seconds; None where they are not known."""

    weight_bytes: int
    token_bytes: int
    """Keys and values of one token."""
    kv_bytes: int
    available_bytes: int
    context: int
    """The longest a sequence may be."""
    full_requests: float
    """Requests of the whole context that fit at the same time."""
    ttft_s: float | None
    tpot_s: float | None
    advice: str | None
    """The one flag to change where something does not fit."""

    def __str__(self) -> str:
        lines = [
            f"weights    about {gib(self.weight_bytes)}",
            f"KV cache   {gib(self.kv_bytes)} of {gib(self.available_bytes)} available, "
            f"{self.token_bytes / 1024:.1f} KiB for each token",
            f"context    {self.context} tokens; {self.full_requests:.1f} requests of that length fit at once",
        ]
        if self.ttft_s is not None and self.tpot_s is not None:
            lines.append(
                f"predicted  at best {1000 * self.ttft_s:.1f} ms to the first token of {PROMPT}, "
                f"{1000 * self.tpot_s:.1f} ms for each further one (measured ceilings, one request)"
            )
        else:
            lines.append(
                "predicted  nothing: this machine's ceilings are not measured; `torchwright doctor` measures them "
                "when it is quiet"
            )
        return "\n".join([*lines, *([f"advice     {self.advice}"] if self.advice else [])])


def preflight(target: ServeTarget, options: EngineOptions, available: int | None = None) -> Preflight | None:
    """Return the figures of a language model on the CPU; None on other devices, whose memory only torch knows, and for
    any other model, which has no cache of pages.

    `available` is the memory to plan for, in bytes; by default what this machine has now.

    Raises `WorkloadError` for a context longer than the model's own, and what `recognize` does.
    """
    if target.served_as != "writer" or target.fixed or (options.device or target.device) != "cpu":
        return None
    file, described = target.folder / "config.json", read_config(target.folder)
    if target.artifact is None:
        _, described = recognize(language_part(described), file)
    config = Fields(file, described)
    _check_fields(config)
    scheme = _scheme(target, options)
    kv = options.kv or options.dtype or "bf16"
    plain = _plain(options)
    if config.data.get("quantization_config") is not None and target.artifact is None:
        weights, parameters = _quantized_weights(target, config, options, scheme)
    else:
        weights, parameters = _weights(target, scheme, plain)
    token_bytes = _token_bytes(target, config, kv)
    draft_weights, draft_token = _draft(config, options, scheme, kv, token_bytes)
    weights, token_bytes = weights + draft_weights, token_bytes + draft_token
    longest = longest_context(described, config.integer("max_position_embeddings"))
    check_context(options.max_context, longest)
    context = min(longest, options.max_context or longest)
    available = available_bytes() if available is None else available
    room = max(0, available - weights)
    kv_bytes = options.kv_memory if options.kv_memory is not None else int(available * KV_SHARE)
    kv_bytes = min(kv_bytes, options.max_running * context * token_bytes)
    ttft, tpot = _predict(weights, parameters, scheme or BF16)
    return Preflight(
        weight_bytes=weights,
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        available_bytes=available,
        context=context,
        full_requests=kv_bytes / (context * token_bytes),
        ttft_s=ttft,
        tpot_s=tpot,
        advice=_advice(options, scheme, kv, weights, room, kv_bytes, context, token_bytes),
    )


def _check_fields(config: Fields) -> None:
    """Raise `ModelError` for sizes and sections that the engine would refuse once it reads the model."""
    for key in SIZES:
        if config.data.get(key) is not None:
            config.integer(key)
    for key in SECTIONS:
        config.section(key)


def _scheme(target: ServeTarget, options: EngineOptions) -> Scheme | None:
    """Return the layers' quantization scheme: the requested one, or the one that the weights were trained for."""
    if options.quantize is None and target.artifact is None:
        return read_scheme(trained_scheme(target.folder))
    return read_scheme(options.quantize)


def available_bytes() -> int:
    """Memory that programs can still have; within a cgroup's limit where there is one."""
    found = re.search(
        r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    limits = [int(found[1]) * 1024] if found else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def gib(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _advice(
    options: EngineOptions,
    scheme: Scheme | None,
    kv: str,
    weights: int,
    room: int,
    kv_bytes: int,
    context: int,
    token_bytes: int,
) -> str | None:
    whole = context * token_bytes
    if not room and scheme is None:
        count = weights // _plain(options)
        small = min(ASKED.values(), key=lambda scheme: scheme.bytes_of(count))
        return (
            f"the weights do not fit into memory: --quantize {small.name} "
            f"takes about {gib(small.bytes_of(count))}"
        )
    if not room:
        return "the weights do not fit into memory: take a smaller model"
    if kv_bytes >= whole and kv_bytes <= room:
        return None
    if whole <= room:
        return (
            f"not one request of {context} tokens fits: --kv-memory {math.ceil(whole / 2**20)}MiB"
            if (kv_bytes < whole)
            else f"weights and cache together do not fit: --kv-memory {room // 2**20}MiB"
        )
    if kv != "int8" and whole / KV_BYTES[kv] <= room:
        return f"not one request of {context} tokens fits: --kv int8"
    return f"not one request of {context} tokens fits: --max-context {room // token_bytes // 16 * 16}"


def _plain(options: EngineOptions) -> int:
    """Bytes of a number that is not quantized."""
    return 4 if options.dtype == "fp32" else 2


def _weights(target: ServeTarget, scheme: Scheme | None, plain: int) -> tuple[int, int]:
    """(bytes in memory, parameters that every token is multiplied with)."""
    if target.artifact is not None:
        files = [target.artifact / "decoder.safetensors", *sorted(target.artifact.glob("**/*.safetensors"))]
        stored = next(file for file in files if file.is_file())
        shapes = dict(_shapes(stored))
        return stored.stat().st_size, sum(
            math.prod(shape) for name, shape in shapes.items() if "embed" not in name
        )
    rounded = scheme.bytes_of if scheme else lambda count: count * plain
    total, parameters, has_head, embedding = 0, 0, False, 0
    files = sorted(target.folder.glob("*.safetensors"))
    loaded = loaded_tensors(read_config(target.folder))
    if not files:
        raise ModelError(f"{target.folder} has no *.safetensors", next="serve a folder that has weights")
    for name, shape in (item for file in files for item in _shapes(file)):
        size = math.prod(shape)
        if not loaded(name):
            continue
        if "embed" in name:
            embedding = size
            total += size * plain
            continue
        has_head = has_head or "lm_head" in name
        parameters += size
        total += rounded(size) if len(shape) > 1 else size * plain
    if not has_head:  # the output layer is the embedding, packed once more
        parameters += embedding
        total += rounded(embedding)
    return total, parameters


def _quantized_weights(
    target: ServeTarget, config: Fields, options: EngineOptions, scheme: Scheme | None
) -> tuple[int, int]:
    """`_weights` of a quantized checkpoint, whose files' shapes are not the model's: by the sizes in config.json.

    Integers that stay as they are take what their files take; whatever is made wide or rounded anew takes its own size.
    """
    E, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, kv_heads, head_dim = _heads(config)
    experts = config.integer("num_experts", config.integer("num_local_experts", 1))
    narrow = config.data.get("moe_intermediate_size") is not None
    feed_forward = config.integer("moe_intermediate_size" if narrow else "intermediate_size")
    embedding = config.integer("vocab_size") * E
    layer = 2 * E * head_dim * (heads + kv_heads) + 3 * E * feed_forward * experts
    parameters, plain = layers * layer + embedding, _plain(options)
    if (
        options.quantize is None
        and plain == 2
        and config.section("quantization_config").data.get("quant_method") in KEEPS
    ):
        files = [file for pattern in ("*.safetensors", "*.gguf") for file in target.folder.glob(pattern)]
        return sum(file.stat().st_size for file in files) + embedding * plain, parameters
    linear = parameters * plain if scheme is None else scheme.bytes_of(parameters)
    return linear + embedding * plain, parameters


def _draft(
    config: Fields, options: EngineOptions, scheme: Scheme | None, kv: str, token_bytes: int
) -> tuple[int, int]:
    """(bytes of a draft's weights, of its keys and values of a token); `token_bytes` are the model's own."""
    if options.draft is None:
        return 0, 0
    if options.draft == MTP:  # one more layer, whose tensors are in the model's own files
        return 0, token_bytes // config.integer("num_hidden_layers")
    folder = resolve(options.draft)
    described = Fields(folder / "config.json", read_config(folder))
    layer = described.section("transformer_layer_config")  # of heads in speculators' layout
    draft = ServeTarget(name="draft", folder=folder)
    weights = _weights(draft, scheme, _plain(options))[0]
    if is_mtp_layer(name for file in folder.glob("*.safetensors") for name, _ in _shapes(file)):
        return weights, token_bytes // config.integer("num_hidden_layers")
    fields = layer if layer.data else described
    return weights, _token_bytes(draft, fields, kv)


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a safetensors file, from its header alone."""
    try:
        for name, tensor in read_header(file).items():
            yield name, tensor.shape
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is no safetensors file", found=str(error)) from error


def _token_bytes(target: ServeTarget, config: Fields, kv: str) -> int:
    if target.artifact is not None:
        kv = str(find_object(target.artifact / "decoder.json").get("kv", kv))
    if kv not in KV_BYTES:
        raise ModelError(f"--kv {kv}", allowed=", ".join(KV_BYTES))
    _, kv_heads, head_dim = _heads(config)
    if config.data.get("kv_lora_rank") is not None:  # latent attention keeps one vector for all heads
        kv_heads, head_dim = 1, config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim", 64)
    vector = head_dim * KV_BYTES[kv] + (4 if kv == "int8" else 0)  # and a scale for each token and head
    layers = config.integer("num_hidden_layers") - config.integer("num_kv_shared_layers", 0, minimum=0)
    return layers * 2 * kv_heads * vector


def _heads(config: Fields) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key and value heads, and the dimensions of one."""
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    return heads, config.integer("num_key_value_heads", heads), head_dim


def _predict(weights: int, parameters: int, scheme: Scheme) -> tuple[float | None, float | None]:
    """(seconds to the first token, seconds for each further one) at this machine's measured ceilings."""
    ceilings = _ceilings()
    if ceilings is None or scheme.products not in ceilings["tflops"]:
        return None, None
    read = weights / (ceilings["read_gb_per_s"] * 1e9)
    operations = 2 * scheme.digits * parameters * PROMPT
    compute = operations / (ceilings["tflops"][scheme.products] * 1e12)
    return max(read, compute), read


def _ceilings() -> dict[str, Any] | None:
    """Return the newest undisturbed ceilings that were measured with this torch on a CPU."""
    files = sorted(
        cache_folder().glob("ceilings/*.json"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    for file in files:
        found = find_object(file)
        measured_on = found.get("measured_on", {})
        same = measured_on.get("torch") == version("torch")
        ceilings = found.get("ceilings", {})
        # Files of earlier versions do not say what disturbed them.
        undisturbed = ceilings.get("disturbed", "unknown") is None
        if same and undisturbed and measured_on.get("device", {}).get("kind") == "cpu":
            return ceilings
    return None
