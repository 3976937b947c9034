"""Encoders: embeddings as transformers gives them, ragged batches, fixed shapes, buckets, and what bad folders get."""

from __future__ import annotations

import warnings

import cloudpickle
import pytest
import torch
import transformers

import torchwright as tw
from folders import (
    SENTENCES,
    causal,
    change_json,
    encoder,
    eval_text,
    minilm,
    save,
    sentence_transformer,
    write_json,
)
from in_process import trials_in_process
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Budget, DeviceFacts
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.optimize import Request, optimize
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shape_buckets import ShapeBuckets
from torchwright.workloads.base import Case
from torchwright.workloads.detect import kind_of
from torchwright.workloads.encoder import EncoderWorkload, read_pipeline
from torchwright.workloads.encoding import TextEmbedder
from torchwright.workloads.rows import RowShapes
from torchwright.workloads.sentences import sentences

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
KINDS = ["Bert", "Roberta", "MPNet", "DistilBert", "XLMRoberta", "Electra", "Albert", "ModernBert"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return eval_text(tmp_path_factory.mktemp("text") / "eval.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sentence_transformer(tmp_path_factory.mktemp("bert") / "st", encoder("Bert"), pooling=MEAN)


@pytest.fixture
def workload(folder, text):
    return EncoderWorkload(folder, batch=8, tokens=50, eval_text=text)


def run_of(model):
    return lambda case: model(*case.args, **case.kwargs)


def pooled(model, ids_BT, mask_BT, mode="mean"):
    """The reference: transformers' own model row by row, without any padding, pooled in float64."""
    rows = []
    for ids, mask in zip(ids_BT, mask_BT, strict=True):
        n = int(mask.sum())
        hidden = model(input_ids=ids[None, :n], attention_mask=mask[None, :n]).last_hidden_state[0].double()
        found = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "lasttoken": hidden[-1]}
        rows.append(found[mode])
    return torch.stack(rows)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_rows_run_alone(kind, tmp_path, text):
    workload = EncoderWorkload(save(encoder(kind), tmp_path), batch=8, tokens=50, eval_text=text)
    (case,) = workload.cases(torch.float32)
    plain = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(
        workload.build()(*case.args).double(), pooled(plain, *case.args), rtol=0, atol=2e-5
    )


@pytest.mark.plain("Albert")
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_exported_graph_keeps_the_mask(kind, tmp_path, text):
    """transformers drops a mask of ones by looking at it; a graph made from such a call must not."""
    workload = EncoderWorkload(save(encoder(kind), tmp_path), batch=8, tokens=50, eval_text=text)
    model = workload.build()
    ids_BT, mask_BT = workload.cases(torch.float32)[0].args
    program = export(model, [Case(name="encode", args=(ids_BT, torch.ones_like(mask_BT)))])["encode"]
    torch.testing.assert_close(program.module()(ids_BT, mask_BT), model(ids_BT, mask_BT), rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalisation_of_the_folder(pooling, mode, normalize, tmp_path, text):
    folder = sentence_transformer(tmp_path / "st", encoder("Bert"), pooling=pooling, normalize=normalize)
    workload = EncoderWorkload(folder, batch=8, tokens=50, eval_text=text)
    (case,) = workload.cases(torch.float32)
    model = workload.build()
    ids_BT, mask_BT = case.args
    plain = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = pooled(plain, ids_BT, mask_BT, mode)
    if normalize:
        expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(model(*case.args).double(), expected, rtol=0, atol=2e-5)
    assert (workload.describe()["pooling"], workload.describe()["normalize"]) == (mode, normalize)


DECODERS = {
    "Qwen3": {"head_dim": 8},  # as Qwen3-Embedding
    "Mistral": {},  # as e5-mistral
    "Qwen2": {"is_causal": False},  # as gte-Qwen2, which sees what follows
}


@pytest.mark.slow  # importing sentence_transformers takes 4 s
@torch.inference_mode()
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_embed_by_their_last_token_as_sentence_transformers_does(kind, tmp_path, text):
    from sentence_transformers import SentenceTransformer

    model = causal(kind, **DECODERS[kind])
    folder = sentence_transformer(tmp_path / "st", model, pooling={"pooling_mode_lasttoken": True})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", settings)
    assert kind_of(folder) is EncoderWorkload
    workload = EncoderWorkload(folder, batch=4, tokens=64, eval_text=text)
    build = workload.build()
    program = export(build, workload.graphs(torch.float32))["encode"]
    texts = ["A", *(sentence[:40] for sentence in SENTENCES)]
    with warnings.catch_warnings(action="ignore"):
        wanted = torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(texts))
    for run in (run_of(build), run_of(program.module())):
        got = TextEmbedder(run, workload.layout, folder).encode(texts)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_artifact_of_a_decoder_embeds(tmp_path, text, monkeypatch):
    trials_in_process(monkeypatch, 2.0, tried=("dtype", "shape_buckets"), cache=tmp_path / "cache")
    model = causal("Qwen3", head_dim=8)
    folder = sentence_transformer(tmp_path / "st", model, pooling={"pooling_mode_lasttoken": True})
    workload = EncoderWorkload(folder, batch=4, tokens=50, eval_text=text)
    budget = Budget(max_drop=0.5, objective="latency", time_seconds=60.0)
    optimize(Request(workload=workload, budget=budget, device="cpu"), tmp_path / "out", lambda event: None)
    texts = [sentence[:40] for sentence in SENTENCES]
    with torch.inference_mode():
        wanted = TextEmbedder(run_of(workload.build()), workload.layout, folder).encode(texts)
    got = tw.load(tmp_path / "out").model.encode(texts)
    assert torch.nn.functional.cosine_similarity(got, wanted).min() > 0.999


def test_the_transformer_may_lie_in_a_folder_of_its_own(tmp_path, text):
    sentence_transformer(tmp_path / "st", encoder("Bert"), pooling=MEAN)
    inner = tmp_path / "st" / "0_Transformer"
    save(encoder("Bert"), inner)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "st" / name).unlink()
    rows = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    write_json(tmp_path / "st" / "modules.json", [{"path": p, "type": f"x.{t}"} for p, t in rows])
    workload = EncoderWorkload(tmp_path / "st", batch=8, eval_text=text)
    workload.build()
    files = workload.files(weights=False)
    assert {
        "modules.json",
        "0_Transformer/config.json",
        "0_Transformer/tokenizer.json",
        "1_Pooling/config.json",
    } <= set(files)
    assert not any(name.endswith(".safetensors") for name in files)
    assert "0_Transformer/model.safetensors" in workload.files(weights=True)
    assert workload.layout.part == "0_Transformer"


