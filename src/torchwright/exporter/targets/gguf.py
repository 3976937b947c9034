# pyright: basic, reportMissingImports=false
"""GGUF: language models of the families that the format and our own reader know, tokenizer included."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchwright.core.errors import ModelError, RefusedTechnique, shown
from torchwright.exporter.base import ExportTarget, Run, Written
from torchwright.exporter.targets.gguf_file import BLOCK, Stored, Value, stored, write_gguf
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config, read_object
from torchwright.hub.formats.gguf import TURNED
from torchwright.hub.gguf.family import QK_NORMS, WHOLE
from torchwright.hub.gguf.folder import opened
from torchwright.hub.gguf.names import LAYER
from torchwright.hub.gguf.tokenizer import CONTROL, LLAMA3, QWEN2, USER_DEFINED
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.decoder.families import decoder_config
from torchwright.workloads.huggingface import load_model

if TYPE_CHECKING:
    from torch import Tensor

    from torchwright.exporter.subject import Subject
    from torchwright.optimization.engines.dispatch.spec import CallSpec

MODEL = "model.gguf"
FAMILIES = ("llama", "qwen2", "qwen3")
"""Families that are written; the reader knows more of them."""
KINDS = {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
PLAIN_TOKEN = 1
FILE_TYPES = {"bf16": 32, "q8_0": 7, "q4_0": 2}
"""llama.cpp's number for a file of mostly these types."""
ELSEWHERE = "run by transformers on what Torchwright reads: `pip install llama-cpp-python` for llama.cpp"


class Gguf(ExportTarget):
    """GGUF with its tokenizer, for llama.cpp and its kin: bfloat16, or blocks of 8 or 4 bits; Llama, Qwen2, Qwen3."""

    name: ClassVar[str] = "gguf"
    runtime: ClassVar[str] = "llama.cpp"
    libraries: ClassVar[tuple[str, ...]] = ("llama-cpp-python",)
    tolerances: ClassVar[dict[str, float]] = {"bf16": 0.03, "q8_0": 0.05, "q4_0": 0.3}
    rounding: ClassVar[dict[str, float]] = {"bf16": 0.01, "q8_0": 0.02, "q4_0": 0.2}

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        if subject.folder is None:
            raise RefusedTechnique(
                "GGUF holds language models", found=f"{subject.name}, which comes from no model folder"
            )
        config = read_config(subject.folder)
        metadata = _geometry(config, subject.folder / "config.json")
        metadata |= _tokenizer(subject.folder, config)
        metadata["general.file_type"] = FILE_TYPES[precision]
        kinds = dict(_tensors(subject.folder, config, precision))
        write_gguf(folder / MODEL, metadata, kinds)
        used = [tensor.kind for tensor in kinds.values()]
        notes = () if _llama_cpp() else (ELSEWHERE,)
        return Written(operators={kind: used.count(kind) for kind in dict.fromkeys(used)}, notes=notes)

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        return (_by_llama_cpp if _llama_cpp() else _by_reader)(folder / MODEL, threads)

    @classmethod
    def weights(cls, folder: Path) -> dict[str, Tensor]:
        made = opened(folder / MODEL)
        return dict(Checkpoint(made, read_config(made)).tensors(torch.float32))

    @classmethod
    def settings(cls, folder: Path) -> dict[str, Any]:
        return read_config(opened(folder / MODEL))


def _geometry(config: dict[str, Any], path: Path) -> dict[str, Value]:
    """Return the model's sizes as metadata.

    Raises `RefusedTechnique` for a family or a setting that the format, or its reader here, does not have.
    """
    fields = Fields(path, config)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise RefusedTechnique(
            f"models of the family {family} are not written as GGUF", allowed=", ".join(FAMILIES)
        )
    kind = fields.section("rope_parameters").data.get("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise RefusedTechnique(
            "scaled rotary embeddings are not written as GGUF",
            found=shown(config.get("rope_scaling") or kind),
        )
    decoder = decoder_config(config, path)  # its fields are checked
    return {
        "general.architecture": family,
        f"{family}.context_length": decoder.context,
        f"{family}.embedding_length": decoder.model,
        f"{family}.block_count": decoder.layers,
        f"{family}.feed_forward_length": decoder.feed_forward,
        f"{family}.attention.head_count": decoder.heads,
        f"{family}.attention.head_count_kv": decoder.kv_heads,
        f"{family}.attention.key_length": decoder.head_dim,
        f"{family}.attention.value_length": decoder.head_dim,
        f"{family}.rope.dimension_count": decoder.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": decoder.eps,
        f"{family}.rope.freq_base": fields.section("rope_parameters").number(
            "rope_theta", fields.number("rope_theta", 10_000.0)
        ),
        f"{family}.vocab_size": decoder.vocabulary,
    }


