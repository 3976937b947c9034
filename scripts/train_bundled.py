"""Train the language model that Torchwright bundles, from nothing, on a CPU.

    python scripts/train_bundled.py prepare      corpus, split and tokenizer into the run folder
    python scripts/train_bundled.py train        train until --tokens, or until a signal asks for the decay
    python scripts/train_bundled.py export       the checkpoint, the texts and the model card into the package

The learning rate warms up, stays, and decays to zero (WSD). Everything counts tokens, never seconds, so the trainer may
be stopped and continued at will. SIGTERM or SIGUSR1 starts the decay early; a second one saves and leaves at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from bundled_corpus import BEGIN, BEGIN_ID, DEBIAN_DOCS, END, END_ID, SHARED_PARAGRAPH, prepare

PACKAGE_DATA = Path(__file__).parents[1] / "src" / "torchwright" / "bundled"
BYTES_ALLOWED = 25_000_000
PROMPTS = (
    "The :mod:`json` module provides",
    'def read_lines(path):\n    """Return the lines of a file',
)
GOLDEN = (math.sqrt(5) - 1) / 2
ROPE_THETA = 10000.0
BETAS = (0.9, 0.95)
SLICE_BYTES = 8192
"""The part of eval.txt whose perplexity a test recomputes."""


@dataclass
class Progress:
    """Where a run stands; with the two safetensors files, all that a checkpoint holds."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    decay_from: int | None = None
    """Tokens seen when the decay began, or None before that."""
    decay_tokens: int = 0
    """Length of the decay."""

    @property
    def finished(self) -> bool:
        return self.decay_from is not None and self.tokens >= self.decay_from + self.decay_tokens

    def rate(self, warmup_tokens: int) -> float:
        """The factor on the peak learning rate: 0 → 1 over the warm-up, 1, then 1 → 0 over the decay."""
        warm = min(1.0, (self.tokens + 1) / warmup_tokens)
        if self.decay_from is None:
            return warm
        return warm * max(0.0, 1.0 - (self.tokens - self.decay_from) / self.decay_tokens)


class Signals:
    """Counts the requests to come to an end."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        initializer_range=0.02,
    )


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A fresh model; the layers that write into the residual stream start smaller, as in GPT-2.

    Attention is written out in matrix products: compiled, that trains 1.4 times as fast on a CPU as the fused operator,
    whose backward pass is slow.
    """
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


def loss_of(model: LlamaForCausalLM, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats per token."""
    h_BTE = model.model(input_ids=x_BT, use_cache=False).last_hidden_state
    logits_BTV = model.lm_head(h_BTE)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())


