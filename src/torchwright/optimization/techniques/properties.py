"""The vocabulary of `needs`, `gives` and `removes`: the properties of a target that technique declarations may name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PROPERTIES = {
    "batch_norm": "it has batch normalization",
    "bucketed": "its calls are asked in a few fixed shapes",
    "compiled": "a compiler runs it, so that later steps change what is compiled",
    "convolution": "it has `nn.Conv1d`, `Conv2d` or `Conv3d`",
    "cpu": "it runs on a CPU",
    "cuda": "it runs on a CUDA device",
    "decoder": "it runs on the native layers of Torchwright",
    "denoising_steps": "it is a diffusion pipeline, called once per denoising step",
    "eager": "its own modules run, so that steps may replace them",
    "exportable": "`torch.export` takes it",
    "fixed_shapes": "its workload calls it in fixed shapes",
    "float32": "all its floating-point tensors are float32",
    "float32_range": "its floating-point tensors are float32 or bfloat16",
    "float_weights": "its weights are floating-point numbers",
    "floating": "it has floating-point tensors",
    "guided": "its pipeline uses classifier-free guidance",
    "half": "it computes in bfloat16 or float16",
    "image": "its workload is one of pictures",
    "language": "it is a causal language model of transformers",
    "layers": "it has linear layers or convolutions",
    "linear": "it has `nn.Linear`",
    "ragged": "the rows of its calls have different lengths",
    "real_graph": "its exported graph has no complex numbers",
    "rewritten_attention": "its attention is written in plain operators",
    "sdpa": "it calls `scaled_dot_product_attention`",
    "seq2seq": "it is an encoder-decoder model of text",
    "several_shapes": "its workload calls it in several shapes",
    "sparse24": "two of every four weights are zero",
    "speech": "it is a speech model",
    "two_stacks": "it has an encoder and a decoder",
    "vision_language": "it answers about pictures",
    "wide_cache": "its cached keys and values are not quantized",
    "wide_weights": "its weights are not quantized",
    "writes": "its exported graph writes to its inputs or buffers",
}
"""Property → what it says of a model on its way. Other packages may add properties, by techniques that give them."""
ALIKE = 0.8
"""A name at least this similar to a known one (`difflib`) is a typing error and no property of its own."""


def misspelled(names: Iterable[str], known: Iterable[str], *, must_exist: bool) -> list[str]:
    """Return a sentence for each name that is not in `known`: all with `must_exist`, else those that resemble one."""
    known, faults = sorted(known), list[str]()
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if must_exist else ALIKE)
        if near or must_exist:
            hint = f"; did you mean '{near[0]}'?" if near else ""
            faults.append(f"unknown property '{name}'{hint} (docs/plugins.md lists them)")
    return faults