class TestBatches:
    def test_the_case_is_ragged_and_padded_to_its_longest(self, workload):
        (case,) = workload.cases(torch.float32)
        ids_BT, mask_BT = case.args
        lengths = mask_BT.sum(1)
        assert ids_BT.shape == mask_BT.shape == (8, 50)
        assert lengths.max() == 50
        assert len(set(lengths.tolist())) > 2
        assert (ids_BT[mask_BT == 0] == 0).all()
        assert "ragged" in workload.properties(workload.build())

    def test_sentences_of_one_length_are_not_ragged(self, folder, tmp_path):
        (tmp_path / "even.txt").write_text(
            " ".join(f"Five words {a} {b} long." for a in "abcdef" for b in "abcdef")
        )
        workload = EncoderWorkload(folder, batch=8, eval_text=tmp_path / "even.txt")
        assert "ragged" not in workload.properties(workload.build())

    def test_observe_calls_nothing_but_the_shape_that_is_timed(self, workload):
        shape = workload.cases(torch.float32)[0].args[0].shape
        seen = []

        def run(case):
            seen.append(case.args[0].shape)
            return torch.ones(len(case.args[0]), 4)

        observed = workload.observe(run, torch.float32)
        assert set(seen) == {shape}
        assert len(observed) == 8 * len(seen) >= 40

    def test_the_sample_has_no_sentence_twice_and_none_of_calibration(self, workload):
        batches = [workload._batch(i) for i in range(workload._rounds())]
        rows = [tuple(row.tolist()) for ids_BT, _ in batches for row in ids_BT]
        calibration = [
            tuple(row.tolist()) for case in workload.calibration(torch.float32) for row in case.args[0]
        ]
        assert len(set(rows)) == len(rows)
        assert not set(rows) & set(calibration)

    def test_what_was_chosen_is_judged_by_other_sentences(self, workload):
        def seen(one):
            rows = []
            one.observe(lambda case: rows.extend(case.args[0].tolist()) or torch.ones(8, 4), torch.float32)
            return set(map(tuple, rows))

        chosen, last = seen(workload), seen(workload.unseen())
        assert len(last) >= 16
        assert not chosen & last
        calibration = [row for case in workload.calibration(torch.float32) for row in case.args[0].tolist()]
        assert not last & set(map(tuple, calibration))

    def test_without_a_second_part_there_is_no_other_judgement(self, folder, tmp_path):
        text = eval_text(tmp_path / "text.txt", count=20)
        assert EncoderWorkload(folder, batch=8, eval_text=text).unseen() is None

    def test_a_text_of_few_sentences_is_split_too(self, folder, tmp_path):
        """Two batches once calibrated four times on the ones that were judged."""
        workload = EncoderWorkload(folder, batch=8, eval_text=eval_text(tmp_path / "text.txt", count=20))
        judged = {tuple(row) for i in range(workload._rounds()) for row in workload._batch(i)[0].tolist()}
        judged |= {tuple(row) for case in workload.cases(torch.float32) for row in case.args[0].tolist()}
        calibration = [row for case in workload.calibration(torch.float32) for row in case.args[0].tolist()]
        assert len(calibration) == 32
        assert not judged & set(map(tuple, calibration))

    def test_the_bundled_texts_share_no_sentence(self, folder):
        workload = EncoderWorkload(folder, batch=32)
        assert workload.sentences.batches > 16
        judged = {tuple(row) for row in workload.sentences._read().evaluation}
        assert not judged & {tuple(row) for row in workload.sentences._read().calibration}

    def test_the_sample_shrinks_with_the_model(self, workload):
        before, workload.sample_operations = workload._rounds(), 1.0
        assert workload._rounds() == 2 < before

    def test_the_same_sentences_in_another_process(self, workload):
        other = cloudpickle.loads(cloudpickle.dumps(workload))
        assert torch.equal(other.cases(torch.float32)[0].args[0], workload.cases(torch.float32)[0].args[0])

    def test_building_gives_a_model_in_eval_mode(self, workload):
        (case,) = workload.cases(torch.float32)
        model = workload.build()
        assert not any(module.training for module in model.modules())
        assert torch.equal(model(*case.args), model(*case.args))

    @torch.inference_mode()
    def test_the_original_agrees_with_itself_and_a_changed_one_does_not(self, workload):
        model, other = workload.build(), workload.build()
        other.model.encoder.layer[0].output.dense.weight.data.mul_(-1)
        reference = workload.observe(run_of(model), torch.float32)
        assert workload.compare(reference, workload.observe(run_of(model), torch.float32)).drop_high < 1e-6
        changed = workload.compare(reference, workload.observe(run_of(other), torch.float32))
        assert changed.drop > 0.01
        assert changed.samples == len(reference)

    @torch.inference_mode()
    def test_bfloat16_stays_float32_outside(self, workload):
        model = workload.build()
        (case,) = workload.cases(torch.float32)
        expected = model(*case.args)
        cast = workload.cast(model, torch.bfloat16, lambda name, module: False)
        assert cast(*case.args).dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(cast(*case.args), expected).min() > 0.99


