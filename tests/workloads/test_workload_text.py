"""Classifiers and taggers of text: batches of any size and raggedness, buckets, labels of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import torchwright as tw
from folders import SENTENCES, change_json, encoder, eval_text, reward, save
from in_process import trials_in_process
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Budget, DeviceFacts
from torchwright.optimization.optimize import Request, optimize
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shape_buckets import ShapeBuckets
from torchwright.workloads.encoding import TextModel, padded
from torchwright.workloads.forward import ForwardWorkload
from torchwright.workloads.rows import RowShapes

KINDS = ["Bert", "Roberta", "DistilBert", "XLMRoberta", "Electra", "Albert", "ModernBert", "DebertaV2"]
HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eval_text(tmp_path_factory.mktemp("text") / "eval.txt")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = dict(enumerate(["sport", "news", "weather"]))
    model = encoder("Bert", HEADS[0], num_labels=3, id2label=names)
    return save(model, tmp_path_factory.mktemp("classifier"))


@pytest.fixture
def workload(classifier: Path, text: Path) -> ForwardWorkload:
    return ForwardWorkload(classifier, batch=8, tokens=50, eval_text=text)


def text_model(workload: ForwardWorkload, folder: Path | None = None) -> TextModel:
    """What an artifact gives, on the original instead of compiled calls."""
    model = workload.build()
    layout = workload.layout
    assert layout is not None
    return TextModel(lambda case: model(**case.kwargs), layout, folder, list(workload.describe()["inputs"]))


@pytest.mark.plain(
    "Albert-ForQuestionAnswering",
    "Albert-ForTokenClassification",
    "DebertaV2-ForQuestionAnswering",
    "Bert-ForSequenceClassification",
)
@torch.inference_mode()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_are_answered_as_rows_alone(kind: str, head: str, tmp_path: Path, text: Path) -> None:
    folder = save(encoder(kind, head), tmp_path)
    bucketed = ForwardWorkload(folder, batch=8, tokens=50, eval_text=text).bucketed(3, 16)
    assert isinstance(bucketed, ForwardWorkload)
    plain = getattr(transformers, f"AutoModel{head}").from_pretrained(folder, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 200, (n,), generator=random).tolist() for n in (3, 40, 17, 50, 9, 22, 31, 5, 44)]
    answer = text_model(bucketed)(*padded(rows, 0))
    names = ["start_logits", "end_logits"] if head == HEADS[2] else ["logits"]
    assert list(answer) == names
    for index, row in enumerate(rows):
        wanted = plain(input_ids=torch.tensor([row]))
        for name in names:
            got = answer[name][index] if head == HEADS[0] else answer[name][index, : len(row)]
            torch.testing.assert_close(got, wanted[name][0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_segments_reach_the_model_and_are_refused_where_it_has_none(
    workload: ForwardWorkload, classifier: Path, tmp_path: Path, text: Path
) -> None:
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    ids = torch.randint(5, 200, (2, 30), generator=torch.Generator().manual_seed(2))
    segments = (torch.arange(30) > 11).long().expand(2, 30)
    wanted = plain(input_ids=ids, token_type_ids=segments).logits
    assert not torch.allclose(wanted, plain(input_ids=ids).logits)
    torch.testing.assert_close(
        text_model(workload)(ids, token_type_ids=segments)["logits"], wanted, rtol=1e-4, atol=1e-4
    )
    of_one = ForwardWorkload(save(encoder("DistilBert", HEADS[0]), tmp_path), batch=8, eval_text=text)
    model = text_model(of_one)
    assert model(ids, token_type_ids=torch.zeros_like(ids))["logits"].shape == (2, 2)
    with pytest.raises(WorkloadError, match="segments apart that this model does not know"):
        model(ids, token_type_ids=segments)


@torch.inference_mode()
def test_buckets_change_the_calls_and_not_the_answers(workload: ForwardWorkload) -> None:
    model = workload.build()
    device = DeviceFacts(kind="cpu", name="test")
    target = Target(model=model, workload=workload, device=device, properties=workload.properties(model))
    technique = ShapeBuckets()
    assert technique.refuse(target) is None
    bucketed = technique.reshape(workload)
    shapes = {tuple(graph.kwargs["input_ids"].shape) for graph in bucketed.graphs(torch.float32)}
    assert 2 <= len(shapes) <= 3
    seen = set()

    def run(case: Any) -> Any:
        seen.add(tuple(case.kwargs["input_ids"].shape))
        return model(**case.kwargs)

    reference = workload.observe(lambda case: model(**case.kwargs), torch.float32)
    candidate = bucketed.observe(bucketed.front(run, bucketed.describe()), torch.float32)
    torch.testing.assert_close(candidate["logits"], reference["logits"], rtol=1e-4, atol=1e-4)
    assert seen <= shapes


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma"])
def test_decoders_judge_ragged_rows_as_rows_alone(kind: str, tmp_path: Path, text: Path) -> None:
    """A reward model: transformers reads the last token, which it knows by the padding token."""
    folder = save(reward(kind), tmp_path)
    model = text_model(ForwardWorkload(folder, batch=8, tokens=50, eval_text=text), folder)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [sentence[:40] for sentence in SENTENCES]
    logits = {}
    for places, rows_n1, _ in model.by_call(texts):
        logits |= dict(zip(places, rows_n1, strict=True))
    for place, sentence in enumerate(texts):
        ids = model.tokens.of([sentence])["input_ids"]
        torch.testing.assert_close(logits[place], plain(input_ids=ids).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "pad"), [("LlamaForSequenceClassification", None), ("BertForNextSentencePrediction", 0)]
)
def test_rows_of_others_stay_together(name: str, pad: int | None, tmp_path: Path, text: Path) -> None:
    config = getattr(transformers, name).config_class(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=300,
        pad_token_id=pad,
    )
    workload = ForwardWorkload(save(getattr(transformers, name)(config), tmp_path), batch=2, eval_text=text)
    assert (workload.layout, workload.bucketed(3, 16), workload.describe()["layout"]) == (None, None, None)
    assert workload.properties(workload.build()) == set()


class TestClassify:
    @torch.inference_mode()
    def test_labels_and_probabilities(self, workload: ForwardWorkload, classifier: Path) -> None:
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
        model = text_model(workload, classifier)
        texts = [text[:40] for text in SENTENCES]
        answers = model.classify(texts)
        assert isinstance(answers, list)
        for text, answer in zip(texts, answers, strict=True):
            ids = [1, *(i for i in model.tokens.of([text])["input_ids"][0].tolist() if i > 2), 2]
            score, index = plain(input_ids=torch.tensor([ids])).logits.softmax(1)[0].max(0)
            assert answer["label"] == ["sport", "news", "weather"][int(index)]
            assert answer["score"] == pytest.approx(score.item(), abs=1e-4)
            alone = model.classify(text)
            assert isinstance(alone, dict)
            assert (alone["label"], alone["score"]) == (
                answer["label"],
                pytest.approx(answer["score"], abs=1e-4),
            )

    @torch.inference_mode()
    def test_pairs_are_two_segments(self, workload: ForwardWorkload, classifier: Path) -> None:
        seen: list[Any] = []

        def run(case: Any) -> Any:
            seen.append(case.kwargs)
            return {"logits": torch.tensor([[0.0, 2.0, 1.0]]).expand(len(case.kwargs["input_ids"]), 3)}

        layout = RowShapes(shapes=((1, 16),))
        model = TextModel(run, layout, classifier, ["input_ids", "attention_mask", "token_type_ids"])
        assert model.classify("abc", "de") == {"label": "news", "score": pytest.approx(0.6652, abs=1e-4)}
        (inputs,) = seen
        assert inputs["attention_mask"].sum() == 8
        assert inputs["token_type_ids"][0].tolist() == [0] * 5 + [1] * 3 + [0] * 8
        assert len(model.classify(["a", "b"], ["c", "d"])) == 2

    @pytest.mark.parametrize(
        ("logits", "config", "wanted"),
        [
            ([3.0, 2.0, 1.0], {"problem_type": "multi_label_classification"}, ("sport", 0.9526)),
            ([-1.0], {}, ("sport", 0.2689)),
            ([1.0, 4.0], {"id2label": None}, ("LABEL_1", 0.9526)),
            ([7.5], {"problem_type": "regression"}, ("sport", 7.5)),
        ],
    )
    def test_labels_that_do_not_exclude_each_other_and_scores_of_one(
        self, logits: list[float], config: dict[str, Any], wanted: tuple[str, float], tmp_path: Path
    ) -> None:
        names = dict(enumerate(["sport", "news", "weather"]))
        folder = save(encoder("Bert", HEADS[0], num_labels=3, id2label=names), tmp_path)
        change_json(folder / "config.json", **config)
        model = TextModel(
            lambda case: {"logits": torch.tensor([logits])},
            RowShapes(shapes=((1, 16),)),
            folder,
            ["input_ids", "attention_mask"],
        )
        assert model.classify("abc") == {"label": wanted[0], "score": pytest.approx(wanted[1], abs=1e-4)}

    def test_what_cannot_be_classified(self, classifier: Path, tmp_path: Path) -> None:
        def model(folder: Path | None = classifier, **layout: Any) -> TextModel:
            return TextModel(
                lambda case: None,
                RowShapes(shapes=((2, 8),), **layout),
                folder,
                ["input_ids", "attention_mask"],
            )

        for texts in ([], [1], ["a", None]):
            with pytest.raises(WorkloadError, match="nothing to read"):
                model().classify(texts)  # type: ignore[arg-type]
        with pytest.raises(WorkloadError, match=r"2 texts have 1 pairs.*one for each"):
            model().classify(["a", "b"], ["c"])
        with pytest.raises(WorkloadError, match=r"answers for each token"):
            model(tokenwise=True).classify("a")
        with pytest.raises(WorkloadError, match=r"row of 11 tokens is longer.*8 tokens"):
            model().classify("nine more")
        with pytest.raises(WorkloadError, match="no tokenizer"):
            model(None).classify("a")
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            model(tmp_path).classify("a")


@pytest.mark.slow
def test_an_artifact_answers_any_batch_and_classifies(
    workload: ForwardWorkload, classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials_in_process(monkeypatch, 2.0, tried=("dtype", "shape_buckets"), cache=tmp_path / "cache")
    out = tmp_path / "out"
    budget = Budget(max_drop=0.5, objective="latency", time_seconds=60.0)
    optimize(Request(workload=workload, budget=budget, device="cpu"), out, lambda event: None)
    model = tw.load(out).model
    rows = [[5, 6, 7], [8] * 30, [9] * 12]
    ids, mask = padded(rows, 0)
    with torch.inference_mode():
        wanted = workload.build()(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
    torch.testing.assert_close(model(ids, mask)["logits"], wanted["logits"], rtol=0.1, atol=0.1)
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=mask)["logits"], model(ids, mask)["logits"], rtol=0, atol=0
    )
    assert model.classify("a b c")["label"] in ("sport", "news", "weather")
