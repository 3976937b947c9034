"""Language models: the fixed-cache form against transformers, the metric against its definition, bad input."""

from __future__ import annotations

import math
from typing import Any

import cloudpickle
import pytest
import torch

from folders import VOCABULARY, causal, change_json, eval_text, save
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.optimization.engines.compiled.program import export
from torchwright.workloads.language import DECODE_STEPS, LanguageWorkload
from torchwright.workloads.texts import BUNDLED

SIZES = {"batch": 2, "prompt_tokens": 24, "new_tokens": 10}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return eval_text(tmp_path_factory.mktemp("text") / "eval.txt")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(causal("Llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def workload(llama, text):
    return LanguageWorkload(llama, eval_text=text, **SIZES)


def run_of(model):
    return lambda case: model(*case.args, **case.kwargs)


class TestCalls:
    def test_prefill_once_and_decode_for_every_new_token(self, workload):
        prefill, decode = workload.cases(torch.bfloat16)
        assert [(case.name, case.repeat, case.fixed) for case in (prefill, decode)] == [
            ("prefill", 1, True),
            ("decode", 10, True),
        ]
        assert prefill.args[0].shape == (2, 24)
        assert decode.args[0].shape == (2, 1)
        assert {tensor.dtype for tensor in prefill.args[-1]} == {torch.bfloat16}
        assert workload.geometry.slots == 64

    @torch.inference_mode()
    @pytest.mark.parametrize(
        "kind",
        [("Llama", {}), ("Mistral", {"sliding_window": 9}), ("Qwen2", {}), ("Gemma2", {"head_dim": 8})],
    )
    def test_prefill_and_decode_give_transformers_own_logits(self, kind, tmp_path, text):
        name, overrides = kind
        workload = LanguageWorkload(save(causal(name, **overrides), tmp_path), eval_text=text, **SIZES)
        original = workload.build()
        adapted = workload.adapt(original)
        workload.check_adapted(original, adapted)
        prefill, decode = workload.cases(torch.float32)
        cache = prefill.args[-1]
        adapted(*prefill.args)
        got = adapted(*decode.args[:-1], cache)
        ids = torch.cat([prefill.args[0], decode.args[0]], 1)
        torch.testing.assert_close(got[:, 0], original(ids).logits[:, -1], rtol=1e-4, atol=1e-4)

    @torch.inference_mode()
    @pytest.mark.parametrize(
        "kind", [("Llama", {}), ("Mistral", {"sliding_window": 9}), ("Mistral", {"sliding_window": 60})]
    )
    def test_the_original_can_be_called_again_and_again(self, kind, tmp_path, text):
        """Also where a sliding window is full: transformers' cache winds it back only when told beforehand."""
        name, overrides = kind
        workload = LanguageWorkload(save(causal(name, **overrides), tmp_path), eval_text=text, **SIZES)
        original = workload.build()
        run = workload.original_run(original)
        prefill, decode = workload.cases(torch.float32)
        ids = torch.cat([prefill.args[0], decode.args[0]], 1)
        expected = original(ids).logits[:, -1:]
        for _ in range(3):
            run(prefill)
            torch.testing.assert_close(run(decode), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    @torch.inference_mode()
    def test_exports_with_any_number_of_kept_logits(self, workload):
        adapted = workload.adapt(workload.build())
        cases = workload.cases(torch.float32)
        programs = export(adapted, cases)
        assert list(programs) == ["prefill", "decode"]
        got = programs["prefill"].module()(*cases[0].args)
        torch.testing.assert_close(got, adapted(*workload.cases(torch.float32)[0].args), rtol=1e-4, atol=1e-4)

    def test_travels_by_cloudpickle(self, workload):
        other = cloudpickle.loads(cloudpickle.dumps(workload))
        assert torch.equal(other.cases(torch.float32)[0].args[0], workload.cases(torch.float32)[0].args[0])

    @torch.inference_mode()
    def test_a_form_that_computes_something_else_is_found_out(self, workload):
        original, other = workload.build(), workload.build()
        other.lm_head.weight.data.mul_(1.1)
        with pytest.raises(
            ModelError, match=r"LlamaForCausalLM does not work with a fixed-size.*logits differ by"
        ):
            workload.check_adapted(original, workload.adapt(other))


def test_batches_that_do_not_lie_together_are_observed_as_each_alone(workload):
    run = run_of(workload.adapt(workload.build()))
    with torch.inference_mode():
        both, *each = (
            workload.judged_by(sample).observe(run, torch.float32)["nll"] for sample in ([0, 2], [0], [2])
        )
    assert torch.equal(both, torch.cat(each))


class TestMetric:
    @torch.inference_mode()
    def test_perplexity_is_that_of_transformers_in_float64(self, workload):
        model = workload.build()
        observed = workload.observe(run_of(workload.adapt(model)), torch.float32)
        span = workload.prompt_tokens + DECODE_STEPS + 1
        count = len(observed["nll"]) // (span - 1)
        ids_NT = workload._tokens(count * span).view(count, span)
        logp = torch.log_softmax(model(ids_NT).logits.double(), -1)[:, :-1]
        nll = -logp.gather(-1, ids_NT[:, 1:, None]).flatten()
        torch.testing.assert_close(observed["nll"].double(), nll, rtol=1e-4, atol=1e-4)
        quality = workload.compare(observed, observed)
        assert quality.metric == "perplexity"
        assert quality.reference == pytest.approx(math.exp(nll.mean()), rel=1e-4)
        assert (quality.drop, quality.drop_high) == (0, 0)
        assert quality.extras == {"kl_divergence": 0, "top1_agreement": 1}

    @pytest.mark.slow
    @torch.inference_mode()
    def test_kl_divergence_and_agreement_of_a_changed_model(self, workload):
        model, other = workload.build(), workload.build()
        for parameter in other.parameters():
            parameter.data.add_(
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
        before = workload.observe(run_of(workload.adapt(model)), torch.float32)
        after = workload.observe(run_of(workload.adapt(other)), torch.float32)
        quality = workload.compare(before, after)
        p, q = before["log_probabilities"].double(), after["log_probabilities"].double()
        assert quality.extras["kl_divergence"] == pytest.approx(
            (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3
        )
        assert quality.extras["top1_agreement"] == pytest.approx(
            (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        )
        growth = math.exp((after["nll"].double() - before["nll"].double()).mean()) - 1
        assert quality.drop == pytest.approx(growth)
        assert quality.drop_high > quality.drop

    def test_tokens_that_the_model_rules_out_do_not_spoil_the_divergence(self, workload):
        windows = 2 * (workload.prompt_tokens + DECODE_STEPS)
        logp = torch.tensor([[0.0, -math.inf], [math.log(0.5), math.log(0.5)]]).half().repeat(windows // 2, 1)
        observed = {"log_probabilities": logp, "nll": torch.ones(windows)}
        assert workload.compare(observed, observed).extras["kl_divergence"] == 0

    def test_nan_is_refused(self, workload):
        good = {"log_probabilities": torch.zeros(4, 3).half(), "nll": torch.ones(4)}
        bad = good | {"nll": torch.full((4,), math.nan)}
        with pytest.raises(WorkloadError, match="the perplexity is not finite"):
            workload.compare(good, bad)

    def test_large_vocabularies_are_judged_on_fewer_tokens(self, workload):
        workload.reference_bytes = 1
        calls = []

        def run(case):
            calls.append(case.name)
            return torch.zeros(2, len(case.args[3]), VOCABULARY)

        observed = workload.observe(run, torch.float32)
        assert calls.count("prefill") == 2
        assert len(observed["nll"]) == 2 * 2 * (24 + DECODE_STEPS)

    def test_what_was_chosen_is_judged_by_other_text(self, workload):
        def seen(one):
            rows = []

            def run(case):
                rows.extend(case.args[0].tolist())
                return torch.zeros(2, len(case.args[3]), VOCABULARY)

            observed = one.observe(run, torch.float32)
            return {tuple(row) for row in rows if len(row) > 1}, len(observed["nll"])

        (chosen, many), (last, others) = seen(workload), seen(workload.unseen())
        assert many == others > 0
        assert not chosen & last

    def test_calibration_covers_both_calls(self, workload):
        names = [case.name for case in workload.calibration(torch.float32)]
        assert names == ["prefill"] * 4 + ["decode"]

    def test_calibration_reads_nothing_that_is_evaluated(self, workload, text):
        prompts = [workload.cases(torch.float32)[0].args[0]]

        def run(case):
            if case.name == "prefill":
                prompts.append(case.args[0])
            return torch.zeros(2, len(case.args[3]), VOCABULARY)

        workload.observe(run, torch.float32)
        spell, written = open_tokenizer(workload.folder).decode, text.read_text()

        def places(batches):
            starts = [written.index(spell(row)) for ids_BT in batches for row in ids_BT.tolist()]
            return {start + i for start in starts for i in range(24)}

        kept = [case.args[0] for case in workload.calibration(torch.float32) if case.name == "prefill"]
        assert len(places(kept)) == 4 * 2 * 24
        assert not places(kept) & places(prompts)

    @pytest.mark.parametrize(("batch", "prompt_tokens"), [(1, 128), (32, 128), (32, 512)])
    def test_the_bundled_model_calibrates_on_the_text_that_is_kept_for_it(self, batch, prompt_tokens):
        workload = LanguageWorkload(batch=batch, prompt_tokens=prompt_tokens)
        kept, spell = (BUNDLED / "calibration.txt").read_text(), open_tokenizer(BUNDLED).decode
        *prefills, decode = workload.calibration(torch.float32)
        assert {case.args[0].shape for case in prefills} == {(batch, prompt_tokens)}
        assert all(spell(row) in kept for case in prefills for row in case.args[0].tolist())
        assert torch.equal(decode.args[0], prefills[0].args[0][:, :1])

    def test_a_text_too_short_for_calibration_is_refused_at_once(self, llama, tmp_path):
        text = eval_text(tmp_path / "text.txt", count=16)
        workload = LanguageWorkload(llama, eval_text=text, batch=1, prompt_tokens=120, new_tokens=4)
        with pytest.raises(
            WorkloadError, match=r"too short\. Found: 4\d\d tokens to judge by and 1\d\d to calibrate"
        ):
            workload.cases(torch.float32)


class TestGeometry:
    def test_of_a_folder(self, workload):
        geometry = workload.geometry
        assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (2, 2, 8)
        assert (geometry.vocabulary, geometry.context) == (VOCABULARY, 256)
        assert (geometry.windows, geometry.eos, geometry.bos) == ((0,), (2,), 1)

    def test_end_of_text_ids_of_the_generation_config_count_too(self, tmp_path, text):
        folder = save(causal("Llama"), tmp_path)
        change_json(folder / "generation_config.json", eos_token_id=[2, 7])
        assert LanguageWorkload(folder, eval_text=text).geometry.eos == (2, 7)

    @pytest.mark.parametrize(
        ("kind", "overrides", "windows"),
        [
            ("Mistral", {"sliding_window": 9}, (9,)),
            ("Mistral", {"sliding_window": None}, (0,)),
            ("Qwen2", {"sliding_window": 9}, (0,)),
            ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9)),
        ],
    )
    def test_windows(self, kind, overrides, windows, tmp_path, text):
        folder = save(causal(kind, **overrides), tmp_path)
        assert LanguageWorkload(folder, eval_text=text, **SIZES).geometry.windows == windows


class TestBadInput:
    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelError, match=r"there is no model at.*the bundled one"):
            LanguageWorkload(tmp_path / "nowhere")

    def test_no_config(self, tmp_path):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(ModelError, match=r"has no config\.json\. Found: notes\.txt"):
            LanguageWorkload(tmp_path)

    def test_a_file(self, tmp_path):
        (tmp_path / "model.bin").touch()
        with pytest.raises(ModelError, match=r"has no config\.json\. Found: a file"):
            LanguageWorkload(tmp_path / "model.bin")

    @pytest.mark.parametrize("fields", [{"vocab_size": None}, {"is_encoder_decoder": True}])
    def test_what_is_no_decoder(self, fields, tmp_path):
        change_json(save(causal("Llama"), tmp_path) / "config.json", **fields)
        with pytest.raises(
            ModelError, match=r"is not a decoder-only language model\. Found: LlamaForCausalLM"
        ):
            LanguageWorkload(tmp_path)

    @pytest.mark.parametrize("option", ["batch", "prompt_tokens", "new_tokens"])
    def test_options_below_one(self, llama, text, option):
        with pytest.raises(WorkloadError, match=rf"--{option.replace('_', '-')} 0.*1 or more"):
            LanguageWorkload(llama, eval_text=text, **{option: 0})

    def test_more_tokens_than_the_context(self, llama, text):
        with pytest.raises(
            WorkloadError, match=r"250 prompt tokens and 64 new ones exceed.*256 tokens together"
        ):
            LanguageWorkload(llama, eval_text=text, prompt_tokens=250)

    def test_no_evaluation_text(self, llama, tmp_path):
        with pytest.raises(
            WorkloadError, match=r"evaluation text .*none\.txt is not there.*--eval-text FILE"
        ):
            LanguageWorkload(llama, eval_text=tmp_path / "none.txt")

    def test_evaluation_text_too_short(self, llama, tmp_path):
        (tmp_path / "short.txt").write_text("Too short.")
        workload = LanguageWorkload(llama, eval_text=tmp_path / "short.txt")
        with pytest.raises(
            WorkloadError,
            match=r"too short\. Found: 8 tokens to judge by and 2 to calibrate with\. Allowed: at least 128 and 128",
        ):
            workload.cases(torch.float32)

    def test_no_tokenizer(self, tmp_path, text):
        workload = LanguageWorkload(save(causal("Llama"), tmp_path, tokenizer=False), eval_text=text)
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            workload.cases(torch.float32)

    def test_weights_of_another_model(self, tmp_path, text):
        change_json(save(causal("Llama"), tmp_path) / "config.json", num_hidden_layers=3)
        with pytest.raises(
            ModelError, match=r"are not those of LlamaForCausalLM.*missing, such as model\.layers\.2"
        ):
            LanguageWorkload(tmp_path, eval_text=text).build()

    def test_sizes_of_another_model(self, tmp_path, text):
        change_json(save(causal("Llama"), tmp_path) / "config.json", intermediate_size=64)
        with pytest.raises(ModelError, match="transformers cannot load"):
            LanguageWorkload(tmp_path, eval_text=text).build()

    def test_tied_weights_are_not_missing(self, tmp_path, text):
        folder = save(causal("Llama", tie_word_embeddings=True), tmp_path)
        model: Any = LanguageWorkload(folder, eval_text=text).build()
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