def test_sentences_end_where_they_should():
    text = "One sentence here. Another one\nover two lines! Too short.\n\n    1 2 3 == 4 { }\n\nLast words without stop"
    assert sentences(text) == [
        "One sentence here.",
        "Another one over two lines!",
        "Last words without stop",
    ]


class TestEncoder:
    @torch.inference_mode()
    def test_texts_of_any_number_and_length(self, workload, folder):
        model = workload.build()
        encode = TextEmbedder(run_of(model), workload.layout, folder).encode
        texts = [text[:45] for text in SENTENCES * 2 + ["Odd."]]
        many = encode(texts)
        assert many.shape == (17, 32)
        for text, row in zip(texts, many, strict=True):
            torch.testing.assert_close(encode(text), row, rtol=0, atol=1e-5)

    @torch.inference_mode()
    def test_ids_without_a_mask(self, workload):
        model = workload.build()
        ids = torch.randint(5, 200, (3, 10))
        expected = model(ids, torch.ones_like(ids))
        answer = TextEmbedder(run_of(model), workload.layout, None)(ids)
        torch.testing.assert_close(answer, expected, rtol=0, atol=1e-5)

    def test_texts_are_cut_at_the_models_limit_and_refused_beyond_the_optimized_length(
        self, workload, folder
    ):
        lengths = []

        def run(case):
            lengths.append(int(case.args[1].sum()))
            return torch.zeros(len(case.args[0]), 2)

        TextEmbedder(run, RowShapes(shapes=((1, 100),), cut=100), folder).encode("a" * 500)
        assert lengths == [100]
        with pytest.raises(WorkloadError, match=r"row of 100 tokens is longer.*50 tokens"):
            TextEmbedder(run, workload.layout, folder).encode("a" * 500)

    @pytest.mark.parametrize("texts", [[], [1, 2], ["a", None]])
    def test_nothing_to_encode(self, texts, workload, folder):
        with pytest.raises(WorkloadError, match="nothing to read"):
            TextEmbedder(lambda case: case, workload.layout, folder).encode(texts)

    def test_no_tokenizer(self, workload, tmp_path):
        with pytest.raises(WorkloadError, match=r"no tokenizer.*input_ids"):
            TextEmbedder(lambda case: case, workload.layout, None).encode("a")
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            TextEmbedder(lambda case: case, workload.layout, tmp_path).encode("a")


