"""What a server will need and how fast it should be, before anything is loaded: from file headers and config.json.

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

from torchwright.errors import ModelError
from torchwright.paths import cache_folder
from torchwright.serve.folder import Target
from torchwright.serve.options import KV_SHARE
from torchwright.serve.text.codec import read_json
from torchwright.tensor_header import read_header

PROMPT = 512
"""Tokens of the prompt whose time to first token is predicted."""
KV_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
WEIGHT_BYTES = {"none": 2.0, "w8a8": 1.0, "w4a8": 0.5, "w4a16": 0.5}
RATE = {"none": "bfloat16", "w4a16": "bfloat16", "w8a8": "int8", "w4a8": "int8"}
"""The products' type under each scheme."""
KEEPS = ("awq", "gptq", "gguf", "compressed-tensors", "torchao")
"""Formats whose integers stay as they are where a layout has them (decoder/repack.py)."""
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for on the command line."""

    quantize: str | None = None
    kv: str | None = None
    dtype: str | None = None
    kv_memory: int | None = None
    max_context: int | None = None
    max_running: int


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
            lines.append("predicted  nothing yet: `torchwright doctor` measures this machine's ceilings once")
        return "\n".join([*lines, *([f"advice     {self.advice}"] if self.advice else [])])


def preflight(target: Target, wish: Wish) -> Preflight | None:
    """The figures of a language model; None for a sentence encoder, which has no cache."""
    if target.encoder:
        return None
    config = read_json(target.folder / "config.json")
    scheme = (wish.quantize or "none").partition(":")[0]
    kv = wish.kv or wish.dtype or "bf16"
    plain = 4 if wish.dtype == "fp32" else 2
    if config.get("quantization_config") is not None and target.artifact is None:
        weights, parameters = _quantized_weights(target, config, wish, plain)
    else:
        weights, parameters = _weights(target, scheme, plain)
    token_bytes = _token_bytes(target, config, kv)
    longest = _integer(config, "max_position_embeddings")
    context = min(longest, wish.max_context or longest)
    available = available_bytes()
    room = max(0, available - weights)
    kv_bytes = wish.kv_memory if wish.kv_memory is not None else int(available * KV_SHARE)
    kv_bytes = min(kv_bytes, wish.max_running * context * token_bytes)
    ttft, tpot = _predict(weights, parameters, RATE.get(scheme, "bfloat16"))
    return Preflight(
        weight_bytes=weights,
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        available_bytes=available,
        context=context,
        full_requests=kv_bytes / (context * token_bytes),
        ttft_s=ttft,
        tpot_s=tpot,
        advice=_advice(wish, scheme, kv, weights, room, kv_bytes, context, token_bytes),
    )


def available_bytes() -> int:
    """Memory that programs can still have; within a cgroup's limit where there is one."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text().strip() if path.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def gib(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _advice(
    wish: Wish, scheme: str, kv: str, weights: int, room: int, kv_bytes: int, context: int, token_bytes: int
) -> str | None:
    whole = context * token_bytes
    if not room and scheme == "none":
        return f"the weights do not fit into memory: --quantize w4a8 takes about {gib(weights / 4)}"
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


def _weights(target: Target, scheme: str, plain: int) -> tuple[int, int]:
    """(bytes in memory, parameters that every token is multiplied with)."""
    if target.artifact is not None:
        files = [target.artifact / "decoder.safetensors", *sorted(target.artifact.glob("**/*.safetensors"))]
        stored = next(file for file in files if file.is_file())
        shapes = dict(_shapes(stored))
        return stored.stat().st_size, sum(
            math.prod(shape) for name, shape in shapes.items() if "embed" not in name
        )
    total, parameters, has_head, embedding = 0.0, 0, False, 0
    files = sorted(target.folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{target.folder} has no *.safetensors", next="serve a folder that has weights")
    for name, shape in (item for file in files for item in _shapes(file)):
        size = math.prod(shape)
        if "embed" in name:
            embedding = size
            total += size * plain
            continue
        has_head = has_head or "lm_head" in name
        parameters += size
        total += size * (WEIGHT_BYTES.get(scheme, 2.0) if len(shape) > 1 and scheme != "none" else plain)
    if not has_head:  # the output layer is the embedding, packed once more
        parameters += embedding
        total += embedding * (plain if scheme == "none" else WEIGHT_BYTES.get(scheme, 2.0))
    return round(total), parameters


def _quantized_weights(target: Target, config: dict[str, Any], wish: Wish, plain: int) -> tuple[int, int]:
    """`_weights` of a quantized checkpoint, whose files' shapes are not the model's: by the sizes in config.json.

    Integers that stay as they are take what their files take; whatever is made wide or rounded anew takes its own size.
    """
    E, layers = _integer(config, "hidden_size"), _integer(config, "num_hidden_layers")
    heads = _integer(config, "num_attention_heads")
    head_dim = config.get("head_dim") or E // heads
    kv_heads = config.get("num_key_value_heads") or heads
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    feed_forward = config.get("moe_intermediate_size") or _integer(config, "intermediate_size")
    embedding = _integer(config, "vocab_size") * E
    layer = 2 * E * head_dim * (heads + kv_heads) + 3 * E * feed_forward * experts
    parameters = layers * layer + embedding
    if wish.quantize is None and plain == 2 and config["quantization_config"].get("quant_method") in KEEPS:
        files = [file for pattern in ("*.safetensors", "*.gguf") for file in target.folder.glob(pattern)]
        return sum(file.stat().st_size for file in files) + embedding * plain, parameters
    scheme = (wish.quantize or "none").partition(":")[0]
    each = plain if scheme == "none" else WEIGHT_BYTES.get(scheme, 2.0)
    return round(parameters * each) + embedding * plain, parameters


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a safetensors file, from its header alone."""
    try:
        for name, tensor in read_header(file).items():
            yield name, tensor.shape
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is no safetensors file", found=str(error)) from error


def _token_bytes(target: Target, config: dict[str, Any], kv: str) -> int:
    if target.artifact is not None:
        kv = str(read_json(target.artifact / "decoder.json").get("kv", kv))
    if kv not in KV_BYTES:
        raise ModelError(f"--kv {kv}", allowed=", ".join(KV_BYTES))
    heads = _integer(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or _integer(config, "hidden_size") // heads
    vector = head_dim * KV_BYTES[kv] + (4 if kv == "int8" else 0)  # and a scale for each token and head
    return _integer(config, "num_hidden_layers") * 2 * kv_heads * vector


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(
            f"config.json has no '{key}'", found=repr(value), allowed="a language model's config.json"
        )
    return value


def _predict(weights: int, parameters: int, rate: str) -> tuple[float | None, float | None]:
    """(seconds to the first token, seconds for each further one) at this machine's measured ceilings."""
    ceilings = _ceilings()
    if ceilings is None or rate not in ceilings["tflops"]:
        return None, None
    read = weights / (ceilings["read_gb_per_s"] * 1e9)
    compute = 2 * parameters * PROMPT / (ceilings["tflops"][rate] * 1e12)
    return max(read, compute), read


def _ceilings() -> dict[str, Any] | None:
    """The newest ceilings that were measured with this torch on a CPU."""
    files = sorted(
        cache_folder().glob("ceilings/*.json"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    for file in files:
        found = read_json(file)
        measured_on = found.get("measured_on", {})
        same = measured_on.get("torch") == version("torch")
        if same and measured_on.get("device", {}).get("kind") == "cpu":
            return found.get("ceilings")
    return None