def _tensors(folder: Path, config: dict[str, Any], precision: str) -> Iterator[tuple[str, Stored]]:
    """Matrices in the precision; embeddings of 4-bit files in 8, vectors and odd widths in floats."""
    for name, tensor in Checkpoint(folder, config).tensors(torch.float32):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        kind = KINDS[precision] if tensor.ndim == 2 else "F32"
        if kind == "Q4_0" and name in ("model.embed_tokens.weight", "lm_head.weight"):
            kind = "Q8_0"
        if kind.startswith("Q") and tensor.shape[-1] % BLOCK:
            kind = "BF16"
        yield _name(name), stored(_turned(name, tensor, config), kind)


def _name(name: str) -> str:
    """The file's name of a tensor of the model's."""
    whole = {theirs: ours for ours, theirs in WHOLE.items()}
    if name in whole:
        return whole[name]
    module, _, part = name.rpartition(".")
    found = module.removeprefix("model.layers.").partition(".")
    inner = {theirs: ours for ours, theirs in (LAYER | QK_NORMS).items()}.get(found[2])
    if inner is None or not found[0].isdecimal():
        raise RefusedTechnique(f"GGUF has no place for the tensor '{name}'")
    return f"blk.{found[0]}.{inner}.{part}"


def _turned(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Llama's queries and keys with the two halves of a head's rows in turn, as the format has them."""
    heads = config.get(TURNED.get(name.split(".")[-2], ""))
    if config["model_type"] != "llama" or heads is None:
        return tensor
    if len(tensor) % (2 * heads):
        raise ModelError(
            f"the tensor '{name}' has {len(tensor)} rows, which {heads} heads of config.json do not divide",
            next="take config.json and weights of one model",
        )
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, Value]:
    """Return a byte-level tokenizer.json as metadata; raise `RefusedTechnique` for another kind."""
    begins = open_tokenizer(folder).encode("a").ids[:1]
    data = read_object(folder / "tokenizer.json")
    try:
        return _vocabulary(data, config) | _special(folder, config, begins)
    except (AttributeError, LookupError, TypeError) as error:
        raise RefusedTechnique(
            "the tokenizer is not written as GGUF",
            found=f"a tokenizer.json whose parts are not understood ({type(error).__name__}: {error})",
        ) from error


def _vocabulary(data: dict[str, Any], config: dict[str, Any]) -> dict[str, Value]:
    """Return tokens and merges of a tokenizer.json."""
    pre = _words(data.get("pre_tokenizer") or {})
    if data["model"]["type"] != "BPE" or pre is None:
        raise RefusedTechnique(
            "the tokenizer is not written as GGUF",
            found=shown(data["model"]["type"]),
            allowed="byte-level BPE, cut as GPT-2, Llama 3 or Qwen2",
        )
    count = config["vocab_size"]
    tokens, kinds = [f"[PAD{index}]" for index in range(count)], [USER_DEFINED] * count
    for token, index in data["model"]["vocab"].items():
        tokens[index], kinds[index] = token, PLAIN_TOKEN
    for added in data["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]
        ],
    }


def _special(folder: Path, config: dict[str, Any], begins: list[int]) -> dict[str, Value]:
    """Return the ids of special tokens and the chat templates; `begins` is the first token of a text."""
    found: dict[str, Value] = {}
    for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        value = config.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and 0 <= first < 2**32:  # a negative id stands for none
            found[f"tokenizer.ggml.{name}_token_id"] = first
    found["tokenizer.ggml.add_bos_token"] = begins == [found.get("tokenizer.ggml.bos_token_id")]
    return found | _templates(folder)


def _templates(folder: Path) -> dict[str, Value]:
    """Return the chat templates, wherever the folder holds them: the default one, and others by their names."""
    template = ChatTemplate(folder, parse=False)
    if template.plain:
        return {}
    named = {name: text for name, text in template.sources.items() if name != "default"}
    found: dict[str, Value] = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    if "default" in template.sources:
        found["tokenizer.chat_template"] = template.sources["default"]
    return found | ({"tokenizer.chat_templates": list(named)} if named else {})


def _words(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the format's name for the pre-tokenizer; None if it is not known here."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    splits = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(levels) != 1 or len(steps) != len(splits) + 1 or levels[0].get("add_prefix_space"):
        return None
    if not splits and levels[0].get("use_regex", True):
        return "gpt-2"
    return {LLAMA3: "llama-bpe", QWEN2: "qwen2"}.get(splits[0]) if len(splits) == 1 else None


def _llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def _by_llama_cpp(file: Path, threads: int) -> Run:
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=0, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = []
        for ids_T in tensors[0].tolist():
            model.reset()
            model.eval(ids_T)
            rows.append(torch.from_numpy(model.scores[: len(ids_T)].copy()))
        return [torch.stack(rows)]

    return run


def _by_reader(file: Path, threads: int) -> Run:
    """transformers' model on what our own reader finds in the file."""
    torch.set_num_threads(threads)
    model = load_model(opened(file), "AutoModelForCausalLM")

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [model(input_ids=tensors[0], use_cache=False).logits]

    return run
