"""Make the language model that Torchwright bundles: the text it learns from, and the package's files around it.

The steps:

    python scripts/train_bundled.py prepare      corpus, split and tokenizer into the build folder
    torchwright train scripts/bundled.toml       the training
    python scripts/train_bundled.py export       the trained model, the texts and the model card into the package
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from bundled_corpus import BEGIN, BEGIN_ID, DEBIAN_DOCS, END, END_ID, SHARED_PARAGRAPH, prepare
from torchwright.train.ledger import read_account
from torchwright.train.run.config.read import read_run
from torchwright.train.run.config.run import DECAY_FRACTION, Run
from torchwright.train.run.loop.trainer import MODEL
from torchwright.train.run.runtime import checkpoint
from torchwright.train.run.runtime.checkpoint import Described

RUN_FILE = Path(__file__).with_name("bundled.toml")
PACKAGE_DATA = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled"
BYTES_ALLOWED = 25_000_000
PROMPTS = (
    "The :mod:`json` module provides",
    'def read_lines(path):\n    """Return the lines of a file',
)
SLICE_BYTES = 8192
"""The part of eval.txt whose perplexity a test recomputes."""


@torch.inference_mode()
def mean_nll(model: LlamaForCausalLM, ids: np.ndarray, context: int) -> float:
    """Nats per token of `ids`, read in windows of `context` positions, each led by the begin token."""
    total = 0.0
    for start in range(0, len(ids), context):
        y = torch.from_numpy(ids[start : start + context].astype(np.int64))[None]
        x = torch.cat([torch.full((1, 1), BEGIN_ID), y[:, :-1]], dim=1)
        logits = model(input_ids=x, use_cache=False).logits
        total += F.cross_entropy(logits[0].float(), y[0], reduction="sum").item()
    return total / len(ids)


def prepare_run(args: argparse.Namespace) -> None:
    args.build.mkdir(parents=True, exist_ok=True)
    facts = prepare(args.build, args.docs, args.vocab_size)
    (args.build / "corpus.json").write_text(json.dumps(facts, indent=1))
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
    """The exported weights' predictions of a text."""

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
    facts = json.loads((args.build / "corpus.json").read_text())
    run = read_run(args.run_file)
    folder = args.run_file.parent / run.out
    model: Any = LlamaForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32)
    config = model.config

    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN_ID, eos_token_id=END_ID, pad_token_id=END_ID
    )
    model.to(torch.bfloat16).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(
        args.build / "tokenizer", model_max_length=config.max_position_embeddings
    ).save_pretrained(args.out)
    for name in ("eval.txt", "calibration.txt", "LICENSE.txt"):
        shutil.copyfile(args.build / name, args.out / name)

    tokenizer = AutoTokenizer.from_pretrained(args.out)
    reloaded = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    text = (args.out / "eval.txt").read_text(encoding="utf-8")
    bpe = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    scores = {context: score(reloaded, bpe, text, context) for context in (args.context, args.long_context)}
    part = score(reloaded, bpe, first_bytes(text, SLICE_BYTES), args.context)
    samples = [greedy(reloaded, tokenizer, prompt, args.sample_tokens) for prompt in args.prompt]
    card = model_card(facts, run, folder, config, reloaded, scores, part, samples)
    (args.out / "README.md").write_text(card, encoding="utf-8")

    files = [path for path in args.out.iterdir() if path.is_file()]
    for path in files:
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    size = sum(path.stat().st_size for path in files)
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

`torchwright train scripts/bundled.toml` trained it; `scripts/train_bundled.py` made this folder and measured every
figure on this card.

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
| tokens seen | {trained.tokens:,} ({epochs:.1f} times the training text) |
| steps | {trained.step:,} of {run.batch_tokens:,} tokens |
| wall time | {wall_min:.0f} minutes, pauses included, on a machine shared with other work |
| time in steps | {step_min:.0f} minutes on {threads} threads |
| processor | {cpu}, no GPU |
| precision | bfloat16 products, float32 weights |
| optimizer | Muon (layers, peak {run.optimizer.lr:g}) and AdamW (embedding and norms, peak {run.optimizer.adam_lr:g}) |
| schedule | warm-up over {run.schedule.warmup_tokens:,} tokens, constant, {decay} |
| window | {run.context} tokens, {run.schedule.decay_context} during the decay |
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
    run: Run,
    folder: Path,
    config: LlamaConfig,
    model: LlamaForCausalLM,
    scores: dict[int, HeldOut],
    part: HeldOut,
    samples: list[str],
) -> str:
    """The card, filled from the run file, its ledger and its last checkpoint, and measured values."""

    def row(name: str, context: int, held: HeldOut) -> str:
        figures = f"{held.bytes:,} | {held.tokens:,} | {held.perplexity:.3f} | {held.bits_per_byte:.4f}"
        return f"| {name} | {context} | {figures} |"

    rows = [row("eval.txt", context, held) for context, held in scores.items()]
    rows.append(row(f"eval.txt, first {SLICE_BYTES} bytes", min(scores), part))
    described: Described = checkpoint.describe(checkpoint.whole(folder / checkpoint.FOLDER)[-1])
    account = read_account(folder)
    decay = round(run.tokens * (run.schedule.decay_fraction or DECAY_FRACTION))
    return CARD.format(
        **facts,
        transformers=transformers.__version__,
        torch=described.facts["torch"],
        begin=BEGIN,
        end=END,
        quality="\n".join(rows),
        parameters=sum(p.numel() for p in model.parameters()),
        config=config,
        rope_theta=dict(config.rope_parameters or {})["rope_theta"],
        trained=described,
        epochs=described.tokens / facts["train_tokens"],
        wall_min=account.wall / 60,
        step_min=account.seconds()["step"] / 60,
        threads=run.threads or os.cpu_count(),
        cpu=cpu_name(),
        decay=f"falling to zero over the last {decay:,}",
        shared=SHARED_PARAGRAPH,
        samples="\n\n".join(f"```text\n{sample}\n```" for sample in samples),
        run=run,
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        made.set_defaults(verb_function=function)
        made.add_argument("--build", type=Path, default=Path("build/bundled"), help="the scratch folder")
        return made

    one = verb("prepare", prepare_run, "corpus, split and tokenizer")
    one.add_argument(
        "--docs", type=Path, default=DEBIAN_DOCS, help="folder of the documentation's .rst.txt files"
    )
    one.add_argument("--vocab-size", type=int, default=4096)

    two = verb("export", export, "write the package data and the model card")
    two.add_argument("--run-file", type=Path, default=RUN_FILE, help="what the model was trained by")
    two.add_argument("--out", type=Path, default=PACKAGE_DATA)
    two.add_argument(
        "--context", type=int, default=512, help="window of the first perplexity and of the test's"
    )
    two.add_argument("--long-context", type=int, default=1024, help="window of the second perplexity")
    two.add_argument("--prompt", nargs="+", default=PROMPTS, help="beginnings of the card's samples")
    two.add_argument("--sample-tokens", type=int, default=96)
    two.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def main() -> None:
    args = arguments().parse_args()
    args.verb_function(args)


if __name__ == "__main__":
    main()
