"""What others' own code makes of the same files: gguf, compressed-tensors, bitsandbytes, torchao, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
import quantized as made
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_formats import CASES
from test_gguf import letters

from torchwright.hub.checkpoint import Checkpoint
from torchwright.models.decoder import load_decoder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))


def wide(folder: Path) -> dict[str, torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    return dict(Checkpoint(folder, config).tensors(torch.float32))


def token_ids() -> torch.Tensor:
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", files.SIZES)
def test_gguf_reads_blocks_alike(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    content, wanted = files.blocks(kind, (6, 512), seed=3)
    rows = np.frombuffer(content, np.uint8).reshape(6, -1)
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_file_that_gguf_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model = made.build("qwen3", num_hidden_layers=1, intermediate_size=256)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    config = model.config
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocabulary = letters()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_scores(vocabulary["tokenizer.ggml.scores"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for at, (name, tensor) in enumerate(model.state_dict().items()):
        if tensor.ndim == 1:
            writer.add_tensor(files.stored_name(name), tensor.numpy())
            continue
        kind = gguf.GGMLQuantizationType[("Q8_0", "Q4_0", "Q5_1", "BF16")[at % 4]]
        data = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(files.stored_name(name), data, raw_dtype=kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_decoder(tmp_path / "model.gguf")
    torch.testing.assert_close(loaded.logits(token_ids()), made.logits(model, token_ids()), rtol=0, atol=1e-4)
    assert loaded.text.decode(loaded.text.encode("hello world")) == "hello world"


@pytest.mark.parametrize("family", made.FAMILIES)
def test_transformers_reads_gguf_alike(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    pytest.importorskip(
        "accelerate", reason="pip install accelerate, with which transformers reads GGUF files"
    )
    # Which reads no size of heads for Qwen3, and takes the family's.
    own = {"head_dim": 128} if family == "qwen3" else {}
    model = made.build(family, num_hidden_layers=1, intermediate_size=256, **own)
    kinds = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0")
    path = files.model_file(tmp_path / "model.gguf", model, lambda name: kinds[len(name) % 5], letters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_decoder(path)
    torch.testing.assert_close(ours.logits(token_ids()), made.logits(theirs, token_ids()), rtol=0, atol=1e-4)
    for said in ("hello world", "well hold<|tool|>"):
        assert ours.text.encode(said) == tokenizer(said)["input_ids"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("ct-")])
def test_compressed_tensors_reads_alike(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings, writer = CASES[case][0]()
    folder = made.write(made.build("llama", num_hidden_layers=1), tmp_path, settings, writer)
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor: Any = BaseCompressor.get_value_from_registry(settings["format"])
    stored, found = load_file(folder / "model.safetensors"), wide(folder)
    for base in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        parts = {
            name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(f"{base}.")
        }
        theirs = compressor.decompress(parts, scheme)["weight"].float()
        # Theirs is in the scales' type, some of it bfloat16.
        torch.testing.assert_close(theirs, found[f"{base}.weight"], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_reads_alike(kind: str, double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from bitsandbytes import functional

    wanted: dict[str, torch.Tensor] = {}

    def put(base: str, weight: np.ndarray) -> made.Written:
        packed, state = functional.quantize_4bit(
            torch.from_numpy(weight).float(), blocksize=64, quant_type=kind, compress_statistics=double
        )
        wanted[f"{base}.weight"] = functional.dequantize_4bit(packed, state).float()
        parts = {f"{base}.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {f"{base}.weight": packed, **parts}, wanted[f"{base}.weight"].numpy()

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    found = wide(made.write(made.build("llama", num_hidden_layers=1), tmp_path, settings, put))
    for name, theirs in wanted.items():
        torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["int8", "int8-groups", "int4-unpacked", "float8"])
def test_torchao_writes_what_is_read(kind: str, tmp_path: Path) -> None:
    from torchao import quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "int8-groups": lambda: ao.IntxWeightOnlyConfig(torch.int8, ao.PerGroup(32)),
        "int4-unpacked": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(64)),
        "float8": lambda: ao.Float8WeightOnlyConfig(),
    }[kind]()
    model = made.build("llama", num_hidden_layers=1).bfloat16()
    ao.quantize_(model, config, filter_fn=lambda module, name: name.endswith("_proj"))
    tensors, metadata = flatten_tensor_state_dict(
        {name: parameter.data for name, parameter in model.named_parameters()}
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        metadata=metadata,
    )
    settings = {"quantization_config": {"quant_method": "torchao"}, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(model.config.to_json_string()) | settings))
    found = wide(tmp_path)
    for name, parameter in model.named_parameters():
        theirs: Any = parameter.data
        theirs = theirs.dequantize() if hasattr(theirs, "qdata") else theirs
        torch.testing.assert_close(found[name], theirs.float(), rtol=2**-8, atol=1e-6)
    assert load_decoder(tmp_path).logits(token_ids()).isfinite().all()


def test_transformers_reads_block_fp8_alike(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    folder = made.write(made.build("qwen3", num_hidden_layers=1), tmp_path, *made.block_fp8([128, 128]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    ours = load_decoder(folder)
    torch.testing.assert_close(ours.logits(token_ids()), made.logits(theirs, token_ids()), rtol=0, atol=2e-2)