class TestShapeBuckets:
    def target(self, workload):
        model = workload.build()
        device = DeviceFacts(kind="cpu", name="test")
        return Target(model=model, workload=workload, device=device, properties=workload.properties(model))

    @torch.inference_mode()
    def test_buckets_change_the_calls_and_not_the_answers(self, workload):
        target = self.target(workload)
        technique = ShapeBuckets()
        assert technique.refuse(target) is None
        target.workload = technique.reshape(workload)
        technique.apply(target)
        bucketed = target.workload
        graphs = bucketed.graphs(torch.float32)
        assert 2 <= len(graphs) <= 3
        assert len({graph.name for graph in graphs}) == len(graphs)
        assert sum(g.args[0].numel() for g in graphs) < workload.cases(torch.float32)[0].args[0].numel()
        assert bucketed.cases(torch.float32)[0].args[0].shape == (8, 50)
        shapes = {tuple(graph.args[0].shape) for graph in graphs}
        seen = set()

        def run(case):
            seen.add(tuple(case.args[0].shape))
            return target.model(*case.args)

        reference = workload.observe(run_of(target.model), torch.float32)
        candidate = bucketed.observe(bucketed.front(run, bucketed.describe()), torch.float32)
        torch.testing.assert_close(candidate, reference, rtol=0, atol=1e-5)
        assert bucketed.compare(reference, candidate).drop_high < 1e-6
        assert seen <= shapes
        assert target.coverage[0].kernel.startswith("calls of ")
        assert workload.layout.shapes == ((8, 50),)

    def test_refused_where_nothing_is_ragged(self, folder, tmp_path):
        (tmp_path / "even.txt").write_text(
            " ".join(f"Five words {a} {b} long." for a in "abcdef" for b in "abcdef")
        )
        even = EncoderWorkload(folder, batch=8, eval_text=tmp_path / "even.txt")
        assert "do not differ in length" in str(ShapeBuckets().refuse(self.target(even)))

    def test_refused_where_little_is_saved_or_options_mean_nothing(self, workload):
        assert "under 5% to save" in str(ShapeBuckets(multiple=50).refuse(self.target(workload)))
        assert "at least 2 buckets" in str(ShapeBuckets(count=1).refuse(self.target(workload)))


