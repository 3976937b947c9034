"""An example: group relative policy optimization (GRPO, Shao et al., 2024) on sums, in one program.

    python examples/grpo/grpo.py OUT [--steps 100] [--kl 0.0] [--server]

1. `torchwright train` teaches a small model the task by examples of which four in five are wrong (`sums.py`).
2. The serving engine draws groups of answers with their log-probabilities; a reward is 1 for the right sum, else 0.
3. The trainer's model learns from them, and its weights go into the engine while other answers are being drawn.

With --server the engine is that of `torchwright serve`, and both ways go over HTTP (`served.py`).

OUT/model is served like any other (`torchwright serve OUT/model`). OUT/rewards.jsonl and rewards.svg have the curve.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch.nn.utils.rnn import pad_sequence

import served
from rollouts import Answer, Rollouts, exact_match
from sums import CONFIG, CONTEXT, END, Sum, encode, question, sums, write_examples, write_tokenizer
from torchwright.models.decoder import load_decoder, read_decoder_config
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.options import EngineOptions
from torchwright.train.model import Transformer, load_weights, save_folder
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.loop.train import train_run

CLIP = 0.2
"""Clipping range of the ratio of a token's probabilities."""
WARM_UP = 5
"""Steps: Adam's first ones are as long as its rate, whatever the gradients are worth."""


@dataclass(frozen=True)
class Batch:
    """Answers behind their questions, one a row; labels are shifted already."""

    ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    answer_BT: torch.Tensor
    """True if the label is a token of the answer."""
    drawn_BT: torch.Tensor
    """Its log-probability when it was drawn."""
    advantage_B: torch.Tensor


def batch_of(groups: list[list[Answer]]) -> Batch:
    """Advantages are rewards less their group's mean, by its deviation: a group of equals teaches nothing."""
    rows, masks, drawn, advantages = [], [], [], []
    for group in groups:
        reward_G = torch.tensor([answer.reward for answer in group])
        advantages.append((reward_G - reward_G.mean()) / (reward_G.std(correction=0) + 1e-4))
        for answer in group:
            asked = encode(question(answer.asked))
            rows.append(torch.tensor(asked + answer.tokens))
            masks.append(torch.tensor([False] * len(asked) + [True] * len(answer.tokens)))
            drawn.append(torch.tensor([0.0] * len(asked) + answer.logprobs))
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=END)
    return Batch(
        ids_BT[:, :-1],
        ids_BT[:, 1:],
        pad_sequence(masks, batch_first=True)[:, 1:],
        pad_sequence(drawn, batch_first=True)[:, 1:],
        torch.cat(advantages),
    )


def logprobs(model: Transformer, batch: Batch) -> torch.Tensor:
    """(B, T), of each label."""
    logits_BTV = model(batch.ids_BT).float()
    return logits_BTV.log_softmax(-1).gather(-1, batch.labels_BT[..., None])[..., 0]


def loss_of(model: Transformer, reference: Transformer | None, batch: Batch, kl: float) -> torch.Tensor:
    """The clipped objective, a mean over the answers' tokens, and `kl` times the divergence from the reference.

    The ratio is taken to the probabilities by which each token was drawn, be it with earlier weights, or in the
    engine's bfloat16. The divergence is estimated as r - log r - 1 with r = reference / model (Schulman, 2020).
    """
    now_BT = logprobs(model, batch)
    ratio_BT = (now_BT - batch.drawn_BT).exp()
    advantage_B1 = batch.advantage_B[:, None]
    gain_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    if reference is not None:
        with torch.no_grad():
            log_r_BT = logprobs(reference, batch)
        log_r_BT = log_r_BT - now_BT
        gain_BT = gain_BT - kl * (log_r_BT.exp() - log_r_BT - 1)
    return -gain_BT[batch.answer_BT].mean()


def teach_form(out: Path, steps: int) -> Path:
    """Supervised training by `torchwright train`; the folder of its model."""
    write_tokenizer(out / "tokenizer")
    write_examples(out / "sums.jsonl", sums()[0])
    run = {
        "out": "form",
        "tokens": steps * 128 * CONTEXT,
        "batch_tokens": 128 * CONTEXT,
        "context": CONTEXT,
        "precision": "fp32",
        "peak_tflops": 1.0,
        "model": {"config": CONFIG, "tokenizer": "tokenizer"},
        "data": {"train": ["sums.jsonl"]},
        "optimizer": {"lr": 4e-3},
        "schedule": {"warmup_tokens": 20 * 128 * CONTEXT, "final": 0.1},
    }
    model = train_run(parse_run(run), out, live=False).model
    assert model is not None
    return model


class Trained:
    """The model that is trained."""

    def __init__(self, folder: Path) -> None:
        self.config, self.source = read_decoder_config(folder), folder
        self.model = Transformer(self.config)
        load_weights(self.model, folder)

    def save(self, folder: Path) -> None:
        save_folder(self.model, self.config, folder, source=self.source)


