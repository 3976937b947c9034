"""Preferences: each loss by hand, packed pairs against one answer at a time, whole runs, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import SMALL, pairs_run, small_model, write_pairs
from runs import assert_same, checkpoints, losses, run_processes, state

from torchwright.cli import main
from torchwright.models.decoder.families import decoder_config
from torchwright.train.data.packing import Packed
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.model import Transformer
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.objective_section import Preference
from torchwright.train.run.config.read import read_run
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.objective import MicroBatch
from torchwright.train.run.objectives.preference import LOSSES, Answers, Preferences
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.corpus import open_data
from torchwright.train.run.runtime.processes import processes
from torchwright.train.run.runtime.source import write_source


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("base"))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def by_hand(loss: str, how: Preference, row: list[list[float]]) -> float:
    """The papers' formulas, a pair at a time."""
    (lc, lr), (nc, nr), (rc, rr) = row
    beta, delta = how.strength, (lc - rc) - (lr - rr)
    noise = how.label_smoothing or 0.0
    if loss == "dpo":
        return -(1 - noise) * log_sigmoid(beta * delta) - noise * log_sigmoid(-beta * delta)
    if loss == "hinge":
        return max(0.0, 1 - beta * delta)
    if loss == "ipo":
        return ((lc - rc) / nc - (lr - rr) / nr - 1 / (2 * beta)) ** 2
    if loss == "simpo":
        return -log_sigmoid(beta * (lc / nc - lr / nr) - (0.5 if how.margin is None else how.margin))
    odds = [math.exp(each) / (1 - math.exp(each)) for each in (lc / nc, lr / nr)]
    return -lc / nc - beta * log_sigmoid(math.log(odds[0] / odds[1]))


@pytest.mark.parametrize(
    "how",
    [
        *(Preference(loss=loss) for loss in LOSSES),
        Preference(beta=0.7, label_smoothing=0.2),
        Preference(loss="simpo", margin=1.25, beta=3.0),
    ],
    ids=lambda how: f"{how.loss}-{how.beta}",
)
def test_each_loss_is_its_formula(how: Preference) -> None:
    """float64, 1e-12 relative."""
    tokens_P2 = torch.randint(1, 30, (50, 2))
    logp_P2 = -tokens_P2 * (0.05 + 3 * torch.rand(50, 2, dtype=torch.float64))
    reference_P2 = logp_P2 + torch.randn(50, 2, dtype=torch.float64)
    answers = Answers(logp_P2=logp_P2, tokens_P2=tokens_P2, reference_P2=reference_P2)
    rows = torch.stack([logp_P2, tokens_P2, reference_P2], 1).tolist()
    wanted = [by_hand(how.loss, how, row) for row in rows]
    assert LOSSES[how.loss](answers, how).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def opened(run_file: Path) -> Shards:
    """The training shard that the run makes of its rows."""
    run = read_run(run_file)
    out = run_file.parent / "out"
    with processes(10.0):
        source = write_source(run, run_file.parent, out)
        return open_data(run, decoder_config(SMALL, "test"), run_file.parent, source, out).train["train"]


def test_packed_pairs_are_answers_computed_one_at_a_time(tmp_path: Path, base: Path) -> None:
    """float64: log-probabilities, loss, figures and every gradient of windows against single sequences, 1e-11."""
    shards = opened(pairs_run(tmp_path, base))
    packed = Packed(shards, 64, 0, end=None, pairs=True)
    reference_P2 = -30 * np.random.default_rng().random((40, 2))
    packed.reference_P2 = reference_P2
    windows = packed.rows([*range(packed.count), None])
    assert windows.documents_BT is not None
    batch = MicroBatch(
        ids_BT=windows.ids_BT,
        labels_BT=windows.labels_BT,
        positions_BT=torch.arange(64) - windows.documents_BT,
        documents_BS=windows.documents_BT,
        reference_BT=windows.reference_BT,
    )
    model = Transformer(decoder_config(SMALL, "test")).double()
    model.reset_parameters(1)
    how = Preference(beta=0.5, label_smoothing=0.1)
    objective = Preferences(model, how)
    assert objective.count(batch) == 40
    answers = objective.answers(batch)
    order = np.concatenate([packed.held(window) for window in range(packed.count)])
    assert sorted(order) == list(range(40))
    loss, figures = objective(batch)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    starts = shards.starts(0)
    assert starts is not None
    ends = [*starts[1:], shards.sizes[0]]
    logp, tokens = [], []
    for start, end in zip(starts, ends, strict=True):
        ids = torch.from_numpy(shards.read(0, start, end - start))
        trained = torch.from_numpy(shards.trained(0, start, end - start))
        each = model(ids[None, :-1])[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        logp.append(each[trained[1:]].sum())
        tokens.append(trained.sum())
    logp_P2 = torch.stack(logp).unflatten(0, (-1, 2))
    torch.testing.assert_close(answers.logp_P2, logp_P2[order], atol=1e-11, rtol=0)
    assert torch.equal(answers.tokens_P2, torch.stack(tokens).unflatten(0, (-1, 2))[order])
    assert torch.equal(answers.reference_P2, torch.from_numpy(reference_P2)[order])
    ratio_P2 = logp_P2 - torch.from_numpy(reference_P2)
    margin_P = 0.5 * (ratio_P2[:, 0] - ratio_P2[:, 1])
    slow = -(0.9 * margin_P.sigmoid().log() + 0.1 * (-margin_P).sigmoid().log()).sum()
    slow.backward()
    assert loss.item() == pytest.approx(slow.item(), rel=1e-12)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-11, rtol=1e-9)
    told = dict(zip(objective.figures, (figures / 40).tolist(), strict=True))
    assert told["reward_margin"] == pytest.approx(margin_P.mean().item())
    assert told["reward_accuracy"] == pytest.approx((margin_P > 0).double().mean().item())
    assert told["logp_rejected"] == pytest.approx(logp_P2[:, 1].mean().item())


