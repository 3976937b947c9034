"""Reading folders: shards, types, older spellings of config.json, and errors that name the file, key or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import LLAMA3, LONGROPE, build, save, token_ids
from torch import nn

from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.hub.files import INDEX
from torchwright.models.decoder import UnsupportedArchitecture, load_decoder, read_decoder_config
from torchwright.models.decoder.weights import plain_linear

Data = dict[str, Any]


def edit(folder: Path, change: Callable[[Data], None], name: str = "config.json") -> Path:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))
    return folder


def older(rope: Data | None = None, theta: float = 10_000.0, **top: Any) -> Callable[[Data], None]:
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling at the top level."""

    def change(data: Data) -> None:
        data.pop("rope_parameters", None)
        data.pop("layer_types", None)
        data.update({"rope_theta": theta, "rope_scaling": rope, **top})

    return change


def theirs(folder: Path, ids_BT: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' logits; loaded anew, because a model cast in place casts its rotary frequencies too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(ids_BT, use_cache=False).logits


ORIGINAL = {"original_max_position_embeddings": 16}
SPELLINGS: dict[str, tuple[str, Callable[[Data], None]]] = {
    "llama-3.2": ("llama", older({"rope_type": "llama3", **LLAMA3, **ORIGINAL}, 500_000.0)),
    "llama-2-linear": ("llama", older({"type": "linear", "factor": 2.0})),
    "llama-dynamic": ("llama", older({"type": "dynamic", "factor": 4.0}, max_position_embeddings=16)),
    "llama-no-kv-heads": ("llama-all-heads", lambda data: data.pop("num_key_value_heads")),
    "qwen2.5-yarn": ("qwen2", older({"type": "yarn", "factor": 4.0, **ORIGINAL}, 1e6, max_window_layers=2)),
    "phi-3": ("phi3-longrope", older({"type": "longrope", **LONGROPE}, **ORIGINAL)),
    "phi-4-partial": ("phi3", older(partial_rotary_factor=0.5)),
    "gemma-3": (
        "gemma3",
        older(
            {"rope_type": "linear", "factor": 4.0}, 1e6, rope_local_base_freq=1e4, sliding_window_pattern=2
        ),
    ),
    "gemma-2": ("gemma2", older(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid")),
    "gemma-2-no-tie-key": ("gemma2", lambda data: data.pop("tie_word_embeddings")),
    "smollm3": ("smollm3", older(theta=5e6, no_rope_layers=[1, 0, 1])),
    "smollm3-window": ("smollm3-window", older(theta=5e6)),
    "qwen2-window": ("qwen2-window", older(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "mistral-null-window": ("mistral", older(sliding_window=None)),
    "qwen2-unused-window": ("qwen2", older(use_sliding_window=False, sliding_window=9, max_window_layers=1)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_mean_what_they_mean_to_transformers(spelling: str, tmp_path: Path) -> None:
    name, change = SPELLINGS[spelling]
    folder = edit(save(build(name), tmp_path), change)
    ids_BT = token_ids(2, 40)
    wanted = theirs(folder, ids_BT)
    torch.testing.assert_close(load_decoder(folder).logits(ids_BT), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_phi3_has_old_names_for_longrope(old: str, tmp_path: Path) -> None:
    folder = edit(save(build("phi3-longrope"), tmp_path), older({"type": "longrope", **LONGROPE}, **ORIGINAL))
    config = read_decoder_config(folder)
    assert read_decoder_config(edit(folder, older({"type": old, **LONGROPE}, **ORIGINAL))) == config


@pytest.mark.parametrize(
    ("name", "context"),
    [("llama", 128), ("llama-linear", 128), ("llama-llama3", 128), ("llama-dynamic", 64), ("qwen2", 128)],
)
def test_context(name: str, context: int, tmp_path: Path) -> None:
    assert read_decoder_config(save(build(name), tmp_path)).context == context


def test_context_of_yarn_where_the_file_keeps_the_trained_length(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = edit(save(build("qwen2"), tmp_path), older(rope))
    assert read_decoder_config(folder).context == 512


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    model = build("llama")
    whole = load_decoder(save(model, tmp_path / "whole"))
    folder = save(model, tmp_path / "shards", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids_BT = token_ids(1, 9)
    assert torch.equal(load_decoder(folder).logits(ids_BT), whole.logits(ids_BT))
    (folder / INDEX).unlink()
    assert torch.equal(load_decoder(folder).logits(ids_BT), whole.logits(ids_BT))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_type_and_model_type_are_independent(stored: torch.dtype, tmp_path: Path) -> None:
    folder = save(build("gemma2").to(stored), tmp_path)
    ids_BT = token_ids(1, 20)
    wanted = theirs(folder, ids_BT)
    torch.testing.assert_close(load_decoder(folder).logits(ids_BT), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "granite", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    folder = save(build(name).bfloat16(), tmp_path)
    ids_BT = token_ids(2, 40)
    exact = load_decoder(folder).logits(ids_BT)
    wanted = theirs(folder, ids_BT, torch.bfloat16).float()
    ours = load_decoder(folder, torch.bfloat16).logits(ids_BT)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < 1.2 * (wanted - exact).norm()


def test_linear_layers_come_from_the_callers_factory(tmp_path: Path) -> None:
    made: list[tuple[tuple[int, ...], bool]] = []

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        made.append((tuple(weight.shape), bias is not None))
        return plain_linear(weight, bias)

    load_decoder(save(build("qwen2"), tmp_path), quantize="w8a8", make_linear=make_linear)
    layer = [((128, 64), True), ((64, 64), False), ((192, 64), False), ((64, 96), False)]
    assert made == [*(3 * layer), ((128, 64), False)]


def test_a_tied_output_layer_shares_the_embedding(tmp_path: Path) -> None:
    decoder = load_decoder(save(build("qwen2"), tmp_path)).decoder
    assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()


def test_weights_do_not_depend_on_the_file_once_loaded(tmp_path: Path) -> None:
    model = load_decoder(save(build("llama"), tmp_path))
    ids_BT = token_ids(1, 9)
    before = model.logits(ids_BT)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(model.logits(ids_BT), before)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def break_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))


def cut_a_shard(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:200])


def lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def point_elsewhere(folder: Path) -> None:
    def change(index: Data) -> None:
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"]["model.norm.weight"] = files[0]

    edit(folder, change, INDEX)


Q1 = "model.layers.1.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[bool, Callable[[Path], Any], str]] = {
    "cut short": (False, cut_short, r"model\.safetensors cannot be read"),
    "broken header": (False, break_header, r"model\.safetensors cannot be read"),
    "empty": (
        False,
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"model\.safetensors cannot be read",
    ),
    "a shard cut short": (True, cut_a_shard, r"model-00002-of-\d+\.safetensors cannot be read"),
    "a shard missing": (True, lose_a_shard, r"model-00002-of-\d+\.safetensors is not there"),
    "index names the wrong shard": (
        True,
        point_elsewhere,
        r"model-00001-of-\d+\.safetensors cannot be read.*norm",
    ),
    "index is no index": (
        True,
        lambda f: (f / INDEX).write_text("{}"),
        "index.json cannot be read.*weight_map",
    ),
    "index is no JSON": (True, lambda f: (f / INDEX).write_text("{"), "index.json is not JSON"),
    "a tensor missing": (False, lambda f: rewrite(f, lambda t: t.pop(Q1)), f"lack the tensor '{Q1}'"),
    "a wrong shape": (
        False,
        lambda f: rewrite(f, lambda t: t.update({Q1: torch.zeros(64, 32)})),
        rf"'{Q1}' in .*model\.safetensors has another shape.*\[64, 32\].*\[64, 64\]",
    ),
    "a type that is no float": (
        False,
        lambda f: rewrite(f, lambda t: t.update({Q1: torch.zeros(64, 64, dtype=torch.int8)})),
        rf"'{Q1}' in .*model\.safetensors holds torch.int8",
    ),
    "a file outside": (
        True,
        lambda f: edit(f, lambda data: data["weight_map"].update({Q1: "../x.safetensors"}), INDEX) and None,
        r"names the file '\.\./x\.safetensors' outside",
    ),
    "no weights": (False, lambda f: (f / "model.safetensors").unlink(), r"has no \*\.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_named(damage: str, tmp_path: Path) -> None:
    sharded, spoil, message = DAMAGE[damage]
    options = {"max_shard_size": "60KB"} if sharded else {}
    folder = save(build("llama"), tmp_path, **options)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load_decoder(folder)


CONFIGS: dict[str, tuple[Data, str]] = {
    "no layers": ({"num_hidden_layers": None}, r"config\.json has no 'num_hidden_layers'"),
    "text for a number": (
        {"hidden_size": "64"},
        r"config\.json: 'hidden_size' cannot be used.*'64'.*an integer",
    ),
    "zero heads": ({"num_attention_heads": 0}, "'num_attention_heads' cannot be used"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "'num_key_value_heads'.*a divisor"),
    "odd head": ({"head_dim": 15}, "'head_dim'.*an even number"),
    "activation": ({"hidden_act": "relu"}, "'hidden_act'.*'relu'.*silu"),
    "rotary kind": ({"rope_parameters": {"rope_type": "spiral"}}, "unknown rotary embedding 'spiral'"),
    "rotary factor": ({"rope_parameters": {"rope_type": "linear"}}, r"no 'rope_parameters\.factor'"),
    "rotary list": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0],
                "long_factor": [1.0],
            }
        },
        r"'rope_parameters\.short_factor'.*a list of 8 numbers",
    ),
    "rotary by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one rotary embedding"),
    "aqlm": ({"quantization_config": {"quant_method": "aqlm"}}, "quantized by aqlm.*awq, gptq.*--quantize"),
    "unnamed quantization": ({"quantization_config": {}}, "quantized by an unnamed method"),
    "norm epsilon": ({"rms_norm_eps": "tiny"}, "'rms_norm_eps'.*'tiny'.*a number"),
    "bias": ({"attention_bias": 1}, "'attention_bias'.*true or false"),
    "activation type": ({"hidden_act": 3}, "'hidden_act'.*a string"),
    "scaling type": ({"rope_scaling": 5}, "'rope_scaling'.*an object"),
    "half a head turns": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.05}},
        r"'rope_parameters\.partial_rotary_factor'.*an even part",
    ),
    "end of text": ({"eos_token_id": "</s>"}, "'eos_token_id'.*a token id"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_cannot_be_used_are_named(case: str, tmp_path: Path) -> None:
    change, message = CONFIGS[case]
    folder = edit(save(build("llama"), tmp_path), lambda data: data.update(change))
    with pytest.raises(TorchwrightError, match=message):
        load_decoder(folder)


OTHER_CONFIGS: dict[str, tuple[str, Data, str]] = {
    "no window": ("gemma2", {"sliding_window": None}, "'sliding_window'.*1 or more"),
    "both directions": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "'use_bidirectional_attention'.*causal",
    ),
    "kinds of layers": ("gemma2", {"layer_types": ["full_attention", "chunked", "chunked"]}, "'layer_types'"),
    "too few kinds": ("gemma2", {"layer_types": ["full_attention"]}, "'layer_types'.*one for each layer"),
    "too few experts": ("olmoe", {"num_experts_per_tok": 9}, "'num_experts_per_tok'.*at most the 6 experts"),
}


@pytest.mark.parametrize("case", OTHER_CONFIGS)
def test_values_of_other_families_are_checked(case: str, tmp_path: Path) -> None:
    name, change, message = OTHER_CONFIGS[case]
    folder = edit(save(build(name), tmp_path), lambda data: data.update(change))
    with pytest.raises(ModelError, match=message):
        load_decoder(folder)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(
        UnsupportedArchitecture, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3MoeForCausalLM"
    ):
        read_decoder_config(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "dtype torch.float16.*torch.bfloat16"),
        ({"kv": "int4"}, "unknown type of cached keys and values 'int4'.*bf16, fp32, int8"),
        ({"quantize": "w8a9"}, "unknown quantization 'w8a9'.*w8a8"),
        ({"quantize": "w4a8:group_size=48"}, "group_size=48.*32 or 64 or 128"),
        ({"quantize": "w8a8:group_size=32"}, "4-bit weights only"),
    ],
)
def test_options_of_load_are_checked(options: Data, message: str, tmp_path: Path) -> None:
    with pytest.raises(TorchwrightError, match=message):
        load_decoder(tmp_path, **options)


def test_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="there is no model at nowhere"):
        load_decoder("./nowhere")
