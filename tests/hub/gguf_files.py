"""GGUF files written number by number from ggml's description, and what their blocks stand for."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
    "MXFP4": 39,
}
SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
SIZES |= {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "MXFP4": (32, 17)}
ALIGNMENT = 32


class U32(int):
    """A number that a file keeps as UINT32."""


class I32(int):
    """A number that a file keeps as INT32, which llama.cpp asks of the types of tokens."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A typed value: bool, U32, I32, int (INT64), float (FLOAT32), str, or a list of one kind."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, U32):
        return struct.pack("<II", 4, item)
    if isinstance(item, I32):
        return struct.pack("<Ii", 5, item)
    if isinstance(item, int):
        return struct.pack("<Iq", 11, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    each = [value(part) for part in item]
    kind = each[0][:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(each)) + b"".join(part[4:] for part in each)


def header(metadata: dict[str, Any], infos: list[bytes]) -> bytes:
    keys = b"".join(text(key) + value(item) for key, item in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata)) + keys + b"".join(infos)


def info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    extents = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + extents + struct.pack("<IQ", kind, offset)


def write(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """Tensors by name: type, shape with the innermost extent last, bytes."""
    infos, data = [], b""
    for name, (kind, shape, content) in tensors.items():
        infos.append(info(name, shape, TYPES[kind], len(data)))
        data += content + bytes(-len(content) % ALIGNMENT)
    head = header(metadata, infos)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


def blocks(kind: str, shape: tuple[int, int], seed: int, std: float = 0.08) -> tuple[bytes, np.ndarray]:
    """Random blocks of a type for a matrix, and the float64 numbers that they stand for, of about this deviation."""
    numbers, size = SIZES[kind]
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (shape[0] * shape[1] // numbers, size)).astype(np.uint8)
    halves, levels = HALVES[kind]
    for at, share in halves:
        scale = random.uniform(0.7, 1.3, len(found)) * std / levels * share
        found[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == "Q6_K":
        found[:, 192:208] = random.integers(20, 60, (len(found), 16)).astype(np.uint8)
    if kind == "MXFP4":
        found[:, 0] = random.integers(-1, 2, len(found)) + round(np.log2(std / 3)) + 127
    decoded = np.empty((len(found), numbers))
    DECODERS[kind](found.astype(np.int64), half_of(found), decoded)
    return found.tobytes(), decoded.reshape(shape)


HALVES: dict[str, tuple[list[tuple[int, float]], float]] = {
    "Q4_0": ([(0, 1)], 4.6),
    "Q4_1": ([(0, 1), (2, -7.5)], 4.6),
    "Q5_0": ([(0, 1)], 9.2),
    "Q5_1": ([(0, 1), (2, -15.5)], 9.2),
    "Q8_0": ([(0, 1)], 74),
    "Q4_K": ([(0, 1), (2, 7.5)], 250),
    "Q5_K": ([(0, 1), (2, 15.5)], 500),
    "Q6_K": ([(208, 1)], 750),
    "MXFP4": ([], 1),
}
"""Where a block has half-precision numbers, as shares of its scale; about the deviation of its integers."""


def half_of(found: np.ndarray) -> Callable[[int], np.ndarray]:
    return lambda at: found[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float64)


def q4_0(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = ((b[:, 2 + j] & 15) - 8) * half(0)
        y[:, j + 16] = ((b[:, 2 + j] >> 4) - 8) * half(0)


def q4_1(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = (b[:, 4 + j] & 15) * half(0) + half(2)
        y[:, j + 16] = (b[:, 4 + j] >> 4) * half(0) + half(2)


def fifth(b: np.ndarray, at: int, j: int) -> np.ndarray:
    """Bit j of four bytes, as 16."""
    return ((b[:, at + j // 8] >> (j % 8)) & 1) << 4


def q5_0(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = (((b[:, 6 + j] & 15) | fifth(b, 2, j)) - 16) * half(0)
        y[:, j + 16] = (((b[:, 6 + j] >> 4) | fifth(b, 2, j + 16)) - 16) * half(0)


def q5_1(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = ((b[:, 8 + j] & 15) | fifth(b, 4, j)) * half(0) + half(2)
        y[:, j + 16] = ((b[:, 8 + j] >> 4) | fifth(b, 4, j + 16)) * half(0) + half(2)


def q8_0(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for j in range(32):
        y[:, j] = signed(b[:, 2 + j]) * half(0)


def signed(byte: np.ndarray) -> np.ndarray:
    return np.where(byte < 128, byte, byte - 256)


def scale_and_min(b: np.ndarray, j: int) -> tuple[np.ndarray, np.ndarray]:
    """ggml's get_scale_min_k4 on the twelve bytes from 4 on."""
    q = lambda i: b[:, 4 + i]
    if j < 4:
        return q(j) & 63, q(j + 4) & 63
    return (q(j + 4) & 15) | ((q(j - 4) >> 6) << 4), (q(j + 4) >> 4) | ((q(j) >> 6) << 4)


def q4_k(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for group in range(8):
        scale, least = scale_and_min(b, group)
        for i in range(32):
            byte = b[:, 16 + 32 * (group // 2) + i]
            code = byte & 15 if group % 2 == 0 else byte >> 4
            y[:, 32 * group + i] = half(0) * scale * code - half(2) * least


def q5_k(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for group in range(8):
        scale, least = scale_and_min(b, group)
        for i in range(32):
            byte = b[:, 48 + 32 * (group // 2) + i]
            code = byte & 15 if group % 2 == 0 else byte >> 4
            code = code + np.where(b[:, 16 + i] & (1 << group), 16, 0)
            y[:, 32 * group + i] = half(0) * scale * code - half(2) * least


def q6_k(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    for n in range(2):
        low, high, scale = 64 * n, 128 + 32 * n, 192 + 8 * n
        for i in range(32):
            for part, shift in enumerate((0, 2, 4, 6)):
                byte = b[:, low + i + 32 * (part % 2)]
                code = byte & 15 if part < 2 else byte >> 4
                code = (code | ((b[:, high + i] >> shift & 3) << 4)) - 32
                y[:, 128 * n + 32 * part + i] = half(208) * signed(b[:, scale + i // 16 + 2 * part]) * code


def mxfp4(b: np.ndarray, half: Any, y: np.ndarray) -> None:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = 2.0 ** (b[:, 0] - 127)
    for j in range(16):
        for at, code in ((j, b[:, 1 + j] & 15), (j + 16, b[:, 1 + j] >> 4)):
            y[:, at] = scale * values[code & 7] * np.where(code & 8, -1, 1)


DECODERS = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4": mxfp4,
}

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def stored_name(name: str) -> str:
    if name == "rope_freqs":
        return "rope_freqs.weight"
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, part = name.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{part}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{part}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a Llama projection's rows."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def model_file(
    path: Path, model: Any, kind: Callable[[str], str], tokenizer: dict[str, Any], **metadata: Any
) -> Path:
    """A transformers model as a GGUF file, `kind(name)` being each matrix's type; the model gets what it stands for."""
    import torch

    config, family = model.config, model.config.model_type
    found: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.context_length": U32(config.max_position_embeddings),
        f"{family}.embedding_length": U32(config.hidden_size),
        f"{family}.block_count": U32(config.num_hidden_layers),
        f"{family}.feed_forward_length": U32(config.intermediate_size),
        f"{family}.attention.head_count": U32(config.num_attention_heads),
        f"{family}.attention.head_count_kv": U32(config.num_key_value_heads),
        f"{family}.attention.key_length": U32(
            config.head_dim
            if hasattr(config, "head_dim")
            else config.hidden_size // config.num_attention_heads
        ),
        f"{family}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.rpartition(".")[0].rpartition(".")[2]
        )
        turn = family == "llama" and heads is not None
        chosen = kind(name) if tensor.ndim == 2 else "F32"
        if chosen in DECODERS:
            content, decoded = blocks(chosen, tuple(tensor.shape), seed)
            tensor.copy_(torch.from_numpy(unpermuted(decoded, heads) if turn else decoded))
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[chosen]
            tensor.copy_(tensor.to(dtype))
            rows = torch.from_numpy(permuted(tensor.numpy(), heads)) if turn else tensor
            content = rows.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
        tensors[stored_name(name)] = (chosen, tuple(tensor.shape), content)
    return write(path, found | tokenizer | metadata, tensors)
