"""From names to workloads, from descriptions back to them, and options that a workload does not take."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from folders import causal, encoder, eval_text, image, save, sentence_transformer, write_json
from torchwright.core.errors import ArtifactError, ModelError, WorkloadError
from torchwright.models.speech.workload import SpeechWorkload
from torchwright.workloads import workloads
from torchwright.workloads.detect import from_description, from_target, kind_of
from torchwright.workloads.encoder import EncoderWorkload
from torchwright.workloads.forward import ForwardWorkload
from torchwright.workloads.image import ImageWorkload
from torchwright.workloads.language import LanguageWorkload
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(eval_text(tmp_path_factory.mktemp("text") / "eval.txt"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save(causal("Llama"), root / "llama")
    save(encoder("Bert"), root / "bert")
    save(image("ViT"), root / "vit", tokenizer=False)
    sentence_transformer(root / "st", encoder("Bert"), pooling={"pooling_mode_cls_token": True})
    return root


@pytest.fixture
def factory(own_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import torch\ndef make():\n    return torch.nn.Linear(3, 2), torch.ones(4, 3)\n"
    (tmp_path / "tw_factory.py").write_text(code)
    yield "tw_factory:make"
    sys.modules.pop("tw_factory", None)


class TestFromTarget:
    @pytest.mark.parametrize(
        ("name", "cls"),
        [
            ("llama", LanguageWorkload),
            ("bert", EncoderWorkload),
            ("st", EncoderWorkload),
            ("vit", ImageWorkload),
        ],
    )
    def test_folders_by_their_architecture(self, name, cls, folders):
        workload = from_target(str(folders / name))
        assert type(workload) is cls
        assert workload.describe()["model"] == str(folders / name)

    def test_nothing_is_the_bundled_model(self):
        workload = from_target(None, batch=2, prompt_tokens=32)
        assert isinstance(workload, LanguageWorkload)
        assert (workload.batch, workload.prompt_tokens) == (2, 32)
        assert workload.describe()["model"] == "bundled"

    def test_a_factory(self, factory):
        workload = from_target(factory, batch=None)
        assert isinstance(workload, ModuleWorkload)
        assert workload.describe()["model"] == factory

    def test_options_reach_the_workload_and_none_is_its_default(self, folders, text):
        workload = from_target(
            str(folders / "llama"), batch=3, prompt_tokens=None, new_tokens=5, eval_text=text
        )
        default = LanguageWorkload(folders / "llama")
        assert isinstance(workload, LanguageWorkload)
        assert (workload.batch, workload.new_tokens) == (3, 5)
        assert workload.prompt_tokens == default.prompt_tokens
        assert from_target(str(folders / "bert"), tokens=40).describe()["tokens"] == 40

    @pytest.mark.parametrize(
        ("name", "option", "allowed"),
        [
            ("vit", "prompt_tokens", "batch"),
            ("vit", "eval_text", "batch"),
            ("bert", "new_tokens", "batch, tokens, eval-text"),
            ("llama", "tokens", "batch, prompt-tokens, new-tokens, eval-text"),
        ],
    )
    def test_an_option_of_another_workload(self, name, option, allowed, folders):
        words = rf"option {option.replace('_', '-')} is not for .*{name}.*Allowed: {allowed}"
        with pytest.raises(WorkloadError, match=words):
            from_target(str(folders / name), **{option: 8})

    def test_a_factory_takes_no_options(self, factory):
        with pytest.raises(
            WorkloadError, match=r"option batch is not for tw_factory:make.*its inputs say all"
        ):
            from_target(factory, batch=4)

    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(
            ModelError, match=r"there is no model at.*a Hugging Face folder, a GGUF file, a hub id"
        ):
            from_target(str(tmp_path / "nowhere"))

    def test_a_folder_without_a_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            from_target(str(tmp_path))

    @pytest.mark.parametrize(
        "config",
        [
            {"architectures": ["NoSuchForConditionalGeneration"], "model_type": "no-such"},
            {"architectures": ["BertConfig"], "model_type": "bert"},
            {"architectures": ["__import__('os')"], "model_type": "bert"},
            {"architectures": None},
            {},
        ],
    )
    def test_an_architecture_that_is_not_supported(self, config, tmp_path):
        write_json(tmp_path / "config.json", config)
        with pytest.raises(
            ModelError, match=r"not supported\. Found: .*Allowed: .*ForCausalLM.*Next: .*factory"
        ) as caught:
            from_target(str(tmp_path))
        for _, cls in workloads:
            assert cls.supports in str(caught.value)
        assert (config.get("architectures") or ["no architectures"])[0] in str(caught.value)

    def test_a_path_with_a_colon_is_no_factory(self, tmp_path):
        with pytest.raises(ModelError, match="there is no model at"):
            from_target(str(tmp_path / "a:b"))

    @pytest.mark.parametrize(
        ("config", "cls"),
        [
            ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}, EncoderWorkload),
            ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, EncoderWorkload),
            ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, LanguageWorkload),
            ({"architectures": ["ConvNextForImageClassification"], "model_type": "convnext"}, ImageWorkload),
            ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, ForwardWorkload),
            ({"architectures": ["WhisperModel"], "model_type": "whisper"}, ForwardWorkload),
            ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, SpeechWorkload),
            (
                {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 8},
                ForwardWorkload,
            ),
            ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, LanguageWorkload),
        ],
    )
    def test_kinds(self, config, cls, tmp_path):
        write_json(tmp_path / "config.json", config)
        assert kind_of(tmp_path) is cls


class TestFromDescription:
    @pytest.mark.parametrize("name", ["llama", "bert", "st", "vit"])
    def test_round_trip_through_json(self, name, folders, text):
        options = {"batch": 3} | ({"eval_text": text} if name != "vit" else {})
        workload = from_target(str(folders / name), **options)
        description = json.loads(json.dumps(workload.describe()))
        again = from_description(description, trust=True)
        assert again.describe() == workload.describe()
        for before, after in zip(workload.cases(torch.float32), again.cases(torch.float32), strict=True):
            assert torch.equal(before.args[0], after.args[0])

    @pytest.mark.plain("st", "vit")
    @pytest.mark.parametrize("name", ["llama", "bert", "st", "vit"])
    def test_the_artifacts_own_copy_of_the_folder(self, name, folders, tmp_path):
        workload = from_target(str(folders / name))
        for part, path in workload.files(weights=True).items():
            (tmp_path / "model" / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, tmp_path / "model" / part)
        description = workload.describe() | {"model": "somewhere/that-is-gone"}
        again = from_description(description, tmp_path / "model")
        assert again.describe() == description
        weights, expected = again.build().state_dict(), workload.build().state_dict()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)

    def test_options_replace_what_is_described(self, folders):
        description = from_target(str(folders / "vit"), batch=3).describe()
        assert from_description(description, batch=5, trust=True).describe() == description | {"batch": 5}
        assert from_description(description, batch=None, trust=True).describe() == description
        with pytest.raises(WorkloadError, match="option tokens is not for"):
            from_description(description, tokens=5, trust=True)

    def test_the_bundled_model(self):
        description = from_target(None, prompt_tokens=32).describe()
        assert from_description(description).describe() == description

    def test_a_bucketed_encoder_is_described_with_its_shapes_and_rebuilt_without(self, folders, text):
        workload = EncoderWorkload(folders / "bert", batch=8, tokens=50, eval_text=text)
        bucketed = workload.bucketed(3, 16)
        assert len(bucketed.describe()["layout"]["shapes"]) > 1
        assert from_description(bucketed.describe(), trust=True).describe() == workload.describe()

    def test_a_factory(self, factory):
        workload = from_target(factory)
        assert from_description(workload.describe(), trust=True).describe() == workload.describe()

    def test_a_module_of_a_script_needs_its_owner(self):
        description = ModuleWorkload(torch.nn.Linear(3, 2), torch.ones(4, 3)).describe()
        with pytest.raises(
            ArtifactError, match=r"for Linear.*a file cannot keep its code.*tw\.load\(DIR, model="
        ):
            from_description(description)

    def test_a_metric_of_the_users_own_needs_its_owner(self, factory):
        description = from_target(factory).describe() | {"metric": "f1"}
        with pytest.raises(ArtifactError, match="metric 'f1'"):
            from_description(description)

    @pytest.mark.parametrize(
        ("description", "words"),
        [
            ({"kind": "video", "model": "x"}, "of kind 'video'.*language"),
            ({}, "of kind None"),
            ({"kind": ["language"], "model": "x"}, "of kind"),
            ({"kind": "language"}, "does not say which model"),
            ({"kind": "language", "model": 5}, "does not say which model"),
        ],
    )
    def test_what_is_no_description(self, description, words):
        with pytest.raises(ArtifactError, match=words):
            from_description(description)

    def test_options_of_the_wrong_type(self, folders):
        description = {"kind": "language", "model": "gone", "batch": "many"}
        with pytest.raises(ArtifactError, match="the recipe's workload cannot be read"):
            from_description(description, folders / "llama")

    def test_nothing_that_it_names_is_opened_without_trust(self, folders, factory, text):
        vit = from_target(str(folders / "vit")).describe()
        with pytest.raises(ArtifactError, match=r"a model to open .*vit.*trust=True.*--trust"):
            from_description(vit)
        bert = from_target(str(folders / "bert"), eval_text=text).describe()
        with pytest.raises(ArtifactError, match=r"a text to open .*trust=True"):
            from_description(bert, folders / "bert")
        assert from_description(bert, folders / "bert", eval_text=text).describe() == bert
        with pytest.raises(ArtifactError, match=r"a factory to run .*trust=True"):
            from_description(from_target(factory).describe())
