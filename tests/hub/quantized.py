"""Small quantized checkpoints, written by hand from the formats' published descriptions, and what they stand for.

Each writer takes a weight (N, K), chooses integers, scales and zeros as a user's tool would, packs them number by
number, and gives the tensors of the file with the weight that they stand for, in float64: (q − z) · s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

Written = tuple[dict[str, torch.Tensor], np.ndarray]
Writer = Callable[[str, np.ndarray], Written]

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
}


def build(family: str, seed: int = 0, **options: Any) -> Any:
    """A random model of transformers in float32, with weights wide enough for logits of order 1."""
    kind, own = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | own | options))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2 if name.endswith("bias") else 0.08)
        if "norm" in name:
            parameter.data.add_(1.0)
    return model.requires_grad_(False)


def write(
    model: Any, folder: Path, settings: dict[str, Any], writer: Writer, metadata: dict[str, str] | None = None
) -> Path:
    """The folder of the model with its linear layers as `writer` writes them; the model gets what they stand for."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if "_proj.weight" in name:
            written, wide = writer(name.removesuffix(".weight"), tensor.double().numpy())
            tensors |= written
            tensor.copy_(torch.from_numpy(wide))
        else:
            tensors[name] = tensor.contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_BT, use_cache=False).logits


def words(values: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """32-bit words along the last axis: value j of each word from bit places[j] on."""
    count = 32 // bits
    places = places or tuple(range(0, 32, bits))
    parts = values.astype(np.uint64).reshape(*values.shape[:-1], -1, count)
    packed = sum(parts[..., j] << np.uint64(places[j]) for j in range(count))
    return packed.astype(np.uint32).view(np.int32)


def grouped(
    weight: np.ndarray, group: int, bits: int, *, symmetric: bool, scale_type: Any = np.float16
) -> Any:
    """(integers from 0 on (N, K), scales (N, G), zeros (N, G)) of groups along the input."""
    N, K = weight.shape
    parts = weight.reshape(N, K // group, group)
    top, half = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (np.abs(parts).max(2) / (half - 0.5)).astype(scale_type)
        zeros = np.full(scales.shape, half)
    else:
        low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
        scales = ((high - low) / top).astype(scale_type)
        zeros = np.clip(np.round(-low / scales.astype(np.float64)), 0, top)
    steps = scales.astype(np.float64)[..., None]
    integers = np.clip(np.round(parts / steps) + zeros[..., None], 0, top)
    return integers.reshape(N, K), scales, zeros


def wide(integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | float = 0.0) -> np.ndarray:
    """(q − z) · s in float64, the last two for equal groups of the input."""
    N, K = integers.shape
    parts = integers.astype(np.float64).reshape(N, scales.shape[1], -1)
    zeros = np.broadcast_to(np.asarray(zeros, dtype=np.float64), scales.shape)
    return ((parts - zeros[..., None]) * scales.astype(np.float64)[..., None]).reshape(N, K)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the feature that lies at nibble i of a word."""


def awq(group: int, *, symmetric: bool = False) -> tuple[dict[str, Any], Writer]:
    def put(base: str, weight: np.ndarray) -> Written:
        q, s, z = grouped(weight, group, 4, symmetric=symmetric)

        def pack(values: np.ndarray) -> torch.Tensor:
            ordered = values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)].reshape(values.shape)
            return torch.from_numpy(words(ordered, 4))

        return {
            f"{base}.qweight": pack(q.T),
            f"{base}.qzeros": pack(z.T),
            f"{base}.scales": torch.from_numpy(s.T.copy()),
        }, wide(q, s, z)

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": not symmetric,
    }
    return settings, put


def gptq(
    group: int, bits: int = 4, *, symmetric: bool = True, act_order: bool = False, v2: bool = False
) -> tuple[dict[str, Any], Writer]:
    def put(base: str, weight: np.ndarray) -> Written:
        K = weight.shape[1]
        size = K if group < 0 else group
        order = np.random.default_rng(len(base)).permutation(K) if act_order else np.arange(K)
        # Columns in the order of their activations share scales.
        q_sorted, s, z = grouped(weight[:, order], size, bits, symmetric=symmetric)
        dequantized, q, index = np.empty_like(weight), np.empty_like(q_sorted), np.empty(K, np.int32)
        dequantized[:, order], q[:, order], index[order] = (
            wide(q_sorted, s, z),
            q_sorted,
            np.arange(K) // size,
        )
        stored = z if v2 else (z - 1) % 2**bits
        tensors = {
            f"{base}.qweight": torch.from_numpy(words(q, bits).T.copy()),
            f"{base}.qzeros": torch.from_numpy(words(stored.T.copy(), bits)),
            f"{base}.scales": torch.from_numpy(s.T.copy()),
            f"{base}.g_idx": torch.from_numpy(index),
        }
        return tensors, dequantized

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
    }
    return settings | ({"checkpoint_format": "gptq_v2"} if v2 else {}), put


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Writer]:
    bits, strategy = weights["num_bits"], weights["strategy"]
    symmetric = weights.get("symmetric", True)

    def put(base: str, weight: np.ndarray) -> Written:
        N, K = weight.shape
        if weights["type"] == "float":
            return float8(base, weight, strategy, weights.get("block_structure"))
        group = weights.get("group_size") if strategy == "group" else K
        q, s, z = grouped(weight, group, bits, symmetric=symmetric, scale_type=np.float32)
        tensors = {f"{base}.weight_scale": torch.from_numpy(s).bfloat16()}
        s = tensors[f"{base}.weight_scale"].double().numpy()
        half = 2 ** (bits - 1)
        if layout == "pack-quantized":
            tensors[f"{base}.weight_packed"] = torch.from_numpy(words(q, bits))
            tensors[f"{base}.weight_shape"] = torch.tensor([N, K])
            if not symmetric:
                tensors[f"{base}.weight_zero_point"] = torch.from_numpy(words(z.T.copy(), bits).T.copy())
        else:
            tensors[f"{base}.weight"] = torch.from_numpy((q - half).astype(np.int8))
            if not symmetric:
                tensors[f"{base}.weight_zero_point"] = torch.from_numpy((z - half).astype(np.int8))
        return tensors, wide(q, s, z)

    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return settings | {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}, put


def float8(
    base: str, weight: np.ndarray, strategy: str, block: list[int] | None, name: str = "weight_scale"
) -> Written:
    N, K = weight.shape
    rows, columns = {"tensor": (N, K), "channel": (1, K)}.get(strategy) or tuple(block or (0, 0))
    tall, broad = -(-N // rows), -(-K // columns)
    scale, q = np.empty((tall, broad), np.float32), np.empty((N, K), np.float32)
    dequantized = np.empty((N, K))
    for i in range(tall):
        for j in range(broad):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(weight[at]).max() / 448
            q[at] = torch.from_numpy(weight[at] / scale[i, j]).to(torch.float8_e4m3fn).float().numpy()
            dequantized[at] = q[at].astype(np.float64) * scale[i, j]
    stored = torch.from_numpy(scale if strategy != "tensor" else scale.reshape(1))
    return {
        f"{base}.weight": torch.from_numpy(q).to(torch.float8_e4m3fn),
        f"{base}.{name}": stored,
    }, dequantized


def block_fp8(block: list[int] | None) -> tuple[dict[str, Any], Writer]:
    strategy = "tensor" if block is None else "block"
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": block,
    }
    return settings, lambda base, weight: float8(base, weight, strategy, block, "weight_scale_inv")


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)


def nf4(*, double: bool, size: int = 64) -> tuple[dict[str, Any], Writer]:
    table = np.array(NF4, np.float32)

    def put(base: str, weight: np.ndarray) -> Written:
        flat = weight.reshape(-1, size)
        largest = np.abs(flat).max(1).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": size,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors = {f"{base}.weight.quant_map": torch.tensor(NF4)}
        if double:
            offset = float(largest.mean())
            codes = np.linspace(-1, 1, 256, dtype=np.float32)
            beyond = largest - offset
            outer = np.array(
                [np.abs(beyond[i : i + 256]).max() for i in range(0, len(beyond), 256)], np.float32
            )
            each = np.repeat(outer, 256)[: len(beyond)]
            index = np.abs(beyond[:, None] / each[:, None] - codes).argmin(1).astype(np.uint8)
            tensors[f"{base}.weight.absmax"] = torch.from_numpy(index)
            tensors[f"{base}.weight.nested_absmax"] = torch.from_numpy(outer)
            tensors[f"{base}.weight.nested_quant_map"] = torch.from_numpy(codes)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            largest = codes[index].astype(np.float64) * each + offset
        else:
            tensors[f"{base}.weight.absmax"] = torch.from_numpy(largest)
        index = np.abs((flat / largest[:, None])[..., None] - table).argmin(2)
        pairs = index.reshape(-1, 2)
        tensors[f"{base}.weight"] = torch.from_numpy((pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8))[
            :, None
        ]
        text = json.dumps(state).encode()
        tensors[f"{base}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[index].astype(np.float64) * largest[:, None].astype(np.float64)).reshape(
            weight.shape
        )

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return settings | {"bnb_4bit_use_double_quant": double}, put


def llm_int8() -> tuple[dict[str, Any], Writer]:
    def put(base: str, weight: np.ndarray) -> Written:
        largest = np.abs(weight).max(1).astype(np.float32)
        q = np.round(weight / largest[:, None] * 127).astype(np.int8)
        tensors = {f"{base}.weight": torch.from_numpy(q), f"{base}.SCB": torch.from_numpy(largest)}
        return tensors, q.astype(np.float64) * largest[:, None].astype(np.float64) / 127

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, put


def torchao(
    kind: str, block: Callable[[int, int], list[int]]
) -> tuple[dict[str, Any], Writer, dict[str, str]]:
    described: dict[str, str] = {}

    def put(base: str, weight: np.ndarray) -> Written:
        N, K = weight.shape
        size = block(N, K)
        parts = ["qdata", "scale"]
        if kind == "Float8Tensor":
            tensors, dequantized = float8(base, weight, "channel", None)
            tensors = {
                f"{base}._weight_qdata": tensors[f"{base}.weight"],
                f"{base}._weight_scale": tensors[f"{base}.weight_scale"],
            }
        else:
            q, s, z = grouped(weight, size[1], 8, symmetric=kind == "Int8Tensor", scale_type=np.float32)
            scale = torch.from_numpy(s).bfloat16()
            s = scale.double().numpy()
            tensors = {
                f"{base}._weight_qdata": torch.from_numpy((q - 128).astype(np.int8)),
                f"{base}._weight_scale": scale,
            }
            if kind != "Int8Tensor":
                tensors[f"{base}._weight_zero_point"] = torch.from_numpy((z - 128).astype(np.int8))
                parts.append("zero_point")
            dequantized = wide(q, s, z)
        described[f"{base}.weight"] = json.dumps(
            {
                "_type": kind,
                "_data": {"block_size": size, "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
                "_tensor_data_names": parts,
            }
        )
        return tensors, dequantized

    return {"quant_method": "torchao", "quant_type": {"default": {}}}, put, described