class Policy(Trained):
    """The trained model and the engine that draws from it."""

    def __init__(self, folder: Path, scratch: Path, *, answers: int) -> None:
        """`answers` may be under way: other weights put all of them back into the queue."""
        super().__init__(folder)
        self.scratch = scratch
        loaded = load_decoder(folder, torch.bfloat16)
        # Where the compiled kernels are missing, answers depend on their company, which matters nothing here.
        options = EngineOptions(
            deterministic=False, max_running=512, max_queue=answers, step_tokens=4096, speculate="none"
        )
        self.engine = ServingEngine(loaded, size=CacheSize(2048, options.max_running), options=options)

    def publish(self) -> None:
        """The model's weights into the engine, whatever is under way there."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.save(self.scratch)
        self.engine.load_weights(load_decoder(self.scratch, torch.bfloat16))

    def rollouts(self, questions: Iterator[Sum], *, group: int, load: int) -> Rollouts:
        return Rollouts(self.engine, questions, group=group, load=load)

    def exact_match(self, questions: list[Sum]) -> float:
        return exact_match(self.engine, questions)

    def close(self) -> None:
        self.engine.close()


class ServedPolicy(Trained):
    """The trained model and the server that draws from it."""

    def __init__(self, folder: Path, server: served.Server) -> None:
        super().__init__(folder)
        self.server = server

    def publish(self) -> None:
        """The model's weights into the server, whatever is under way there."""
        folder = self.server.next_folder()
        self.save(folder)
        self.server.update(folder)
        shutil.rmtree(folder)

    def rollouts(self, questions: Iterator[Sum], *, group: int, load: int) -> served.ServedRollouts:
        return served.ServedRollouts(self.server, questions, group=group, load=load)

    def exact_match(self, questions: list[Sum]) -> float:
        return served.exact_match(self.server, questions)

    def close(self) -> None:
        pass


def endless(questions: list[Sum], seed: int) -> Iterator[Sum]:
    chosen = random.Random(seed)
    while True:
        yield chosen.choice(questions)


def learn(
    policy: Policy | ServedPolicy,
    out: Path,
    *,
    steps: int,
    questions: int,
    group: int,
    updates: int,
    rate: float,
    kl: float,
) -> list[dict[str, float]]:
    """GRPO: a line of figures for each step, written to OUT/rewards.jsonl as they come."""
    model = policy.model
    reference = copy.deepcopy(model).requires_grad_(False) if kl else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP - 1)
    rollouts = policy.rollouts(endless(sums()[0], 1), group=group, load=questions)
    begun, told = time.perf_counter(), []
    with (out / "rewards.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            groups = rollouts.take(questions)
            batch = batch_of(groups)
            for _ in range(updates):
                loss = loss_of(model, reference, batch, kl)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            warm_up.step()
            policy.publish()
            rewards = [answer.reward for answers in groups for answer in answers]
            figures = {
                "step": step,
                "reward": sum(rewards) / len(rewards),
                "loss": loss.item(),
                "under_way": rollouts.under_way,
                "seconds": time.perf_counter() - begun,
            }
            told.append(figures)
            file.write(json.dumps(figures) + "\n")
            file.flush()
            if step % 10 == 0:
                print(f"step {step}  reward {figures['reward']:.3f}  {figures['seconds']:.0f} s", flush=True)
    rollouts.close()
    return told


def draw(rewards: list[dict[str, float]], before: float, after: float, file: Path) -> None:
    """Draw the mean reward of each step, and as dots the share of held-out sums that were right before and after."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rewards], [row["reward"] for row in rewards], label="reward of a step")
    axes.plot([0, len(rewards)], [before, after], "o", label="held-out sums right")
    axes.set(
        xlabel="step",
        title=f"Mean reward, {len(rewards)} steps in {rewards[-1]['seconds']:.0f} s",
        ylim=(0, None),
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--form-steps", type=int, default=400, help="of supervised training before it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--questions", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=16, help="answers to each question")
    parser.add_argument("--updates", type=int, default=1, help="of the weights in a step")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence from the first model")
    parser.add_argument("--threads", type=int, default=1, help="more gain little with a model this small")
    parser.add_argument("--server", action="store_true", help="draw from `torchwright serve`, over HTTP")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out
    out.mkdir(parents=True)
    answers = max(len(sums()[1]), options.questions * options.group)
    form = teach_form(out, options.form_steps)
    with contextlib.ExitStack() as stack:
        if options.server:
            server = stack.enter_context(served.serving(form, answers=answers))
            run(ServedPolicy(form, server), out, options)
        else:
            run(Policy(form, out / "published", answers=answers), out, options)


def run(policy: Policy | ServedPolicy, out: Path, options: argparse.Namespace) -> None:
    """Learn, and say how many held-out sums are right before and after."""
    held_out = sums()[1]
    before = policy.exact_match(held_out)
    print(f"held-out sums right after supervised training: {before:.1%}", flush=True)
    settings = {
        name: getattr(options, name) for name in ("steps", "questions", "group", "updates", "rate", "kl")
    }
    rewards = learn(policy, out, **settings)
    after = policy.exact_match(held_out)
    policy.close()
    policy.save(out / "model")
    draw(rewards, before, after, out / "rewards.svg")
    print(f"and after GRPO: {after:.1%}")


if __name__ == "__main__":
    main()
