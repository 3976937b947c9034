"""The example of GRPO: a few steps of it from end to end, its objective by hand, and weights that change under load."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo"
sys.path.append(str(EXAMPLE))
for name in ("tokenizers", "msgspec", "xgrammar"):
    pytest.importorskip(name, reason="the engine's packages and a tokenizer")

import grpo  # noqa: E402  # pyright: ignore[reportMissingImports]
from rollouts import Answer  # noqa: E402  # pyright: ignore[reportMissingImports]
from sums import END, encode, question, reward, taught  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchwright.serve.folder import find  # noqa: E402
from torchwright.train.model import Transformer  # noqa: E402


class Fixed:
    """A model whose logits are given."""

    def __init__(self, logits_BTV: torch.Tensor) -> None:
        self.logits_BTV = logits_BTV

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        assert ids_BT.shape == self.logits_BTV.shape[:2]
        return self.logits_BTV


def groups() -> list[list[Answer]]:
    right = [*encode("5"), END]
    first = [Answer((2, 3), tokens, [-0.5] * len(tokens)) for tokens in (right, [*encode("51"), END], right)]
    return [first, [Answer((4, 5, 2), [*encode("11"), END], [-0.1, -0.2, -0.3]) for _ in range(3)]]


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_objective_is_that_of_the_paper(kl: float) -> None:
    """Against loops over answers and tokens, in float64 to 1e-5 of float32's advantages."""
    answers, batch = groups(), grpo.batch_of(groups())
    policy, reference = (torch.randn(*batch.ids_BT.shape, 16, dtype=torch.float64) for _ in range(2))
    total, count = 0.0, 0
    for row, answer in enumerate(answer for group in answers for answer in group):
        rewards = [one.reward for one in answers[row // 3]]
        mean = sum(rewards) / 3
        deviation = (sum((one - mean) ** 2 for one in rewards) / 3) ** 0.5
        advantage = (answer.reward - mean) / (deviation + 1e-4)
        start = len(encode(question(answer.asked))) - 1
        for place, (token, drawn) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            now, then = (
                float(logits[row, start + place].float().log_softmax(-1)[token])
                for logits in (policy, reference)
            )
            ratio = float(torch.tensor(now - drawn).exp())
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            r = float(torch.tensor(then - now).exp())
            total, count = total + gain - kl * (r - (then - now) - 1), count + 1
    other = cast(Transformer, Fixed(reference)) if kl else None
    loss = grpo.loss_of(cast(Transformer, Fixed(policy)), other, batch, kl)
    assert float(loss) == pytest.approx(-total / count, rel=1e-4, abs=1e-4)


def test_rewards_are_exact() -> None:
    assert reward((4, 7, 5, 8), [*encode("24"), END]) == 1
    for wrong in ([], encode("24"), [*encode("20"), END], [*encode("240"), END], [END]):
        assert reward((4, 7, 5, 8), wrong) == 0


def test_the_teacher_leaves_a_digit_out_four_times_of_five() -> None:
    draw = random.Random()
    told = Counter(taught((1, 2, 3, 5), draw) for _ in range(20_000))
    assert told.keys() == {"11", "10", "9", "8", "6"}
    assert all(abs(count - 4000) < 400 for count in told.values())  # seven deviations


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--server"]])
def test_a_few_steps_from_end_to_end(tmp_path: Path, where: list[str]) -> None:
    out = tmp_path / "out"
    words = ["--form-steps", "2", "--steps", "2", "--questions", "4", "--group", "4", "--kl", "0.1"]
    command = [sys.executable, str(EXAMPLE / "grpo.py"), str(out), *words, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "rewards.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["under_way"] > 0 for row in rows), "weights changed with nothing under way"
    assert "<svg" in (out / "rewards.svg").read_text()
    assert find(str(out / "model")).folder == out / "model"


def test_an_answer_drawn_is_as_likely_as_the_trained_model_says(tmp_path: Path) -> None:
    """bfloat16 in the engine, float32 in the trainer: mean difference of log-probabilities below 0.02."""
    torch.set_num_threads(1)
    policy = grpo.Policy(grpo.teach_form(tmp_path, 1), tmp_path / "published", answers=32)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.publish()
    rollouts = grpo.Rollouts(policy.engine, grpo.endless([(2, 3, 4, 5), (9, 9, 9, 9)], 0), group=4, load=8)
    batch = grpo.batch_of(rollouts.take(8))
    with torch.no_grad():
        apart_BT = (grpo.logprobs(policy.model, batch) - batch.drawn_BT)[batch.answer_BT]
    assert float(apart_BT.abs().mean()) < 0.02
    policy.engine.close()