class TestBadInput:
    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelError, match="there is no model at"):
            EncoderWorkload(tmp_path / "nowhere")

    def test_no_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            EncoderWorkload(tmp_path)

    @pytest.mark.parametrize("option", ["batch", "tokens"])
    def test_options_below_one(self, folder, option):
        with pytest.raises(WorkloadError, match=f"{option}=0.*1 or more"):
            EncoderWorkload(folder, **{option: 0})  # pyright: ignore[reportArgumentType]

    def test_no_evaluation_text(self, folder, tmp_path):
        with pytest.raises(WorkloadError, match=r"is not there.*--eval-text"):
            EncoderWorkload(folder, eval_text=tmp_path / "none.txt")

    def test_evaluation_text_too_short(self, folder, tmp_path):
        (tmp_path / "short.txt").write_text("One sentence is here. Another is there.")
        workload = EncoderWorkload(folder, eval_text=tmp_path / "short.txt")
        with pytest.raises(WorkloadError, match=r"too short\. Found: 1 sentences to judge by and 0 to"):
            workload.cases(torch.float32)

    def test_no_tokenizer(self, tmp_path, text):
        workload = EncoderWorkload(save(encoder(), tmp_path, tokenizer=False), eval_text=text)
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            workload.cases(torch.float32)

    def test_a_pipeline_that_cannot_be_run(self, tmp_path):
        rows = [
            {"path": "", "type": f"sentence_transformers.models.{t}"}
            for t in ("Transformer", "Pooling", "Dense")
        ]
        write_json(tmp_path / "modules.json", rows)
        with pytest.raises(ModelError, match="Transformer → Pooling → Dense"):
            read_pipeline(tmp_path)

    @pytest.mark.parametrize(
        "pooling", [{"pooling_mode_weightedmean_tokens": True}, {}, {"pooling_mode": "weightedmean"}]
    )
    def test_a_pooling_that_cannot_be_run(self, pooling, tmp_path):
        folder = sentence_transformer(tmp_path / "st", encoder(), pooling=pooling)
        with pytest.raises(ModelError, match="mean, cls, max, lasttoken"):
            read_pipeline(folder)

    @pytest.mark.parametrize("content", ["{", '{"a": 1}', "[1]"])
    def test_modules_that_cannot_be_read(self, content, tmp_path):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ModelError, match=r"modules\.json"):
            read_pipeline(tmp_path)

    def test_modules_outside_the_folder(self, tmp_path):
        rows = [{"path": "../..", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
        write_json(tmp_path / "modules.json", rows)
        with pytest.raises(ModelError, match="outside its folder"):
            read_pipeline(tmp_path)

    def test_weights_of_another_model(self, tmp_path, text):
        save(encoder(), tmp_path)
        change_json(tmp_path / "config.json", num_hidden_layers=3)
        with pytest.raises(
            ModelError, match=r"weights in .* are not those of BertModel.*missing.*belong together"
        ):
            EncoderWorkload(tmp_path, eval_text=text).build()

    def test_weights_that_are_no_safetensors(self, tmp_path, text):
        save(encoder(), tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
        with pytest.raises(ModelError, match="transformers cannot load"):
            EncoderWorkload(tmp_path, eval_text=text).build()


@pytest.mark.slow
@torch.inference_mode()
def test_the_real_minilm_knows_what_is_alike():
    folder = minilm()
    workload = EncoderWorkload(folder)
    description = workload.describe()
    assert (description["pooling"], description["normalize"]) == ("mean", True)
    assert description["layout"] == {
        "shapes": [[32, 64]],
        "pad": 0,
        "prompt": "",
        "cut": 256,
        "part": ".",
        "tokenwise": False,
    }
    assert workload._rounds() * 32 >= 256
    model = workload.build()
    texts = [
        "A cat sits on the mat.",
        "A kitten is resting on a rug.",
        "The stock market fell sharply today.",
    ]
    encode = TextEmbedder(run_of(model), workload.bucketed(3, 16).layout, folder).encode  # type: ignore[attr-defined]
    cat, kitten, market = encode(texts)
    assert cat.norm() == pytest.approx(1, abs=1e-5)
    assert cat @ kitten > 0.5 > 0.2 > cat @ market
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids_BT, mask_BT = (part[:4] for part in workload.cases(torch.float32)[0].args)
    expected = torch.nn.functional.normalize(pooled(reference, ids_BT, mask_BT))
    torch.testing.assert_close(model(ids_BT, mask_BT).double(), expected, rtol=0, atol=1e-5)
