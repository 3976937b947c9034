"""Counts of parameters and operations, against models that are built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny import COMMON, MODELS, TRAINED
from torch.utils.flop_counter import FlopCounterMode

from torchwright.core.errors import ModelError, UnknownName
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model import Transformer
from torchwright.train.planning.models import KNOWN, read_model
from torchwright.train.shape import Kind, Shape


def config_of(name: str, folder: Path) -> DecoderConfig:
    """One of the decoder tests' models, read from a config.json as transformers writes it."""
    kind, overrides = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | overrides))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return read_model(str(folder))


@pytest.mark.parametrize("name", TRAINED)
def test_every_family_has_as_many_parameters_as_its_model(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    shape = Shape(config)
    with torch.device("meta"):
        model = Transformer(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for layer, kind in zip(model.layers, shape.kinds, strict=True):
        assert shape.layer(kind).total == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("mixtral-8x7b", 46.703),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
        ("deepseek-v2-lite", 15.706),
        ("deepseek-v3", 671.026),
        ("gemma-4-e2b", 4.629),
        ("gemma-4-e4b", 7.463),
        ("gemma-4-26b-a4b", 25.233),  # 25.2 as published
        ("gemma-4-31b", 30.697),  # 30.7 as published
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
        ("hunyuan-7b", 7.505),
        ("hunyuan-a13b", 80.393),  # 80 as published
    ],
)
def test_well_known_models_have_their_published_size(name: str, billions: float) -> None:
    shape = Shape(read_model(name))
    assert round(shape.parameters / 1e9, 3) == billions
    with torch.device("meta"):
        model = Transformer(shape.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("lfm2-350m", 354_483_968),
        ("lfm2-700m", 742_489_344),
        ("lfm2-1.2b", 1_170_340_608),
        ("lfm2-8b-a1b", 8.34e9),
        ("qwen3-next-80b-a3b", 80e9),
        ("granite-4.0-h-micro", 3_191_396_096),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("granite-4.0-h-small", 32.2e9),
        ("bamba-9b", 9.78e9),
        ("falcon-h1-0.5b", 521_411_104),
        ("falcon-h1-1.5b", 1_554_863_488),
        ("falcon-h1-7b", 7.59e9),
        ("falcon-h1-34b", 33.6e9),
    ],
)
def test_hybrids_have_their_published_size(name: str, published: float) -> None:
    shape = Shape(read_model(name))
    assert shape.parameters == pytest.approx(published, rel=0.005)
    with torch.device("meta"):
        model = Transformer(shape.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_active_parameters_are_those_of_the_names() -> None:
    assert Shape(read_model("qwen3-30b-a3b")).active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert Shape(read_model("qwen3-235b-a22b")).active_parameters == pytest.approx(22e9, rel=0.02)
    assert Shape(read_model("mixtral-8x7b")).active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert Shape(read_model("deepseek-v3")).active_parameters == pytest.approx(37e9, rel=0.02)
    assert Shape(read_model("deepseek-v2-lite")).active_parameters == pytest.approx(2.4e9, rel=0.12)
    assert Shape(read_model("qwen3-next-80b-a3b")).active_parameters == pytest.approx(3.9e9, rel=0.05)
    assert Shape(read_model("granite-4.0-h-small")).active_parameters == pytest.approx(9e9, rel=0.05)
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        counted = Shape(read_model(name))  # as published, without the embedding table
        assert counted.active_parameters - counted.embedding == pytest.approx(billions * 1e9, rel=0.005)
    assert Shape(read_model("hunyuan-a13b")).active_parameters == pytest.approx(13e9, rel=0.03)
    dense = Shape(read_model("llama-3.1-8b"))
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "qwen3", "mixtral", "olmoe"])
def test_model_flops_are_what_torch_counts(name: str, tmp_path: Path) -> None:
    """Matrix products forward and backward, with the attention of explicit, unmasked products."""
    from torchwright.train.model import explicit_attention
    from torchwright.train.model.loss import shift_labels

    config = config_of(name, tmp_path)
    if any(config.windows):  # the explicit products are of whole sequences
        config = type(config)(**{**vars_of(config), "windows": (0,) * config.layers})
    model, T = Transformer(config), 32
    model.reset_parameters(0)
    model.use_attention(explicit_attention)
    ids_BT = torch.randint(config.vocabulary, (1, T))
    with FlopCounterMode(display=False) as counter:
        model.loss(ids_BT, shift_labels(ids_BT))[0].backward()
    shape = Shape(config)
    # Six a parameter counts norms and biases as products; they are left out here to compare exactly.
    extra = sum(6 * (shape.layer(kind).replicated - _router(config, kind)) for kind in shape.kinds)
    extra += 6 * config.model
    extra += sum(6 * p.numel() for n, p in model.named_parameters() if n.endswith("bias"))
    assert counter.get_total_flops() == pytest.approx(T * (shape.model_flops(T) - extra), rel=1e-9)


def _router(config: DecoderConfig, kind: Kind) -> int:
    return config.model * config.experts.count if kind.sparse and config.experts else 0


def vars_of(config: DecoderConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_keys_seen_are_counted_exactly(tmp_path: Path) -> None:
    shape = Shape(config_of("mistral-window", tmp_path))
    for window in (0, 9, 64):
        seen = [min(position + 1, window or 40) for position in range(40)]
        assert shape.keys(Kind(sparse=False, window=window), 40) == sum(seen) / 40


def test_stages_hold_every_layer_once() -> None:
    shape = Shape(read_model("llama-3.1-405b"))
    for pp in (1, 4, 8, 16, 126):
        stages = shape.stages(pp)
        counts = [sum(count for _, count in stage.layers) for stage in stages]
        assert sum(counts) == 126
        assert max(counts) - min(counts) <= 1
        assert [stage.embeds for stage in stages] == [True] + [False] * (pp - 1)
        assert [stage.heads for stage in stages] == [False] * (pp - 1) + [True]


def test_a_config_file_is_read_and_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(KNOWN["llama-3.1-8b"]))
    assert Shape(read_model(str(file))).parameters == Shape(read_model("llama-3.1-8b")).parameters
    with pytest.raises(UnknownName, match=r"did you mean 'llama-3.1-8b'"):
        read_model("llama-3.1-8")
    file.write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(ModelError, match="BertModel"):
        read_model(str(file))
    file.write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_model(str(file))
