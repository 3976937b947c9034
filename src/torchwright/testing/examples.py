"""A small example of each built-in workload, with random weights; a package's workload has its own `example`.

The examples of speech and diffusion need folders of several files. Torchwright's own tests make them and add them to
`BUILT_IN`; elsewhere their contract tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.testing.models import Perceptron
from torchwright.workloads.base import Workload, workloads
from torchwright.workloads.detect import from_target
from torchwright.workloads.encoder import EncoderWorkload
from torchwright.workloads.image import ImageWorkload
from torchwright.workloads.texts import BUNDLED

VOCABULARY = 4096
"""Vocabulary size of the bundled tokenizer."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def example(name: str, folder: Path) -> Workload:
    """Return the example of a registered workload, its files in `folder`.

    Fails the test of a package's workload that has none. Skips the test where an extra is missing, or where only
    Torchwright's own tests have the example.
    """
    try:
        cls = workloads.get(name)
        found = BUILT_IN[name](folder) if name in BUILT_IN else cls.example(folder)
    except ModuleNotFoundError as error:  # of an extra
        pytest.skip(f"the workload '{name}' needs {error.name}, which is not installed")
    if found is not None:
        return found
    if cls.__module__.startswith("torchwright."):
        pytest.skip(f"Torchwright's own tests have the example of the workload '{name}'")
    pytest.fail(f"the workload '{name}' has no `example`: without a small one nothing of it can be tested")


def perceptron() -> tuple[nn.Module, list[torch.Tensor]]:
    """A factory, as the command line takes one."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Perceptron()
    return model, [torch.randn(8, 64, generator=generator) for _ in range(4)]


def _module(folder: Path) -> Workload:
    return from_target(f"{__name__}:{perceptron.__name__}")


def _brief(workload: Workload) -> Workload:
    """Have a workload judged by the smallest sample that it takes."""
    assert isinstance(workload, EncoderWorkload | ImageWorkload)
    workload.sample_operations = 1.0
    return workload


def _language(folder: Path) -> Workload:
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=0, eos_token_id=1)
    model = _saved(config, "AutoModelForCausalLM", folder)
    text = folder / "text.txt"
    text.write_text((BUNDLED / "eval.txt").read_text(encoding="utf-8")[:8_000], encoding="utf-8")
    return from_target(model, prompt_tokens=64, new_tokens=8, eval_text=text)


def _encoder(folder: Path) -> Workload:
    from transformers import BertConfig

    return _brief(from_target(_saved(BertConfig(**SIZES), "AutoModel", folder)))


def _forward(folder: Path) -> Workload:
    from transformers import BertConfig

    sizes: dict[str, Any] = SIZES | {"num_labels": 5}
    config = BertConfig(**sizes)
    return from_target(_saved(config, "AutoModelForSequenceClassification", folder))


def _image(folder: Path) -> Workload:
    from transformers import ViTConfig

    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    sizes |= {"image_size": 32, "patch_size": 8, "num_labels": 7}
    config = ViTConfig(**sizes)
    return _brief(from_target(_saved(config, "AutoModelForImageClassification", folder)))


def _seq2seq(folder: Path) -> Workload:
    from transformers import T5Config

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }  # fmt: skip
    return from_target(_saved(T5Config(**sizes), "AutoModelForSeq2SeqLM", folder), tokens=24, new_tokens=8)


def _segment(folder: Path) -> Workload:
    from transformers import SamConfig

    vision: dict[str, Any] = {
        "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
        "image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "num_pos_feats": 8,
    }  # fmt: skip
    prompts = {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4}
    masks = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    config = SamConfig(
        vision_config=vision,
        prompt_encoder_config=prompts | {"image_embedding_size": 8},
        mask_decoder_config=masks | {"num_hidden_layers": 2},
    )
    return from_target(_saved(config, "AutoModel", folder), points="4x4")


def _semantic(folder: Path) -> Workload:
    from transformers import SegformerConfig

    sizes: dict[str, Any] = {
        "num_labels": 6, "image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 32,
    }  # fmt: skip
    return from_target(_saved(SegformerConfig(**sizes), "AutoModelForSemanticSegmentation", folder))


BUILT_IN: dict[str, Callable[[Path], Workload]] = {
    "module": _module,
    "language": _language,
    "encoder": _encoder,
    "forward": _forward,
    "image": _image,
    "segment": _segment,
    "semantic": _semantic,
    "seq2seq": _seq2seq,
}


def _saved(config: Any, auto: str, folder: Path) -> str:
    """A folder of Hugging Face's form with such a model, its weights large enough for its answers to differ."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:
            parameter.data.mul_(4)
    model.save_pretrained(folder)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    return str(folder)
