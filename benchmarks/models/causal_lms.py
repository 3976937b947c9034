"""Every causal language model of transformers, shrunken: does it generate here what transformers generates?

    python -m benchmarks.models.causal_lms [--only TYPE …] [--json FILE]
    python -m benchmarks.models.causal_lms --page docs/models.md --json FILE    write the page from the rows of a run

For each model type of transformers' causal-LM mapping: its default configuration with small sizes, random weights in
float32, saved as a folder. Eight prompts of different lengths are continued greedily by transformers' own `generate`,
by `torchwright generate`'s model one by one, and by the serving engine all at once. A type is right where all tokens
agree; a token counts as agreeing where the two best logits are within 1e-4 of each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import run

LAYERS, MOST_PARAMETERS, VOCABULARY = 4, 30_000_000, 261
NEW = 12
LENGTHS = (3, 5, 8, 13, 17, 21, 30, 45)
SECONDS = 300.0
"""Limit of one type; most take five."""
TIE = 1e-4
UNCACHED = "as whole passes"
"""Our tokens are those of transformers' own passes without a cache, from which its `generate` differs."""
WORKER = "_worker"
HEAD = ("type", "architecture", "runs on", "generate", "serve, 8 at once", "reason")
NAMES = {
    64: """hidden_size n_embd d_model embed_dim dim n_embed word_embed_proj_dim embedding_size lru_width
        d_inner_model model_dim attention_hidden_size input_embedding_size""",
    128: """intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner
        dense_intermediate_size intermediate_size_mlp""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size moe_ffn_hidden_size
        expert_ffn_hidden_size q_lora_rank""",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads attention_heads num_decoder_attention_heads num_encoder_attention_heads
        linear_num_value_heads swa_num_attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts num_routed_experts""",
    2: """num_key_value_heads num_kv_heads multi_query_group_num n_head_kv linear_num_key_heads
        swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_top_k moe_k top_k_experts moe_topk""",
    16: """head_dim attention_head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim
        kv_channels linear_key_head_dim linear_value_head_dim kv_lora_rank swa_head_dim index_head_dim
        sliding_window attention_chunk_size rotary_dim hidden_size_per_layer_input""",
    1: "n_group topk_group num_expert_group n_groups",
    256: "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
"""Field → small value; a field that a configuration lacks or has as null stays as it is."""

RUNS_ON = {
    "Decoder": ("Native", "On Torchwright's own decoder ([decoder.md](decoder.md))."),
    "TransformersModel": (
        "On the transformers back end",
        "transformers' own layers over the paged cache, with batching, prefix cache and packed linear layers.",
    ),
    "WritingEngine": (
        "One answer at a time",
        "transformers' own code with the model's own cache: its attention or state cannot be paged.",
    ),
}
PAGE = """# Which language models run

Every type of transformers {version}'s causal-LM mapping, with its default configuration shrunken to a few layers and
random weights in float32: eight prompts continued greedily by transformers' own `generate`, by `torchwright generate`
one by one, and by the engine of `torchwright serve` all at once. **{summary}.**
Multimodal types are tried as transformers builds them for text. "As whole passes" are types where transformers'
`generate` differs from transformers' own passes without a cache, and our tokens are those of the passes.

Made by `python -m benchmarks.models.causal_lms`; [serve.md](serve.md#other-families) says what the kinds mean.
"""

HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": HYBRID | {"attn_layer_indices": [2]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"swa_head_dim": 32},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": HYBRID | {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16},
    "xlm": {"emb_dim": 64},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 8, "attention_head_dim": 32},
}
"""Sizes that must fit each other, or that a default configuration lacks."""


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(work(sys.argv[2])))
        return 0
    options = run.options(__doc__, only=tuple(types()), page=run.Option(metavar="FILE"))
    if options.page:
        Path(options.page).write_text(page(json.loads(Path(options.json).read_text())["rows"]))
        return 0
    rows = run.Rows(options.json, HEAD)
    found = []
    for kind in options.only:
        row = measured(kind)
        rows.add(row, cells(row))
        found.append(row)
    print(summary(found))
    return 0


def right(row: dict[str, Any]) -> bool:
    return row.get("generate") == row.get("serve") == "same"


def summary(rows: list[dict[str, Any]]) -> str:
    built = [row for row in rows if row["built"]]
    count = sum(map(right, built))
    return f"{count} of {len(built)} types that can be built generate the same tokens, alone and in eight"


def page(rows: list[dict[str, Any]]) -> str:
    """docs/models.md."""
    import transformers

    lines = [PAGE.format(version=transformers.__version__, summary=summary(rows))]
    for name, words in RUNS_ON.items():
        of_kind = sorted(row["type"] for row in rows if right(row) and row["runs_on"] == name)
        lines.append(
            f"## {words[0]}: {len(of_kind)}\n\n{words[1]}\n\n{', '.join(f'`{kind}`' for kind in of_kind)}.\n"
        )
    others = [row for row in rows if row["built"] and not right(row)]
    lines.append(
        f"## Not the same, or refused: {len(others)}\n\n| type | generate | serve | reason |\n|---|---|---|---|"
    )
    lines += [
        f"| `{row['type']}` | {row.get('generate', '')} | {row.get('serve', '')} | {_cell(row.get('reason'))} |"
        for row in others
    ]
    absent = [row for row in rows if not row["built"]]
    lines.append(f"\n## Not built: {len(absent)}\n\n| type | reason |\n|---|---|")
    lines += [f"| `{row['type']}` | {_cell(row.get('reason'))} |" for row in absent]
    return "\n".join(lines) + "\n"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")[:160]


def types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cells(row: dict[str, Any]) -> Sequence[str]:
    return [
        str(row.get(key) or "") for key in ("type", "architecture", "runs_on", "generate", "serve", "reason")
    ]


def measured(kind: str) -> dict[str, Any]:
    """The row of one type, computed in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.models.causal_lms", WORKER, kind]
    nothing = {"type": kind, "built": True, "generate": "failed", "serve": "failed"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return nothing | {"reason": f"no answer in {SECONDS:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return nothing | {"reason": last[:200]}
    return json.loads(lines[-1])


def work(kind: str) -> dict[str, Any]:
    """Build, save, and compare one type."""
    import torch
    import transformers

    torch.set_num_threads(1)
    row: dict[str, Any] = {"type": kind, "built": False}
    try:
        config = shrunken(kind)
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if count > MOST_PARAMETERS:
            return row | {"reason": f"{count / 1e6:.0f} M parameters after shrinking"}
        model = built(config)
    except Exception as error:
        return row | {"reason": f"not built: {_said(error)}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model.save_pretrained(folder)
        except Exception as error:
            return row | {"reason": f"not saved: {_said(error, folder)}"}
        save_tokenizer(folder)
        row |= {"built": True, "architecture": type(model).__name__, "parameters": count}
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(5, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
        try:
            reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            expected = [generated(reference, ids) for ids in prompts]
        except Exception as error:
            return row | {"built": False, "reason": f"transformers' generate: {_said(error, folder)}"}
        for name, answers in (("generate", alone), ("serve", served)):
            try:
                found, row["runs_on"], notice = answers(folder, prompts)
                if "one answer at a time: " in notice:
                    row["reason"] = notice.partition("one answer at a time: ")[2]
                bad = [n for n, ids in enumerate(prompts) if differs(reference, ids, expected[n], found[n])]
                uncached = bad and all(found[n] == whole_passes(reference, prompts[n]) for n in bad)
                row[name] = (
                    "same" if not bad else UNCACHED if uncached else f"{len(bad)} of {len(prompts)} differ"
                )
            except Exception as error:
                row[name] = "refused" if type(error).__module__.startswith("torchwright") else "failed"
                row["reason"] = _said(error, folder)
    return row


def shrunken(kind: str) -> Any:
    """The default configuration of a type with small sizes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    data = smaller(config.to_dict())
    for key in ("transformers_version", "model_type", "architectures", "dtype", "_name_or_path"):
        data.pop(key, None)
    return type(config)(**(data | SPECIAL.get(kind, {})))


def smaller(data: dict[str, Any]) -> dict[str, Any]:
    """The same fields, sizes small, per-layer lists cut to the chosen layers."""
    layers = next(
        (data[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in data), None
    )
    chosen = _layers(data, layers)
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value and all(str(place).isdigit() for place in value):
            found[key] = {
                chosen.index(int(place)): smaller(of_layer) if isinstance(of_layer, dict) else of_layer
                for place, of_layer in value.items()
                if int(place) in chosen
            }
        elif isinstance(value, dict):
            found[key] = smaller(value)
        elif isinstance(value, list) and layers and len(value) == layers:
            found[key] = [value[place] for place in chosen]
        elif key in SIZES and type(value) is int:
            found[key] = min(value, SIZES[key])
        elif key in TOKENS:
            found[key] = TOKENS[key]
        elif key.endswith("token_id") and type(value) is int and value >= VOCABULARY:
            found[key] = VOCABULARY - 1
        else:
            found[key] = value
    if data.get("num_key_value_heads") == data.get("num_attention_heads"):
        found |= {key: LAYERS for key in ("num_key_value_heads",) if key in found and found[key] is not None}
    if "is_decoder" in found:
        found["is_decoder"] = True
    return found


def _layers(data: dict[str, Any], layers: Any) -> list[int]:
    """Layers that together have every kind of layer that the configuration names."""
    if type(layers) is not int:
        return []
    kinds = [value for value in data.values() if isinstance(value, list) and len(value) == layers]
    seen: dict[str, int] = {}
    for place in range(layers):
        seen.setdefault(str([kind[place] for kind in kinds]), place)
    first = sorted(seen.values())[:LAYERS]
    rest = [place for place in range(layers) if place not in first]
    return sorted((first + rest)[: min(LAYERS, layers)])


def built(config: Any) -> Any:
    """The model, with random weights that are large enough to make answers differ."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name and parameter.is_floating_point():
            parameter.data.mul_(4)
    return model


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate([*special, *alphabet])}, merges=[])
    )
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def generated(model: Any, ids: list[int]) -> list[int]:
    """Return the greedy tokens of transformers' own `generate`."""
    import torch

    given = torch.tensor([ids])
    output = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW,
        pad_token_id=0,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
    )
    new = output[0, len(ids) :].tolist()
    return new[: new.index(2)] if 2 in new else new


def whole_passes(model: Any, ids: list[int]) -> list[int]:
    """Greedy tokens of transformers' own passes over the whole text, without a cache."""
    import torch

    text = list(ids)
    for _ in range(NEW):
        with torch.inference_mode():
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    new = text[len(ids) :]
    return new[: new.index(2)] if 2 in new else new


def alone(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], str, str]:
    from torchwright.optimization.open_model import open_model

    opened = open_model(str(folder), dtype="fp32", device="cpu")
    model: Any = opened.model
    answers = []
    for ids in prompts:
        tokens: list[int] = []
        model.write(list(ids), NEW, seed=0, on_token=tokens.append)
        answers.append(tokens[: tokens.index(2)] if 2 in tokens else tokens)
    return answers, type(getattr(model, "decoder", model)).__name__, " ".join(opened.notices)


def served(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], str, str]:
    from torchwright.serve.engine.process import open_served
    from torchwright.serve.options import EngineOptions
    from torchwright.serve.wire.messages import SamplingOptions, Submit

    class Silent:
        def send(self, _: Any) -> None:
            pass

    options = EngineOptions(
        model=str(folder), dtype="fp32", deterministic=False, speculate="none", kv_memory=1 << 28
    )
    opened: Any = open_served(options, Silent())  # pyright: ignore[reportArgumentType]
    engine = opened.engine
    answers: dict[str, list[int]] = {str(n): [] for n in range(len(prompts))}
    for name, ids in zip(answers, prompts, strict=True):
        sampling = SamplingOptions(temperature=0.0)
        refused = engine.submit(Submit(id=name, ids=ids, max_tokens=NEW, sampling=sampling, stop_ids=[2]))
        if refused is not None:
            raise RuntimeError(refused.text)
    while not engine.idle:
        for output in engine.step().outputs:
            if output.finish == "error":
                raise RuntimeError(output.message)
            answers[output.id] += output.tokens
    engine.close()
    found = [ids[: ids.index(2)] if 2 in ids else ids for ids in answers.values()]
    kind = type(getattr(getattr(engine, "loaded", None), "decoder", engine)).__name__
    return found, kind, " ".join(opened.ready.notices)


def differs(model: Any, prompt: list[int], expected: list[int], found: list[int]) -> bool:
    """Check whether answers differ, other than by a near tie of transformers' own logits."""
    import torch

    if expected == found:
        return False
    place = next(
        (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    with torch.inference_mode():
        logits_V = model(input_ids=torch.tensor([prompt + expected[:place]])).logits[0, -1].float()
    top = logits_V.topk(2).values
    return float(top[0] - top[1]) > TIE * max(1.0, float(logits_V.abs().max()))


def _said(error: BaseException, folder: Path | None = None) -> str:
    lines = str(error).replace(str(folder), "FOLDER").strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    sys.exit(main())