def test_a_run_learns_what_is_preferred_and_goes_on_bit_for_bit(tmp_path: Path, base: Path) -> None:
    data = {"train": ["pairs.jsonl"], "validation": ["pairs.jsonl"]}
    run = pairs_run(tmp_path, base, data=data, evaluation={"every_steps": 3})
    outcome = train(run, live=False)
    figures = read_figures(tmp_path / "out")
    # At the first step model and reference are the same.
    assert figures[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert figures[1]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert figures[6]["reward_margin"] > 0.5
    assert figures[6]["validation_reward_accuracy"] > 0.9
    assert outcome.validation_loss == figures[6]["validation_loss"] < math.log(2)
    (kept,) = (tmp_path / "out" / "tokens").glob("reference-*")
    written = kept.stat().st_mtime_ns
    wanted = state(checkpoints(run)[-1])
    shutil.rmtree(checkpoints(run)[-1])
    assert train(run, resume=True, live=False).loss == outcome.loss
    assert_same(wanted, state(checkpoints(run)[-1]))
    assert kept.stat().st_mtime_ns == written
    # A damaged reference is computed anew from the starting weights, not from those of the checkpoint.
    before = kept.read_bytes()
    kept.write_bytes(before[:-1])
    shutil.rmtree(checkpoints(run)[-1])
    assert train(run, resume=True, live=False).loss == outcome.loss
    assert kept.read_bytes() == before
    assert_same(wanted, state(checkpoints(run)[-1]))


def test_adapters_begin_at_the_reference(tmp_path: Path, base: Path) -> None:
    run = pairs_run(tmp_path, base, lora={"r": 4, "dora": True}, tokens=3 * 256)
    outcome = train(run, live=False)
    assert outcome.adapter
    figures = read_figures(tmp_path / "out")
    assert figures[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert figures[3]["reward_margin"] > figures[1]["reward_margin"]


@pytest.mark.slow  # `test_precision` rounds, and other tests here learn in float32
@pytest.mark.parametrize("precision", ["float8_tensorwise", "mxfp8"])
def test_low_precision_is_the_references_too(tmp_path: Path, base: Path, precision: str) -> None:
    """Model and reference round alike; a float8 scale is of all answers that are computed together."""
    pytest.importorskip("torchao", reason="the formats are torchao's")
    train(pairs_run(tmp_path, base, precision=precision), live=False)
    figures = read_figures(tmp_path / "out")
    assert figures[1]["loss"] == pytest.approx(math.log(2), abs=5e-3)
    assert figures[6]["reward_margin"] > 0.5


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference_compute_none(tmp_path: Path, base: Path, loss: str) -> None:
    run = pairs_run(tmp_path, base, preference={"loss": loss}, tokens=4 * 256)
    train(run, live=False)
    assert not list((tmp_path / "out" / "tokens").glob("reference-*"))
    assert losses(run)[4] < losses(run)[1]


@pytest.mark.parametrize("axis", ["dp_shard", pytest.param("dp_replicate", marks=pytest.mark.slow)])
def test_two_processes_are_one(tmp_path: Path, base: Path, axis: str) -> None:
    """Losses of float32 summed in another order, 1e-4."""
    alone = pairs_run(tmp_path / "one", base, tokens=3 * 256)
    train(alone, live=False)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "pairs.jsonl", tmp_path / "two")
    both = pairs_run(tmp_path / "two", base, tokens=3 * 256, layout={axis: 2})
    for code, told in run_processes(both, world=2):
        assert code == 0, told
    for step, line in read_figures(tmp_path / "one" / "out").items():
        other = read_figures(tmp_path / "two" / "out")[step]
        for name in ("loss", "reward_margin", "logp_chosen"):
            assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-4)


