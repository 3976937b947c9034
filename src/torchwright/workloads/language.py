"""Decoder-only language models of a Hugging Face folder: prefill and decode measured apart, judged by perplexity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.architectures import CAUSAL
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, model_files, read_config
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Optimized,
    Run,
    Served,
    Workload,
    batches_to_judge,
    check_sizes,
    to_dtype,
)
from torchwright.workloads.encoder import embeds
from torchwright.workloads.generation import Generator, Geometry, call, new_cache
from torchwright.workloads.huggingface import cache_keyword
from torchwright.workloads.texts import (
    BUNDLED,
    BUNDLED_TEXTS,
    Split,
    own_text,
    read_texts,
    spread,
    too_short,
)

MAX_TOKENS = 4096
STANDARD = {"num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"}
DECODE_STEPS = 8
"""Teacher-forced decode steps after each window, so that the metric sees the KV cache too."""
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Fields of config.json that say what each layer is."""
STATEFUL = ("conv", "linear_attention", "mamba", "mamba2", "recurrent", "hybrid")
"""Values there of layers that keep a state."""


class LanguageWorkload(Workload):
    """A causal language model: prompt and new tokens at one batch size.

    Metric: growth of perplexity on held-out text (the budget), with KL divergence and top-1 agreement against the
    original next to it.
    """

    name = "language"
    supports = "…ForCausalLM, …LMHeadModel"
    opens = frozenset({"eval_text"})
    reference_bytes: int = 256 * 2**20
    """Memory that the original's log-probabilities may take; large vocabularies are judged on fewer tokens."""

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        batch: int = 1,
        prompt_tokens: int = 128,
        new_tokens: int = 64,
        eval_text: str | Path | None = None,
    ) -> None:
        self.folder = BUNDLED if folder is None else Path(folder)
        self.label = "bundled" if folder is None else str(folder)
        self.batch, self.prompt_tokens, self.new_tokens = batch, prompt_tokens, new_tokens
        for option, value in (("batch", batch), ("prompt-tokens", prompt_tokens), ("new-tokens", new_tokens)):
            if value < 1:
                raise WorkloadError(f"--{option} {value}", allowed="1 or more")
        self.eval_text = own_text(eval_text)
        self.geometry = self._geometry()

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        if not any(name.endswith(CAUSAL) for name in config.get("architectures") or []):
            return False
        if embeds(folder):
            return False
        text = standard_fields(config)
        # A state-space model has no cache of keys and values, and latent attention one of another shape.
        return "num_attention_heads" in text and "kv_lora_rank" not in text and not _has_states(text)

    def build(self) -> nn.Module:
        from torchwright.workloads.huggingface import load_model

        return load_model(self.folder, "AutoModelForCausalLM")

    def adapt(self, model: nn.Module) -> nn.Module:
        return StaticCacheModel(model, len(self.geometry.windows))

    def cases(self, dtype: torch.dtype) -> list[Case]:
        ids = self._tokens(self.batch * self.prompt_tokens).view(self.batch, self.prompt_tokens)
        cache = new_cache(self.geometry, dtype, self.device)
        prefill = call("prefill", self.geometry, ids, 0, cache)
        kept = torch.export.Dim("kept", min=1, max=self.prompt_tokens)
        prefill = replace(
            prefill,
            dynamic=(None, None, None, {0: kept}, [None] * len(self.geometry.windows), [None] * len(cache)),
            example=call(
                "prefill",
                self.geometry,
                ids,
                0,
                cache,
                keep_K=torch.arange(self.prompt_tokens, device=self.device),
            ).args,
        )
        decode = call(
            "decode",
            self.geometry,
            ids[:, :1],
            self.prompt_tokens,
            new_cache(self.geometry, dtype, self.device),
            repeat=self.new_tokens,
        )
        return [prefill, decode]

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "batch", "prompt_tokens", "new_tokens")
        if description.get("geometry") is not None:
            Geometry.from_dict(description["geometry"])

    @classmethod
    def answerer(cls, optimized: Optimized) -> Generator:
        geometry = Geometry.from_dict(optimized.description.get("geometry"))
        return Generator(optimized.run, geometry, optimized.dtype, optimized.folder, optimized.device)

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "writer"

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        """The seconds to the first token and of each one after it, and the tokens per second of both."""
        batch, ttft, tpot = description["batch"], seconds["prefill"], seconds["decode"]
        return {
            "ttft_s": ttft,
            "tpot_s": tpot,
            "prefill_tokens_per_s": batch * description["prompt_tokens"] / ttft,
            "decode_tokens_per_s": batch / tpot,
        }

    def original_run(self, model: nn.Module) -> Run:
        """transformers' own way: a growing cache, logits of the last token only."""
        from transformers import DynamicCache

        config: Any = model.config
        keyword = cache_keyword(model)

        def step(ids: torch.Tensor, cache: Any) -> torch.Tensor:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits

        prompt = self.cases(torch.float32)[0].args[0]
        filled = DynamicCache(config=config)
        filled.activate_past_recording()  # without it a sliding window that is full cannot be wound back
        with torch.no_grad():
            step(prompt, filled)

        def run(case: Case) -> torch.Tensor:
            if case.name == "prefill":
                return step(case.args[0], DynamicCache(config=config))
            logits = step(case.args[0], filled)
            filled.crop(-case.args[0].shape[1])
            return logits

        return run

    def cast(self, model: nn.Module, dtype: torch.dtype, keep) -> nn.Module:
        # The cache is an argument that the model writes into, so it has the model's type from the start.
        to_dtype(model, dtype, keep)
        return model

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Log-probabilities (N, V) in float16 and negative log-likelihoods (N,) in float32 over held-out text."""
        B, T = self.batch, self.prompt_tokens
        span = T + DECODE_STEPS + 1
        sample = list(self.sample or range(self._rounds()))
        ids = self._tokens((sample[-1] + 1) * B * span).view(-1, B, span)[sample]
        keep_K = torch.arange(T, device=self.device)
        log_probabilities, nll = [], []
        for ids_BT in ids:
            cache = new_cache(self.geometry, dtype, self.device)
            logits = [run(call("prefill", self.geometry, ids_BT[:, :T], 0, cache, keep_K=keep_K)).float()]
            for step in range(T, T + DECODE_STEPS):
                logits.append(
                    run(call("decode", self.geometry, ids_BT[:, step : step + 1], step, cache)).float()
                )
            logp = torch.log_softmax(torch.cat(logits, 1), -1)
            nll.append(-logp.gather(-1, ids_BT[:, 1:, None])[..., 0].flatten().cpu())
            log_probabilities.append(logp.flatten(0, 1).half().cpu())
        return {"log_probabilities": torch.cat(log_probabilities), "nll": torch.cat(nll)}

    def sampled(self) -> tuple[int, int | None]:
        return self._rounds(), self._batches

    def unseen(self) -> Self | None:
        return self.judged_after(*self.sampled())

    def compare(self, reference: Any, candidate: Any) -> Quality:
        kl, same = [], []
        pairs = zip(
            reference["log_probabilities"].split(1024),
            candidate["log_probabilities"].split(1024),
            strict=True,
        )
        for before, after in pairs:
            before, after = before.float(), after.float()
            # A token that neither allows (a logit of minus infinity) adds nothing, instead of 0 · (∞ − ∞).
            kl.append((before.exp() * (before - after)).nan_to_num(nan=0.0).sum(-1))
            same.append(before.argmax(-1) == after.argmax(-1))
        window = self.prompt_tokens + DECODE_STEPS
        return accuracy.perplexity(reference["nll"], candidate["nll"], torch.cat(kl), torch.cat(same), window)

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        B, T = self.batch, self.prompt_tokens
        kept = self._text(0).calibration
        windows = [kept[start : start + T] for start in range(0, len(kept) - T + 1, T)]
        ids = torch.tensor(spread(windows, CALIBRATION_BATCHES * B), device=self.device).view(-1, B, T)

        def step(name: str, ids_BT: torch.Tensor, start: int) -> Case:
            return call(name, self.geometry, ids_BT, start, new_cache(self.geometry, dtype, self.device))

        return [*(step("prefill", ids_BT, 0) for ids_BT in ids), step("decode", ids[0, :, :1], T)]

    def calibrates_apart(self) -> bool:
        return True

    def files(self, *, weights: bool) -> dict[str, Path]:

        files = model_files(self.folder, weights=weights)
        return {name: path for name, path in files.items() if path not in (self.eval_text, *BUNDLED_TEXTS)}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "eval_text": str(self.eval_text) if self.eval_text else None,
            "geometry": self.geometry.as_dict(),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"language", "fixed_shapes"}

    def check_adapted(self, original: nn.Module, adapted: nn.Module) -> None:
        """Raises `ModelError` unless the fixed-cache form gives transformers' own logits."""
        case = self.cases(torch.float32)[0]
        expected = self.original_run(original)(case)
        difference = (expected - adapted(*case.args)).abs().max().item()
        if not difference < 1e-3 * max(1.0, expected.abs().max().item()):
            raise ModelError(
                f"{type(original).__name__} does not work with a fixed-size key-value cache",
                found=f"its logits differ by {difference:.3g} from transformers' own",
                allowed="decoder-only models with plain or sliding-window attention",
            )

    def _geometry(self) -> Geometry:

        config = read_config(self.folder)
        top, text = Fields(self.folder / "config.json", config), standard_fields(config)
        if "num_hidden_layers" not in text or "vocab_size" not in text or text.get("is_encoder_decoder"):
            raise ModelError(
                f"{self.folder} is not a decoder-only language model",
                found=", ".join(config.get("architectures") or ["no architectures in config.json"]),
            )
        fields = Fields(self.folder / "config.json", text)
        heads = fields.integer("num_attention_heads")
        context = fields.integer("max_position_embeddings", 2048)
        need = self.prompt_tokens + max(self.new_tokens, DECODE_STEPS)
        if need > context:
            raise WorkloadError(
                f"{self.prompt_tokens} prompt tokens and {self.new_tokens} new ones exceed the model's context",
                allowed=f"{context} tokens together",
                next="smaller --prompt-tokens or --new-tokens",
            )
        return Geometry(
            layers=fields.integer("num_hidden_layers"),
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", fields.integer("hidden_size") // heads),
            vocabulary=fields.integer("vocab_size"),
            batch=self.batch,
            chunk=self.prompt_tokens,
            slots=min(context, -(-need // 64) * 64),
            context=context,
            windows=_windows(fields),
            eos=tuple(sorted({*top.ids("eos_token_id"), *generation_eos(self.folder)})),
            bos=next(iter(top.ids("bos_token_id")), None),
        )

    def _rounds(self) -> int:
        """Batches of the metric's sample."""
        budget = min(MAX_TOKENS, self.reference_bytes // (2 * self.geometry.vocabulary))
        wanted = budget // (self.batch * (self.prompt_tokens + DECODE_STEPS))
        return max(2, batches_to_judge(wanted, self._batches))

    @property
    def _batches(self) -> int:
        """Batches of the evaluation text."""
        return len(self._text(0).evaluation) // (self.batch * (self.prompt_tokens + DECODE_STEPS + 1))

    def _tokens(self, count: int) -> torch.Tensor:
        """The first `count` token ids of what is evaluated."""
        return torch.tensor(self._text(count).evaluation[:count], device=self.device)

    def _text(self, count: int) -> Split[list[int]]:
        """Token ids of both texts.

        Raises `WorkloadError` where there are fewer than `count` to judge by, or than one prompt to calibrate with.
        """
        if not hasattr(self, "_ids"):
            tokenizer = open_tokenizer(self.folder)
            self._ids: Split[list[int]] = read_texts(self.eval_text).map(
                lambda text: tokenizer.encode(text, add_special_tokens=False).ids
            )
        found, needed = self._ids.map(len), Split(count, self.prompt_tokens)
        if found.evaluation < needed.evaluation or found.calibration < needed.calibration:
            raise too_short(self.eval_text, found, needed, "tokens")
        return self._ids


def _has_states(config: dict[str, Any]) -> bool:
    """Check whether some layers keep a state in place of keys and values, for which a dense cache has no room."""
    kinds = [kind for key in LAYER_KINDS for kind in config.get(key) or ()]
    return "full_attn_idxs" in config or any(kind in STATEFUL for kind in kinds)


class StaticCacheModel(nn.Module):
    """A transformers causal model over a preallocated KV cache: every call has fixed shapes and can be exported.

    forward(ids_BT, positions_BT, slots_T, keep_K, masks, cache) writes keys and values of the T tokens into `slots_T`
    of `cache` and returns logits (B, K, V) of the tokens `keep_K`. `masks` holds one (B, 1, T, S) boolean mask for
    each kind of layer.
    """

    def __init__(self, model: nn.Module, kinds: int) -> None:
        super().__init__()
        self.model, self.kinds = model, kinds
        self.keyword = cache_keyword(model)

    def forward(self, ids_BT, positions_BT, slots_T, keep_K, masks, cache):
        config: Any = self.model.config
        if config._attn_implementation == "eager":  # adds its mask where the others select by it
            masks = [torch.where(mask, 0.0, -torch.inf).to(cache[0].dtype) for mask in masks]
        mask = {"full_attention": masks[0], "sliding_attention": masks[1]} if self.kinds == 2 else masks[0]
        return self.model(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep_K,
            **{self.keyword: _cache_view(cache, slots_T)},
        ).logits


def _cache_view(tensors: list[torch.Tensor], slots_T: torch.Tensor) -> Any:
    """transformers' cache interface over our own tensors."""
    from transformers.cache_utils import Cache

    class View(Cache):
        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = tensors[2 * layer_idx], tensors[2 * layer_idx + 1]
            # Under autocast keys come in float32 (their rotation is) and values in bfloat16.
            keys.index_copy_(2, slots_T, key_states.to(keys.dtype))
            values.index_copy_(2, slots_T, value_states.to(values.dtype))
            return keys, values

        def get_seq_length(self, *args, **kwargs) -> int:
            return 0

    return View()


def standard_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that describe its text model, `STANDARD` under their usual names.

    Those that the file leaves out, or names in its own way (GPT-2's n_layer), are as transformers has them.
    """
    text = config.get("text_config", config)
    if text.keys() >= STANDARD:
        return text
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = text.get("model_type")
    if kind not in CONFIG_MAPPING:
        return text
    usual = CONFIG_MAPPING[kind]()
    defaults = {name: getattr(usual, name) for name in STANDARD if hasattr(usual, name)}
    own = {name: text[other] for name, other in usual.attribute_map.items() if other in text}
    return defaults | own | text


def _windows(fields: Fields) -> tuple[int, ...]:
    window = fields.integer("sliding_window", 0, minimum=0)
    kinds = fields.data.get("layer_types")
    if not window or fields.data.get("use_sliding_window") is False:
        return (0,)
    if not isinstance(kinds, list) or all(kind == "sliding_attention" for kind in kinds):
        return (window,)
    return (0, window) if "sliding_attention" in kinds else (0,)


def generation_eos(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids of generation_config.json, which may name more than config.json does.

    Raises `ModelError` for a file that is not a JSON object or names no ids.
    """
    path = folder / "generation_config.json"
    return Fields(path, find_object(path)).ids("eos_token_id")
