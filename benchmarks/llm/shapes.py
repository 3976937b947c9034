"""Random-weight language models of real shapes, written once as Hugging Face folders.

    python -m benchmarks.llm.shapes --into DIR [--shape NAME …]

Called so, a folder has the bundled model's tokenizer as well, without which other tools do not convert it. For OpenVINO
GenAI: `optimum-cli export openvino --model DIR/NAME --task text-generation-with-past --weight-format int4 --sym
--group-size 64 --ratio 1.0 OUT`, in an environment of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness import run
from benchmarks.llm import picture_files

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# fmt: off
_TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("LlamaConfig", _TIED | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0,
    }),
    "qwen3-0.6b": ("Qwen3Config", _TIED | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "qwen2.5-1.5b": ("Qwen2Config", _TIED | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936,
    }),
    "smollm2-360m": ("LlamaConfig", _TIED | {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152,
    }),
    "gemma-3-1b": ("Gemma3TextConfig", _TIED | {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    }),
    "lfm2-1.2b": ("Lfm2Config", _TIED | {
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    # 4 of 24 layers, and a vocabulary cut so that the output layer keeps its share of a decode step's bytes.
    "gpt-oss-20b-4-layers": ("GptOssConfig", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "vocab_size": 32768, "tie_word_embeddings": False,
    }),
    "gemma-4-e2b-8-layers": ("Gemma4TextConfig", _TIED | {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "vocab_size": 32768, "vocab_size_per_layer_input": 32768, "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    }),
    "falcon-h1-0.5b": ("FalconH1Config", {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 128, "vocab_size": 32784, "tie_word_embeddings": False,
    }),
    "qwen2.5-vl-3b": ("Qwen2_5_VLConfig", _TIED | {
        "image_token_id": 151655,
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }),
}
# fmt: on
PUBLISHED = {"model.visual.": "visual.", "model.language_model.": "model."}
"""Beginnings of tensors' names in transformers' classes of Qwen2.5-VL → in published files, which peers read."""


def _third(kind: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A third of the language model's layers and half of the encoder's, for peers that hold a model several times."""
    text, vision = options["text_config"], options["vision_config"]
    return kind, options | {
        "text_config": text | {"num_hidden_layers": text["num_hidden_layers"] // 3},
        "vision_config": vision | {"depth": vision["depth"] // 2, "fullatt_block_indexes": [7, 15]},
    }


SHAPES["qwen2.5-vl-3b-third"] = _third(*SHAPES["qwen2.5-vl-3b"])


def make(name: str, folder: Path) -> Path:
    """Return `folder`/NAME with config.json and bfloat16 weights; write it if it does not exist yet.

    A model that takes pictures gets a tokenizer and a processor as well.
    """
    target = folder / name
    if (target / "config.json").is_file():
        return target
    import transformers

    kind, options = SHAPES[name]
    sees = "vision_config" in options
    config = getattr(transformers, kind)(**({} if sees else {"max_position_embeddings": 16384}), **options)
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    tensors = {
        _published(key): torch.ones(value.shape, dtype=torch.bfloat16)
        if value.ndim == 1
        else torch.empty(value.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and config.tie_word_embeddings)
    }
    new = folder / f"{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    if sees:
        picture_files.write(new, options)
    else:
        config.save_pretrained(new)
    new.rename(target)
    return target


def _published(name: str) -> str:
    begin = next((begin for begin in PUBLISHED if name.startswith(begin)), None)
    return name if begin is None else PUBLISHED[begin] + name.removeprefix(begin)


def main() -> None:
    options = run.options(__doc__, json=False, into=".", shape=["gpt-oss-20b-4-layers", "lfm2-1.2b"])
    for name in options.shape:
        folder = make(name, Path(options.into))
        for file in () if (folder / TOKENIZER[0]).is_file() else TOKENIZER:
            shutil.copyfile(run.BUNDLED / file, folder / file)
        run.say(str(folder))


if __name__ == "__main__":
    main()