def training_batch(stream: np.ndarray, first: int, rows: int, context: int) -> tuple[torch.Tensor, ...]:
    """Windows number `first` … of an endless walk over the stream; inputs and targets, [B, T] int64 each.

    Starts follow the golden-ratio sequence, which covers the stream evenly however long the walk is and needs no state.
    Every other window is led by the begin token: the model learns that it may stand before any piece of text, and that
    it may be missing.
    """
    places = (np.arange(first, first + rows) * GOLDEN) % 1.0
    starts = (places * (len(stream) - context - 1)).astype(np.int64)
    x = stream[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    led = np.arange(first, first + rows) % 2 == 0
    shifted = np.concatenate([np.full((rows, 1), BEGIN_ID), x[:, :-1]], axis=1)
    x = np.where(led[:, None], shifted, x)
    return torch.from_numpy(x[:, :-1]), torch.from_numpy(x[:, 1:])


@torch.inference_mode()
def mean_nll(model: LlamaForCausalLM, ids: np.ndarray, context: int) -> float:
    """Nats per token of `ids`, read in windows of `context` positions, each led by the begin token."""
    total = 0.0
    for start in range(0, len(ids), context):
        y = torch.from_numpy(ids[start : start + context].astype(np.int64))[None]
        x = torch.cat([torch.full((1, 1), BEGIN_ID), y[:, :-1]], dim=1)
        total += loss_of(model, x, y).item() * y.numel()
    return total / len(ids)


def optimizers_for(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms.

    Muon (Jordan et al., 2024) learns more from each token, and tokens are what a CPU is short of.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(
        matrices, lr=args.lr, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [model.model.embed_tokens.weight, *norms], lr=args.adam_lr, betas=BETAS, weight_decay=0.0, fused=True
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def save_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Replace the run's checkpoint; the old one stays until the new one is whole."""
    new, old = folder / "checkpoint.new", folder / "checkpoint"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save_file({name: p.detach() for name, p in model.named_parameters()}, new / "model.safetensors")
    moments = {
        f"{name}:{key}": value
        for name, p in model.named_parameters()
        for optimizer in optimizers
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
    }
    save_file(moments, new / "optimizer.safetensors")
    (new / "progress.json").write_text(json.dumps(asdict(progress)))
    shutil.rmtree(old, ignore_errors=True)
    new.rename(old)


def load_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> Progress:
    saved = folder / "checkpoint"
    if not saved.is_dir():
        raise SystemExit(f"--resume: no checkpoint in {saved}; leave --resume out to start anew")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in load_file(saved / "model.safetensors").items():
            parameters[name].copy_(value)
    owner = {
        p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    for name, value in load_file(saved / "optimizer.safetensors").items():
        parameter, key = name.rsplit(":", 1)
        p = parameters[parameter]
        owner[p].state[p][key] = value
    return Progress(**json.loads((saved / "progress.json").read_text()))


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    facts = json.loads((args.run / "corpus.json").read_text())
    stream, validation = np.load(args.run / "train.npy"), np.load(args.run / "validation.npy")
    config = model_config(facts["vocab_size"])
    model = new_model(config, args.seed)
    optimizers = optimizers_for(model, args)
    progress = load_checkpoint(args.run, model, optimizers) if args.resume else Progress()
    step_loss: Callable[..., torch.Tensor] = (
        torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    )
    signals = Signals()
    args.pid_file.write_text(str(os.getpid()))
    log = (args.run / "log.jsonl").open("a", buffering=1)

    def note(**figures: object) -> None:
        line = json.dumps({"step": progress.step, "tokens": progress.tokens, **figures})
        print(line, flush=True)
        log.write(line + "\n")

    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    del settings["verb_function"]
    settings["torch"] = torch.__version__
    (args.run / "settings.json").write_text(json.dumps(settings, indent=1))
    note(event="start", parameters=sum(p.numel() for p in model.parameters()), **settings)

    wall, cpu = time.monotonic(), time.process_time()
    wall_0, cpu_0 = wall - progress.wall_s, cpu - progress.cpu_s
    tokens_then, saved_at = progress.tokens, wall
    while not progress.finished and signals.count < 2:
        ending = signals.count or progress.tokens >= args.tokens * (1 - args.decay_fraction)
        if ending and progress.decay_from is None:
            progress.decay_from = progress.tokens
            share = args.decay_fraction / (1 - args.decay_fraction)
            progress.decay_tokens = max(args.batch_tokens, round(progress.tokens * share))
            note(event="decay", decay_tokens=progress.decay_tokens)
        context = args.context if progress.decay_from is None else args.decay_context
        rows = args.batch_tokens // context
        x_BT, y_BT = training_batch(stream, progress.samples, rows, context)
        rate = progress.rate(args.warmup_tokens)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["peak_lr"]
        loss_sum = 0.0
        for x, y in zip(x_BT.chunk(args.micro_batches), y_BT.chunk(args.micro_batches), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = step_loss(model, x, y)
            (loss / args.micro_batches).backward()
            loss_sum += loss.item() / args.micro_batches
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.samples += rows
        progress.tokens += rows * context
        now, now_cpu = time.monotonic(), time.process_time()
        progress.wall_s, progress.cpu_s = now - wall_0, now_cpu - cpu_0
        if progress.step % args.log_every == 0:
            seen = progress.tokens - tokens_then
            note(
                loss=round(loss_sum, 4),
                lr=rate * args.lr,
                grad_norm=round(norm.item(), 3),
                tokens_per_s=round(seen / (now - wall)),
                cores_used=round((now_cpu - cpu) / (now - wall), 2),
                wall_min=round(progress.wall_s / 60, 2),
            )
            wall, cpu, tokens_then = now, now_cpu, progress.tokens
        if now - saved_at > args.save_every_s or progress.finished:
            with torch.autocast("cpu", torch.bfloat16):
                note(val_ppl=round(math.exp(mean_nll(model, validation, args.context)), 3))
            save_checkpoint(args.run, model, optimizers, progress)
            saved_at = time.monotonic()
    save_checkpoint(args.run, model, optimizers, progress)
    note(event="end", wall_min=round(progress.wall_s / 60, 2), cpu_min=round(progress.cpu_s / 60, 2))


def prepare_run(args: argparse.Namespace) -> None:
    args.run.mkdir(parents=True, exist_ok=True)
    facts = prepare(args.run, args.docs, args.vocab_size)
    (args.run / "corpus.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))


def cpu_name() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class HeldOut:
    """How well the exported weights predict a text."""

    bytes: int
    tokens: int
    nll: float
    """Nats per token."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def bits_per_byte(self) -> float:
        return self.nll * self.tokens / self.bytes / math.log(2)


def score(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, context: int) -> HeldOut:
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    nll = mean_nll(model, ids, context)
    return HeldOut(len(text.encode()), len(ids), nll)


def first_bytes(text: str, size: int) -> str:
    """The longest beginning of `text` that fits in `size` bytes."""
    return text.encode()[:size].decode(errors="ignore")


@torch.inference_mode()
def greedy(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int) -> str:
    """`prompt` and its most likely continuation."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def export(args: argparse.Namespace) -> None:
    """Write the package data, read the model back as a user would, and state on the card what that model scores."""
    torch.set_num_threads(args.threads)
    facts = json.loads((args.run / "corpus.json").read_text())
    settings = json.loads((args.run / "settings.json").read_text())
    progress = Progress(**json.loads((args.run / "checkpoint" / "progress.json").read_text()))
    config = model_config(facts["vocab_size"])
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(load_file(args.run / "checkpoint" / "model.safetensors"), strict=False)
    model.tie_weights()

    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN_ID, eos_token_id=END_ID, pad_token_id=END_ID
    )
    model.to(torch.bfloat16).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(
        args.run / "tokenizer", model_max_length=config.max_position_embeddings
    ).save_pretrained(args.out)
    for name in ("eval.txt", "calibration.txt", "LICENSE.txt"):
        shutil.copyfile(args.run / name, args.out / name)

    tokenizer = AutoTokenizer.from_pretrained(args.out)
    reloaded = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    text = (args.out / "eval.txt").read_text(encoding="utf-8")
    bpe = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    scores = {context: score(reloaded, bpe, text, context) for context in (args.context, args.long_context)}
    part = score(reloaded, bpe, first_bytes(text, SLICE_BYTES), args.context)
    samples = [greedy(reloaded, tokenizer, prompt, args.sample_tokens) for prompt in args.prompt]
    card = model_card(facts, settings, progress, config, reloaded, scores, part, samples)
    (args.out / "README.md").write_text(card, encoding="utf-8")

    for path in args.out.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(card)
    print(f"{size:,} bytes in {args.out}")
    if size > BYTES_ALLOWED:
        raise SystemExit(f"the bundled files take {size:,} bytes; at most {BYTES_ALLOWED:,} are allowed")


CARD = """\
---
license: psf-2.0
language: [en]
library_name: transformers
tags: [python, documentation, tiny]
---

# Torchwright's bundled language model

A small language model of Python's documentation and standard library, trained from nothing on a CPU. It exists so that
every example and test of Torchwright can measure a real, trained model without a download. It is not an assistant.

`scripts/train_bundled.py` made this folder and measured every figure on this card.

## Held-out quality

Measured on `eval.txt` with these bfloat16 weights, loaded by transformers {transformers} and computed in float32. The
text is cut into windows that do not overlap; each is led by `{begin}`, and every token counts.

| text | window | bytes | tokens | perplexity per token | bits per byte |
|---|---:|---:|---:|---:|---:|
{quality}

## Architecture

Llama, {parameters:,} parameters, input and output embeddings tied.

| | |
|---|---|
| layers | {config.num_hidden_layers} |
| hidden size | {config.hidden_size} |
| feed-forward size | {config.intermediate_size} |
| attention heads, key-value heads | {config.num_attention_heads}, {config.num_key_value_heads} |
| head size | {config.head_dim} |
| positions | {config.max_position_embeddings} |
| rotary base | {rope_theta:g} |
| vocabulary | {config.vocab_size}, byte-level BPE, with `{begin}` and `{end}` |

## Training

| | |
|---|---|
| tokens seen | {progress.tokens:,} ({epochs:.1f} times the training text) |
| steps | {progress.step:,} of {batch_tokens:,} tokens |
| wall time | {wall_min:.0f} minutes, pauses included, on a machine shared with other work |
| CPU time | {cpu_min:.0f} minutes over {threads} threads |
| processor | {cpu}, no GPU |
| precision | bfloat16 products, float32 weights |
| optimizer | Muon (layers, peak {lr:g}) and AdamW (embedding and norms, peak {adam_lr:g}) |
| schedule | warm-up over {warmup_tokens:,} tokens, constant, {decay} |
| window | {context} tokens, {decay_context} during the decay |
| torch | {torch} |

## Data

| source | licence | files in training | bytes in training |
|---|---|---:|---:|
| Python's documentation, reStructuredText, Debian package {docs_package} {docs_version} | \
PSF-2.0 (its code examples also 0BSD) | {train[docs][files]} | {train[docs][bytes]:,} |
| Python {python}'s standard library, `.py` files without tests | PSF-2.0 | \
{train[stdlib][files]} | {train[stdlib][bytes]:,} |

Copyright © 2001 Python Software Foundation; all rights reserved. `LICENSE.txt` is Python's licence, which covers
`eval.txt` and `calibration.txt`.

A hash of a file's name decides its role, so no file serves two. Held-out texts take at most the beginning of a file, as
whole paragraphs. A paragraph of {shared} characters or more that a held-out file also has was removed from the training
text ({dropped_bytes:,} bytes in all).

| held-out text | documentation | standard library |
|---|---:|---:|
| `eval.txt`, for the figures above | {eval[docs][bytes]:,} bytes, {eval[docs][files]} files | \
{eval[stdlib][bytes]:,} bytes, {eval[stdlib][files]} files |
| `calibration.txt`, for techniques that need activations | {calibration[docs][bytes]:,} bytes, \
{calibration[docs][files]} files | {calibration[stdlib][bytes]:,} bytes, {calibration[stdlib][files]} files |
| validation, watched during training | {validation[docs][bytes]:,} bytes, \
{validation[docs][files]} files | {validation[stdlib][bytes]:,} bytes, {validation[stdlib][files]} files |

## Samples

Greedy continuations, prompt included.

{samples}

## Limits

- It has the manner of Python's documentation, not its knowledge: it invents modules, arguments and behaviour.
- It saw one kind of English and one programming language; other text comes out badly.
- It follows no instructions and was never tuned for dialogue or safety.
- Greedy continuations soon repeat themselves.
- {config.max_position_embeddings} positions were trained; beyond them quality is not known.
"""


def model_card(
    facts: dict[str, Any],
    settings: dict[str, Any],
    progress: Progress,
    config: LlamaConfig,
    model: LlamaForCausalLM,
    scores: dict[int, HeldOut],
    part: HeldOut,
    samples: list[str],
) -> str:
    """The card, filled from measured values alone."""

    def row(name: str, context: int, held: HeldOut) -> str:
        figures = f"{held.bytes:,} | {held.tokens:,} | {held.perplexity:.3f} | {held.bits_per_byte:.4f}"
        return f"| {name} | {context} | {figures} |"

    rows = [row("eval.txt", context, held) for context, held in scores.items()]
    rows.append(row(f"eval.txt, first {SLICE_BYTES} bytes", min(scores), part))
    decay = (
        f"falling to zero over the last {progress.decay_tokens:,}"
        if progress.finished
        else "not yet decayed: an intermediate checkpoint"
    )
    return CARD.format(
        **facts,
        transformers=transformers.__version__,
        torch=settings["torch"],
        begin=BEGIN,
        end=END,
        quality="\n".join(rows),
        parameters=sum(p.numel() for p in model.parameters()),
        config=config,
        rope_theta=ROPE_THETA,
        progress=progress,
        epochs=progress.tokens / facts["train_tokens"],
        wall_min=progress.wall_s / 60,
        cpu_min=progress.cpu_s / 60,
        cpu=cpu_name(),
        decay=decay,
        shared=SHARED_PARAGRAPH,
        samples="\n\n".join(f"```text\n{sample}\n```" for sample in samples),
        **{key: settings[key] for key in ("threads", "lr", "adam_lr", "batch_tokens", "warmup_tokens")},
        **{key: settings[key] for key in ("context", "decay_context")},
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        made.set_defaults(verb_function=function)
        made.add_argument("--run", type=Path, default=Path("build/bundled"), help="the run's scratch folder")
        return made

    one = verb("prepare", prepare_run, "corpus, split and tokenizer")
    one.add_argument(
        "--docs", type=Path, default=DEBIAN_DOCS, help="folder of the documentation's .rst.txt files"
    )
    one.add_argument("--vocab-size", type=int, default=4096)

    two = verb("train", train, "train the model")
    two.add_argument(
        "--tokens", type=int, default=40_000_000, help="the whole run, unless a signal ends it earlier"
    )
    two.add_argument("--batch-tokens", type=int, default=8192, help="tokens an optimizer step sees")
    two.add_argument("--micro-batches", type=int, default=4, help="pieces that a batch is computed in")
    two.add_argument("--context", type=int, default=512, help="positions in a window, also in validation")
    two.add_argument("--decay-context", type=int, default=1024, help="positions in a window during the decay")
    two.add_argument(
        "--decay-fraction", type=float, default=0.18, help="share of all tokens that the decay takes"
    )
    two.add_argument("--warmup-tokens", type=int, default=500_000)
    two.add_argument("--lr", type=float, default=4e-3, help="peak learning rate of Muon")
    two.add_argument("--adam-lr", type=float, default=2e-3, help="peak learning rate of AdamW")
    two.add_argument("--weight-decay", type=float, default=0.1)
    two.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    two.add_argument("--seed", type=int, default=0, help="of the initial weights")
    two.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    two.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile"
    )
    two.add_argument("--resume", action="store_true", help="continue from the run's checkpoint")
    two.add_argument("--log-every", type=int, default=10, help="steps between two lines of the log")
    two.add_argument("--save-every-s", type=float, default=180, help="seconds between two checkpoints")
    two.add_argument("--pid-file", type=Path, default=None, help="default: pid in the run folder")

    three = verb("export", export, "write the package data and the model card")
    three.add_argument("--out", type=Path, default=PACKAGE_DATA)
    three.add_argument(
        "--context", type=int, default=512, help="window of the first perplexity and of the test's"
    )
    three.add_argument("--long-context", type=int, default=1024, help="window of the second perplexity")
    three.add_argument("--prompt", nargs="+", default=PROMPTS, help="beginnings of the card's samples")
    three.add_argument("--sample-tokens", type=int, default=96)
    three.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def main() -> None:
    args = arguments().parse_args()
    if getattr(args, "pid_file", ...) is None:
        args.pid_file = args.run / "pid"
    args.verb_function(args)


if __name__ == "__main__":
    main()
