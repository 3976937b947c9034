"""Translators and summarizers judged by references: their loss beside transformers', its interval, what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from seq2seqs import tiny, tokenizer

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.seq2seq.pairs import read_pairs
from torchwright.models.decoder.seq2seq.workload import Seq2SeqWorkload
from torchwright.workloads.accuracy import reference_loss

NEW = 24
NAMES = ["t5", "bart", "nllb"]


def lines(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join("".join(draw.choices("abcdef", k=4)) for _ in range(draw.randint(1, 6)))
        for _ in range(count)
    ]


def opened(folder: Path, name: str = "t5", count: int = 30, **options) -> Seq2SeqWorkload:
    """With lines of references that are at times cut off at `NEW` tokens."""
    tiny(folder, name)
    tokenizer(folder, languages=("eng_Latn", "fra_Latn") if options else ())
    (folder / "sources.text").write_text("\n".join(lines(count, 1)))
    (folder / "wanted.text").write_text("\n".join(lines(count, 2)))
    return Seq2SeqWorkload(
        folder,
        batch=3,
        tokens=20,
        new_tokens=NEW,
        eval_text=folder / "sources.text",
        reference=[str(folder / "wanted.text")],
        **options,
    )


@pytest.mark.plain("t5")
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    options = {"language": "fra_Latn", "source_language": "eng_Latn"} if name == "nllb" else {}
    workload = opened(tmp_path, name, **options)
    model = workload.build()
    found = workload.observe(workload.original_run(model), torch.float32)
    losses, counts = [], []
    for index in range(workload._judged()):
        ids, mask, target = workload._case(index).args
        ends = [workload._length(row) for row in target.tolist()]
        labels = torch.full_like(target, -100)
        for row, end in enumerate(ends):
            labels[row, : min(end, NEW - 1)] = target[row, 1 : end + 1]
        for row in range(len(ids)):
            part = slice(row, row + 1)
            out = model(
                input_ids=ids[part],
                attention_mask=mask[part],
                decoder_input_ids=target[part],
                labels=labels[part],
            )
            counts.append(int((labels[part] >= 0).sum()))
            losses.append(out.loss.item() * counts[-1])
    assert found["tokens"].tolist() == counts
    assert torch.allclose(found["losses"], torch.tensor(losses, dtype=torch.float64), rtol=1e-4)
    if options:
        assert all(row[1] == workload.rules.first for row in target.tolist())


@torch.inference_mode()
def test_what_is_worse_is_said_to_be_worse(tmp_path: Path) -> None:
    workload = opened(tmp_path)
    model = workload.build()
    run = workload.original_run(model)
    before = workload.observe(run, torch.float32)
    same = workload.compare(before, before)
    assert (same.metric, same.drop, same.drop_low, same.drop_high) == (
        "perplexity of the references",
        0,
        0,
        0,
    )
    assert same.extras["top1_agreement"] == 1
    worse = workload.compare(before, before | {"losses": before["losses"] + 0.1 * before["tokens"]})
    assert worse.drop == pytest.approx(torch.tensor(0.1).expm1().item(), rel=1e-6)
    assert worse.drop_high == pytest.approx(worse.drop)
    assert worse.samples == 3 * workload._judged()


def test_the_interval_is_a_bootstraps() -> None:
    tokens, before = torch.randint(3, 30, (200,)), torch.rand(200)
    after = before + torch.randn(200) * tokens * 0.02
    found = reference_loss(tokens, before, after)
    drawn = [torch.randint(200, (200,)) for _ in range(4_000)]
    grown = torch.stack([torch.expm1((after - before)[d].sum() / tokens[d].sum()) for d in drawn])
    low, high = grown.quantile(torch.tensor([0.025, 0.975])).tolist()
    width = high - low
    assert found.drop_low == pytest.approx(low, abs=0.15 * width)
    assert found.drop_high == pytest.approx(high, abs=0.15 * width)
    with pytest.raises(WorkloadError, match="not finite"):
        reference_loss(tokens, before, after * torch.inf)


def test_calibration_has_other_pairs(tmp_path: Path) -> None:
    workload = opened(tmp_path)
    judged = {tuple(pair.source) for pair in workload._sources.evaluation}
    assert not judged & {tuple(pair.source) for pair in workload._sources.calibration}
    assert workload.describe()["reference"] == str(tmp_path / "wanted.text")
    assert not {"sources.text", "wanted.text"} & set(workload.files(weights=True))


def test_what_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    sources, wanted = tmp_path / "sources.text", tmp_path / "wanted.text"
    for reference, eval_text, said in (
        (str(wanted), None, "without its sources"),
        ([str(wanted), str(sources)], sources, "one text file"),
        (tmp_path / "missing", sources, "no such file"),
    ):
        with pytest.raises(WorkloadError, match=said):
            Seq2SeqWorkload(tmp_path, reference=reference, eval_text=eval_text)
    wanted.write_text("\n".join(lines(29, 2)))
    with pytest.raises(WorkloadError, match="29 lines for 30"):
        read_pairs(sources, wanted)
    wanted.write_text("\n".join([*lines(29, 2), ""]) + "\n")
    with pytest.raises(WorkloadError, match=r"line 30 of .*wanted.* is empty"):
        read_pairs(sources, wanted)
    wanted.write_bytes(b"\xff\xfe\n" * 30)
    with pytest.raises(WorkloadError, match="UTF-8"):
        read_pairs(sources, wanted)
    few = "\n".join(lines(4, 3))
    sources.write_text(few)
    wanted.write_text(few)
    with pytest.raises(WorkloadError, match="too short"):
        Seq2SeqWorkload(tmp_path, reference=wanted, eval_text=sources)