BROKEN = [
    ({"prompt": "p", "chosen": "same", "rejected": "same"}, "are the same"),
    ({"prompt": "p", "chosen": "", "rejected": "b"}, "is empty"),
    ({"prompt": "p", "chosen": "a"}, "no 'rejected'"),
    ({"prompt": "word " * 80, "chosen": "a", "rejected": "b"}, "places, and a window has 64"),
    ({"prompt": "p", "completion": "a"}, "no 'chosen'"),
    (
        {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
        "assistant",
    ),
]


def test_broken_pairs_are_told_and_left_out(tmp_path: Path, base: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl")
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row, _ in BROKEN)
    train(pairs_run(tmp_path, base, tokens=256), live=False)
    told = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    listed = sorted(next(line for line in told if line.get("event") == "broken_rows")["rows"])
    assert [number for number, _ in listed] == list(range(41, 41 + len(BROKEN)))
    for (_, reason), (_, wanted) in zip(listed, BROKEN, strict=True):
        assert wanted in reason
    with pytest.raises(DataError, match=r"row 41 of .* is broken"):
        train(
            pairs_run(tmp_path, base, out="strict", data={"train": ["pairs.jsonl"], "strict": True}),
            live=False,
        )


def test_what_is_shared_of_two_conversations_is_no_answer(tmp_path: Path, base: Path) -> None:
    said = [("user", "Say sun."), ("assistant", "sun"), ("user", "And moon.")]
    shared = [{"role": role, "content": text} for role, text in said]
    row = {
        name: [*shared, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", "moon"), ("rejected", "no"))
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    shards = opened(pairs_run(tmp_path, base, context=128))
    assert shards.trained(0, 0, shards.sizes[0]).sum() < 10
    labels_BT = Packed(shards, 128, 0, end=None, pairs=True).rows([0]).labels_BT
    assert (labels_BT != IGNORE).sum() == shards.trained(0, 0, shards.sizes[0]).sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "label_smoothing is for the loss 'dpo'"),
        ({"preference": {"margin": 1.0}}, "margin is for the loss 'simpo'"),
        ({"layout": {"cp": 2}}, "layout"),
        ({"model": {"config": SMALL}}, "model.folder"),
        ({"qat": {"scheme": "w8a8"}}, "qat"),
        ({"data": {"train": ["pairs.jsonl"], "packing": "stream"}}, "data.packing"),
        ({"data": {"train": ["pairs.jsonl"], "form": "chat"}}, "data.form"),
    ],
)
def test_what_preferences_do_not_go_with(
    tmp_path: Path, base: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        read_run(pairs_run(tmp_path, base, **changes))


def test_pairs_and_other_data_are_told_apart(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pairs_run(tmp_path, base)
    assert main(["data", "pack", str(run), "--out", str(tmp_path / "packed")]) == 0
    plain = tmp_path / "plain.toml"
    plain.write_text(run.read_text().replace("[preference]\nbeta = 0.5", ""))
    assert main(["train", str(plain), "--quiet"]) == 2
    assert "add [preference]" in capsys.readouterr().err
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one"}\n')
    for name, message in (
        ("text.jsonl", "no columns that are known"),
        ("a.npy", "holds no rows of preference"),
    ):
        with pytest.raises(DataError, match=message):
            train(pairs_run(tmp_path, base, out=f"out-{name}", data={"train": [name]}), live=False)
    # Shards of pairs are read as rows are, and refused where windows are too short for them.
    (shard,) = (tmp_path / "packed").glob("*.safetensors")
    packed = pairs_run(tmp_path, base, out="packed-out", data={"train": [str(shard)]}, tokens=256)
    assert train(packed, live=False).loss == pytest.approx(math.log(2), abs=1e-4)
    with pytest.raises(DataError, match="longer than a window of 16"):
        train(pairs_run(tmp_path, base, out="short", data={"train": [str(shard)]}, context=16), live=False)
