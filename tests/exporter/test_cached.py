"""A language model with its keys and values in buffers: in pieces as in one, in eager mode and as a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from torchwright.core.errors import RefusedTechnique
from torchwright.exporter.targets.executorch.cached import Cached, narrowed
from torchwright.exporter.targets.executorch.language import through_cache
from torchwright.exporter.targets.executorch.target import TOGETHER
from torchwright.workloads.accuracy import relative_error

OLDEST = min(Version(torch).release for torch in TOGETHER.values())
"""Of the torch that an ExecuTorch is built for; torch 2.11's export does not see that 8 t is less than 16 t."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = [
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    Qwen3Config(**SMALL, head_dim=12),
    MistralConfig(**SMALL, sliding_window=None),
]


def made(config: object) -> nn.Module:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


@pytest.mark.parametrize(
    "config",
    [CONFIGS[0], *(pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS[1:])],
    ids=lambda config: config.model_type,
)
def test_in_pieces_as_in_one(config: object) -> None:
    model = made(config)
    ids = torch.randint(64, (3, 11))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        cached = Cached(model, 16)
        for buffer in cached.buffers():  # what a runtime has there before the first call
            buffer.fill_(7.0) if buffer.ndim == 4 else None
        (found,) = through_cache(lambda tensors: [cached(*tensors)])([ids])
        assert relative_error([wanted], [found]).value < 1e-4
        if Version(torch.__version__).release < OLDEST:
            return
        program = torch.export.export(
            cached,
            (ids[:1, :2], torch.tensor([0])),
            dynamic_shapes={"tokens": {1: torch.export.Dim("t", min=1, max=16)}, "start": None},
        )
        (found,) = through_cache(lambda tensors: [program.module()(*tensors)])([ids])
        assert relative_error([wanted], [found]).value < 1e-4


def test_windows_and_other_memories_are_refused() -> None:
    with pytest.raises(RefusedTechnique, match=r"not attend to all that was before.*at most 8 positions"):
        Cached(made(MistralConfig(**SMALL, sliding_window=8)), 16)
    Cached(made(MistralConfig(**SMALL, sliding_window=16)), 16)
    with pytest.raises(RefusedTechnique, match="linear_attention"):
        Cached(made(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)), 16)


def test_embeddings_are_halved_where_that_changes_none() -> None:
    model = made(CONFIGS[0])
    assert not narrowed(model)[1]
    for parameter in model.parameters():
        parameter.data = parameter.to(torch.bfloat16).float()
    half, narrow = narrowed(model)
    assert narrow
    assert half.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.dtype == torch.float32
    ids = torch.randint(64, (1, 5))
    with torch.no_grad():
        assert torch.equal(half(input_ids=ids).logits, model(input_ids=ids).logits)
