"""Models of transformers that no other kind takes: outputs as transformers gives them, what is judged and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import torchwright as tw
from folders import VOCABULARY, change_json, eval_text, save
from in_process import trials_in_process
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.records import Budget
from torchwright.models.decoder.seq2seq.workload import Seq2SeqWorkload
from torchwright.models.speech.workload import SpeechWorkload
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.optimize import Request, optimize
from torchwright.workloads import sounds
from torchwright.workloads.detect import kind_of
from torchwright.workloads.forward import ForwardWorkload
from torchwright.workloads.language import LanguageWorkload

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPEECH = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 8, 8),
    "conv_kernel": (10, 8, 8),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
PATCHES = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48}
PAIR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": TEXT | {"num_labels": 5},
    "BertForTokenClassification": TEXT | {"num_labels": 5},
    "BertForQuestionAnswering": TEXT,
    "LlamaForSequenceClassification": TEXT | {"num_labels": 3},
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1},
    "T5ForConditionalGeneration": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
    },
    "WhisperForConditionalGeneration": PAIR | {"num_mel_bins": 16, "max_source_positions": 40},
    "Wav2Vec2ForCTC": SPEECH,
    "CLIPModel": {
        "text_config": TEXT | {"num_hidden_layers": 1},
        "vision_config": PATCHES | {"num_hidden_layers": 1, "num_attention_heads": 4},
        "projection_dim": 16,
    },
    "ViTModel": PATCHES | {"num_hidden_layers": 1, "num_attention_heads": 4},
    "YolosForObjectDetection": PATCHES
    | {"image_size": [32, 32], "num_hidden_layers": 1, "num_attention_heads": 4, "num_detection_tokens": 5},
}
INPUTS = {
    "Wav2Vec2ForCTC": ["input_values"],
    "WhisperForConditionalGeneration": ["input_features", "decoder_input_ids"],
    "T5ForConditionalGeneration": ["input_ids", "attention_mask", "decoder_input_ids"],
    "CLIPModel": ["pixel_values", "input_ids", "attention_mask"],
    "ViTModel": ["pixel_values"],
    "YolosForObjectDetection": ["pixel_values"],
}
METRICS = {
    "CLIPModel": "cosine to the original",
    "ViTModel": "cosine to the original",
    "YolosForObjectDetection": "relative error",
}


def made(name: str, folder: Path, **overrides: Any) -> Path:
    """A tiny model of this architecture with random weights, and a tokenizer."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MODELS[name] | overrides)).eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in key:
            parameter.data.mul_(4)
    return save(model, folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eval_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module", params=list(MODELS))
def workload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> Any:
    folder = made(request.param, tmp_path_factory.mktemp("model"))
    own = {"WhisperForConditionalGeneration": SpeechWorkload, "T5ForConditionalGeneration": Seq2SeqWorkload}
    assert kind_of(folder) is own.get(request.param, ForwardWorkload)
    return ForwardWorkload(folder, batch=3, eval_text=text)


def run_of(model: Any) -> Any:
    return lambda case: model(*case.args, **case.kwargs)


@pytest.mark.plain("BertForQuestionAnswering")
@torch.inference_mode()
def test_outputs_are_those_of_transformers_in_one_graph(workload: ForwardWorkload) -> None:
    (case,) = workload.cases(torch.float32)
    segments = ["token_type_ids"] if workload.architecture.startswith("Bert") else []
    assert list(case.kwargs) == INPUTS.get(workload.architecture, ["input_ids", "attention_mask", *segments])
    assert {len(value) for value in case.kwargs.values()} == {3}
    model = workload.build()
    plain = getattr(transformers, workload.architecture).from_pretrained(workload.folder).eval()
    wanted, found = plain(**case.kwargs), model(**case.kwargs)
    assert found
    for name in found:  # not to the bit: some libraries' sums depend on where in memory the weights lie
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(found[name], wanted[name], rtol=0.0, atol=1e-6 * largest)
    graph = export(model, [case])["forward"].module()
    for name, value in graph(**case.kwargs).items():
        torch.testing.assert_close(value, found[name])


@pytest.mark.plain("ViTModel")
@torch.inference_mode()
def test_what_is_judged(workload: ForwardWorkload) -> None:
    model = workload.build()
    seen = workload.observe(run_of(model), torch.float32)
    same = workload.compare(seen, seen)
    assert same.metric == METRICS.get(workload.architecture, "top-1 agreement")
    assert same.drop == pytest.approx(0, abs=1e-9)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
    other = workload.compare(seen, workload.observe(run_of(model), torch.float32))
    # The few answers of random weights may all stay the same while what they are chosen from differs.
    assert max(other.drop, other.extras.get("relative_error", 0.0)) > 1e-3


@pytest.mark.plain("ViTModel")
def test_calibration_is_not_the_sample(workload: ForwardWorkload) -> None:
    sample = [workload._case(i).kwargs for i in range(workload._rounds())]  # pyright: ignore[reportPrivateUsage]
    for case in workload.calibration(torch.float32):
        assert not any(
            all(torch.equal(case.kwargs[name], inputs[name]) for name in inputs) for inputs in sample
        )


@pytest.mark.plain("YolosForObjectDetection")
def test_what_was_chosen_is_judged_by_other_data(workload: ForwardWorkload) -> None:
    last = workload.unseen()
    if last is None:
        assert workload.reader.batches is not None
        assert workload.reader.batches < 4
        return
    sample = [workload._case(i).kwargs for i in range(workload._rounds())]  # pyright: ignore[reportPrivateUsage]
    for index in (last.sample[0], last.sample[-1]):
        other = last._case(index).kwargs  # pyright: ignore[reportPrivateUsage]
        assert not any(all(torch.equal(other[name], inputs[name]) for name in inputs) for inputs in sample)


@pytest.mark.parametrize(
    ("count", "there", "seen", "held_out"),
    [
        (4, None, [0, 1, 2, 3, *range(20, 32)], [*range(4, 8), *range(8, 20)]),
        (4, 15, [0, 1, 2, 3, 11, 12, 13], [4, 5, 6, 7, 8, 9, 10]),
        (4, 10, [0, 1, 2, 3, 9], [4, 5, 6, 7, 8]),
        (8, 19, None, None),
        (4, 9, None, None),
    ],
)
def test_more_of_the_data_stay_apart_from_what_is_held_out(
    count: int, there: int | None, seen: list[int] | None, held_out: list[int] | None
) -> None:
    class Counted(ForwardWorkload):
        def __init__(self) -> None:
            pass

        def sampled(self) -> tuple[int, int | None]:
            return count, there

    workload = Counted()
    last = workload.unseen()
    further = [each and each.further() for each in (workload, last)]
    assert [each and list(each.sample) for each in further] == [seen, held_out]


def test_what_stands_for_padding_is_not_judged(tmp_path: Path, text: Path) -> None:
    workload = ForwardWorkload(made("BertForTokenClassification", tmp_path), batch=4, eval_text=text)
    model = workload.build()

    def poisoned(case: Any) -> Any:
        output = model(**case.kwargs)
        padding_BT = case.kwargs["attention_mask"] == 0
        assert padding_BT.any()
        return {"logits": output["logits"].masked_fill(padding_BT[..., None], torch.nan)}

    with torch.inference_mode():
        wanted = workload.observe(run_of(model), torch.float32)
        assert workload.compare(wanted, workload.observe(poisoned, torch.float32)).drop == 0


def test_a_decoder_reads_what_comes_before(tmp_path: Path, text: Path) -> None:
    folder = made("T5ForConditionalGeneration", tmp_path, decoder_start_token_id=7)
    inputs = ForwardWorkload(folder, batch=2, eval_text=text).cases(torch.float32)[0].kwargs
    assert inputs["decoder_input_ids"][:, 0].tolist() == [7, 7]
    assert torch.equal(inputs["decoder_input_ids"][:, 1:], inputs["input_ids"][:, :-1])


@torch.inference_mode()
def test_one_number_is_no_choice(tmp_path: Path, text: Path) -> None:
    """A reranker's only logit would agree with anything."""
    folder = made("BertForSequenceClassification", tmp_path, num_labels=1)
    workload = ForwardWorkload(folder, batch=4, eval_text=text)
    seen = workload.observe(run_of(workload.build()), torch.float32)
    found = workload.compare(seen, {"logits": seen["logits"] * 1.1})
    assert (found.metric, found.drop) == ("relative error", pytest.approx(0.1, rel=1e-4))


@pytest.mark.slow
@torch.inference_mode()
def test_outputs_that_its_name_does_not_promise_are_all_compared(tmp_path: Path, text: Path) -> None:
    workload = ForwardWorkload(made("ViTModel", tmp_path), batch=2)
    seen = workload.observe(
        lambda case: {"maps": case.kwargs["pixel_values"], "count": torch.tensor(3)}, torch.float32
    )
    worse = [seen[0] * 1.2, *seen[1:]]
    assert (workload.compare(seen, worse).metric, workload.compare(seen, seen).drop) == ("relative error", 0)
    assert workload.compare(seen, worse).drop == pytest.approx(0.2, rel=1e-4)


def test_the_sample_is_cut_to_what_memory_and_time_allow(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = ForwardWorkload(made("BertForTokenClassification", tmp_path), batch=4, eval_text=text)
    calls = []

    def run(case: Any) -> Any:
        calls.append(case)
        return {"logits": torch.zeros(*case.kwargs["input_ids"].shape, 5)}

    workload.observe(run, torch.float32)
    assert len(calls) > 2
    for name, value in (("SAMPLE_BYTES", 1), ("SAMPLE_OPERATIONS", 1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(f"torchwright.workloads.forward.{name}", value)
            calls.clear()
            workload.observe(run, torch.float32)
            assert len(calls) == 2


def test_texts_end_where_the_model_does(tmp_path: Path, text: Path) -> None:
    workload = ForwardWorkload(
        made("BertForTokenClassification", tmp_path, max_position_embeddings=20),
        batch=2,
        tokens=64,
        eval_text=text,
    )
    assert workload.cases(torch.float32)[0].kwargs["input_ids"].shape == (2, 20)
    assert workload.describe()["tokens"] == 20


@pytest.mark.parametrize("option", ["batch", "tokens"])
def test_none_of_them_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=f"{option}=0"):
        ForwardWorkload(tmp_path, **{option: 0})


def test_what_nobody_knows_how_to_feed(tmp_path: Path) -> None:
    config = transformers.Speech2TextConfig()
    config.architectures = ["Speech2TextForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", num_mel_bins=None)
    with pytest.raises(ModelError, match=r"Speech2Text.* reads.*input_features.*factory"):
        ForwardWorkload(tmp_path)


def test_gpt2_is_a_language_model_and_mamba_has_no_cache_to_fill(tmp_path: Path, text: Path) -> None:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    folder = save(transformers.GPT2LMHeadModel(config), tmp_path / "gpt2")
    assert kind_of(folder) is LanguageWorkload
    workload = LanguageWorkload(folder, prompt_tokens=16, new_tokens=4, eval_text=text)
    assert (workload.geometry.layers, workload.geometry.head_dim, workload.geometry.context) == (2, 8, 128)
    model = workload.build()
    with torch.inference_mode():
        workload.check_adapted(model, workload.adapt(model))


@pytest.mark.slow
def test_an_artifact_answers_by_the_names_of_transformers(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials_in_process(monkeypatch, 2.0, tried=("dtype",), cache=tmp_path / "cache")
    workload = ForwardWorkload(
        made("LlamaForSequenceClassification", tmp_path / "model"), batch=4, eval_text=text
    )
    out = tmp_path / "out"
    budget = Budget(max_drop=0.5, objective="latency", time_seconds=60.0)
    optimize(Request(workload=workload, budget=budget, device="cpu"), out, lambda event: None)
    inputs = workload.cases(torch.float32)[0].kwargs
    with torch.inference_mode():
        wanted = workload.build()(**inputs)["logits"]
    loaded = tw.load(out)
    assert isinstance(loaded.model(**inputs), dict)
    torch.testing.assert_close(loaded.model(**inputs)["logits"], wanted, rtol=0.1, atol=0.1)


def test_sounds_are_the_same_for_equal_seeds_and_not_flat() -> None:
    wave_T = sounds.wave(3, 0.5)
    assert wave_T.shape == (8000,)
    assert torch.equal(wave_T, sounds.wave(3, 0.5))
    assert not torch.equal(wave_T, sounds.wave(4, 0.5))
    assert (wave_T.mean().item(), wave_T.std().item()) == pytest.approx((0, 1), abs=1e-4)
    bands = sounds.spectrogram(0, 16, 40)
    assert bands.shape == (16, 40)
    assert -1 <= bands.min() < bands.max() <= 1
