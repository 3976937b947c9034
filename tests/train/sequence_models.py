"""Models that the sequence-parallel pass rewrites or refuses, and what a process of a group compares.

Those of transformers are theirs, from tiny configurations with random weights, in float64.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchwright as tw
from torchwright.train.sequence import SequenceParallelError
from torchwright.train.sequence import rules as rules_module
from torchwright.train.sequence.decision import Call, Decision

TOKENS, VOCABULARY = 16, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **changes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT))


def mistral() -> nn.Module:
    """Its window crosses the border between processes; its attention is written out, not fused."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"num_key_value_heads": 2, "sliding_window": 5, "attn_implementation": "eager"}
    return MistralForCausalLM(MistralConfig(**SIZES, **shape))


def t5() -> nn.Module:
    """Two sequences, three attentions, relative positions learned for pairs of places."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def bloom() -> nn.Module:
    """Positions as a bias that differs from head to head."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_head": 4, "n_layer": 1}
    return BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


def roberta() -> nn.Module:
    """Positions counted from the ids."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {**SIZES, "max_position_embeddings": 2 * TOKENS}
    return RobertaForMaskedLM(RobertaConfig(**sizes, **NO_DROPOUT))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes))


class Pooled(nn.Module):
    """A classifier over the mean of all places and the first one; three heads, which two processes do not divide."""

    def __init__(self, convolution: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.mix = nn.Conv1d(12, 12, 3, padding=1) if convolution else None
        self.head = nn.Linear(24, 5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor):
        x = self.layer(self.embedding(input_ids))
        if self.mix is not None:
            x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x * attention_mask[..., None]
        mean = x.sum(1) / attention_mask.sum(1, keepdim=True)
        return nn.functional.cross_entropy(
            self.head(torch.cat([mean, x[:, 0]], -1)), labels[:, 0].clamp(0, 4)
        )


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "mistral": mistral,
    "t5": t5,
    "bloom": bloom,
    "roberta": roberta,
    "pooled": Pooled,
    "mamba": mamba,
    "convolution": lambda: Pooled(convolution=True),
}


def batch() -> dict[str, torch.Tensor]:
    """Two rows; the second ends in padding, and its labels lie almost all with the first process."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=random)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, -100)
    labels[1, 6:] = -100
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0  # a padded place still sees a true one in the narrowest window
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def compare(names: list[str], fault: str = "") -> dict[str, dict[str, Any]]:
    """For each model the largest differences from one process's loss and gradients, or why it was refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Their losses ask for float32 with `.float()`; what is compared is float64 throughout.
    with FAULTS[fault](), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return {name: _compare(MODELS[name], mesh) for name in names}


def _compare(build: Any, mesh: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    one = build().double()
    torch.manual_seed(dist.get_rank())  # what differs is made the first process's
    parallel = tw.sequence_parallel(build().double(), mesh)
    inputs = batch()
    loss = one(**inputs)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    try:
        ours = parallel(**inputs)
    except SequenceParallelError as error:
        return {"refused": str(error), "report": str(parallel.report)}
    ours.backward()
    gradients = [each.grad for each in one.parameters() if each.grad is not None]
    found = [each.grad for each in parallel.parameters() if each.grad is not None]
    return {
        "loss": abs(loss - ours).item(),
        "gradient": max((x - y).abs().max().item() for x, y in zip(gradients, found, strict=True)),
        "largest": max(each.abs().max().item() for each in gradients),
        "attentions": len(parallel.report.attentions),
        "divided": parallel.report.divided,
    }


def _labels_divided_before_they_are_shifted() -> Any:
    """Each process shifts its own part: the label after a part's last token is lost."""

    def in_parts(call: Call) -> Decision:
        return Decision(call.place(call["self"]))

    from torchwright.train.sequence import rewrite

    class Early(rewrite._Rewriting):
        def _input(self, node: Any) -> None:
            super()._input(node)
            if node.name == "labels":
                place = rewrite.Shard(1)
                self._keep(node, self._value(node, place), place)

    found = contextlib.ExitStack()
    found.enter_context(mock.patch.object(rewrite, "_Rewriting", Early))
    found.enter_context(mock.patch.dict(rules_module._BY_NAME, {"pad": in_parts, "slice": in_parts}))
    return found


def _mean_of_means() -> Any:
    from torchwright.train.sequence import pointwise

    def local_mean(kind: str, scores: Any, labels: Any, *_: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, labels) / dist.get_world_size()

    return mock.patch.object(pointwise, "token_mean", local_mean)


FAULTS = {
    "": contextlib.nullcontext,
    "shift": _labels_divided_before_they_are_shifted,
    "mean": _mean_of_means,
}
