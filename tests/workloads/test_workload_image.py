"""Image classifiers: logits as transformers gives them, made-up pictures, sizes and normalisation of the folder."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch
import transformers

from folders import change_json, image, save, write_json
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.optimization.engines.compiled.program import export
from torchwright.workloads.image import ImageWorkload
from torchwright.workloads.pictures import picture


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save(image("ViT"), tmp_path_factory.mktemp("vit"), tokenizer=False)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    folder = save(image("ResNet"), tmp_path_factory.mktemp("resnet"), tokenizer=False)
    processor = {"crop_size": {"height": 40, "width": 48}, "size": {"shortest_edge": 64}}
    write_json(
        folder / "preprocessor_config.json",
        processor | {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    )
    return folder


def run_of(model):
    return lambda case: model(*case.args, **case.kwargs)


@torch.inference_mode()
def test_logits_are_those_of_transformers(vit):
    workload = ImageWorkload(vit, batch=4)
    (case,) = workload.cases(torch.float32)
    model = workload.build()
    plain = transformers.AutoModelForImageClassification.from_pretrained(vit, dtype=torch.float32).eval()
    assert case.args[0].shape == (4, 3, 32, 32)
    assert torch.equal(model(*case.args), plain(pixel_values=case.args[0]).logits)
    assert model(*case.args).shape == (4, 7)
    assert not any(module.training for module in model.modules())


@pytest.mark.plain("vit")
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_exports_as_one_graph(kind, request):
    workload = ImageWorkload(request.getfixturevalue(kind), batch=2)
    cases, model = workload.cases(torch.float32), workload.build()
    program = export(model, cases)["classify"]
    torch.testing.assert_close(program.module()(*cases[0].args), model(*cases[0].args))


def test_size_and_normalisation_of_the_preprocessor(resnet):
    workload = ImageWorkload(resnet, batch=4)
    images_BCHW = workload.cases(torch.float32)[0].args[0]
    assert images_BCHW.shape == (4, 3, 40, 48)
    raw_CHW = picture(0, (3, 40, 48))
    for channel, (mean, std) in enumerate([(0.4, 0.2), (0.5, 0.3), (0.6, 0.4)]):
        torch.testing.assert_close(images_BCHW[0, channel], (raw_CHW[channel] - mean) / std)


def test_without_a_preprocessor_half_and_half(vit):
    image_CHW = ImageWorkload(vit, batch=1).cases(torch.float32)[0].args[0][0]
    torch.testing.assert_close(image_CHW, (picture(0, (3, 32, 32)) - 0.5) / 0.5)


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": {"height": 24, "width": 32}}, (24, 32)),
        ({"size": 28}, (28, 28)),
        ({"size": {"shortest_edge": 36}}, (36, 36)),
        ({"size": {"shortest_edge": 36}, "crop_size": 32, "do_center_crop": False}, (36, 36)),
        ({"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}, (32, 32)),
    ],
)
def test_sizes_of_preprocessors(processor, size, tmp_path):
    write_json(tmp_path / "config.json", {"architectures": ["ResNetForImageClassification"]})
    write_json(tmp_path / "preprocessor_config.json", processor)
    workload = ImageWorkload(tmp_path)
    assert (workload.pictures.height, workload.pictures.width) == size


def test_one_channel(tmp_path):
    folder = save(image("ViT", num_channels=1), tmp_path, tokenizer=False)
    workload = ImageWorkload(folder, batch=2)
    assert workload.build()(*workload.cases(torch.float32)[0].args).shape == (2, 7)


class TestPictures:
    def test_equal_seeds_give_equal_pictures_and_others_differ(self):
        assert torch.equal(picture(3, (3, 40, 56)), picture(3, (3, 40, 56)))
        assert not torch.equal(picture(3, (3, 40, 56)), picture(4, (3, 40, 56)))

    def test_values_and_shape(self):
        for seed in range(5):
            one = picture(seed, (3, 50, 70))
            assert one.shape == (3, 50, 70)
            assert 0 <= one.min() < one.max() <= 1
            assert one.std() > 0.02

    def test_neighbours_are_alike_as_in_photographs(self):
        pictures = torch.stack([picture(seed, (3, 64, 64)) for seed in range(8)])
        steps = (pictures[..., 1:] - pictures[..., :-1]).abs()
        assert steps.mean() < 0.25 * pictures.std()
        assert steps.amax(dim=(1, 2, 3)).min() > 0.05  # and there are edges

    def test_no_global_random_state_is_touched(self):
        before = torch.random.get_rng_state()
        picture(0, (3, 16, 16))
        assert torch.equal(before, torch.random.get_rng_state())


class TestSample:
    def test_observe_calls_nothing_but_the_shape_that_is_timed(self, vit):
        workload = ImageWorkload(vit, batch=8)
        seen = []

        def run(case):
            seen.append(case.args[0])
            return torch.ones(8, 7)

        observed = workload.observe(run, torch.float32)
        assert {tuple(images.shape) for images in seen} == {(8, 3, 32, 32)}
        assert len(observed) == 512
        flat = torch.cat(seen).flatten(1)
        assert len(flat.unique(dim=0)) == 512
        calibration = torch.cat([case.args[0] for case in workload.calibration(torch.float32)]).flatten(1)
        assert len(torch.cat([flat, calibration]).unique(dim=0)) == 512 + len(calibration)

    def test_what_was_chosen_is_judged_by_other_pictures(self, vit):
        workload = ImageWorkload(vit, batch=8)
        last = workload.unseen()
        assert last is not None
        found = [last, workload]
        sums = [[], []]
        for one, seen in zip(found, sums, strict=True):
            one.observe(lambda case, seen=seen: seen.append(case.args[0]) or torch.ones(8, 7), torch.float32)
        apart, chosen = (torch.cat(seen).flatten(1) for seen in sums)
        assert len(apart) == len(chosen)
        assert len(torch.cat([apart, chosen]).unique(dim=0)) == 2 * len(chosen)

    def test_large_models_are_judged_on_fewer(self, vit):
        workload = ImageWorkload(vit, batch=8)
        before, workload.sample_operations = workload._rounds(), 1.0
        assert workload._rounds() == 2 < before

    @torch.inference_mode()
    def test_agreement_with_itself_and_with_a_changed_model(self, vit):
        workload = ImageWorkload(vit, batch=16)
        model: Any = workload.build()
        other: Any = workload.build()
        other.model.classifier.weight.data.mul_(-1)
        reference = workload.observe(run_of(model), torch.float32)
        assert workload.compare(reference, reference).drop_high == 0
        quality = workload.compare(reference, workload.observe(run_of(other), torch.float32))
        assert quality.drop > 0.3
        assert quality.metric == "top-1 agreement"
        assert quality.extras["relative_error"] > 0.1

    def test_the_same_images_in_another_process(self, vit):
        workload = ImageWorkload(vit, batch=2)
        other = cloudpickle.loads(cloudpickle.dumps(workload))
        assert torch.equal(other.cases(torch.float32)[0].args[0], workload.cases(torch.float32)[0].args[0])


class TestBadInput:
    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelError, match="there is no model at"):
            ImageWorkload(tmp_path / "nowhere")

    def test_no_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            ImageWorkload(tmp_path)

    @pytest.mark.parametrize("text", ["{", "\xff", "[]"])
    def test_a_config_that_is_none(self, text, tmp_path):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"is not (JSON|a JSON object)"):
            ImageWorkload(tmp_path)

    def test_no_size(self, tmp_path):
        write_json(tmp_path / "config.json", {})
        with pytest.raises(ModelError, match=r"how large its images are.*crop_size"):
            ImageWorkload(tmp_path)

    def test_a_batch_below_one(self, vit):
        with pytest.raises(WorkloadError, match=r"batch=0.*1 or more"):
            ImageWorkload(vit, batch=0)

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_preprocessor_that_is_none(self, text, tmp_path):
        write_json(tmp_path / "config.json", {"image_size": 32})
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"is not (JSON|a JSON object)"):
            ImageWorkload(tmp_path)

    def test_a_preprocessor_of_another_model(self, tmp_path):
        write_json(tmp_path / "config.json", {"image_size": 32, "num_channels": 1})
        write_json(tmp_path / "preprocessor_config.json", {"image_mean": [0.1] * 3, "image_std": [0.1] * 3})
        with pytest.raises(ModelError, match="3 means and 3 deviations for 1 channels"):
            ImageWorkload(tmp_path)

    def test_weights_of_another_model(self, tmp_path):
        save(image("ViT"), tmp_path, tokenizer=False)
        change_json(tmp_path / "config.json", num_hidden_layers=3)
        with pytest.raises(ModelError, match="are not those of ViTForImageClassification"):
            ImageWorkload(tmp_path).build()

    def test_no_weights(self, tmp_path):
        save(image("ViT"), tmp_path, tokenizer=False)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="transformers cannot load"):
            ImageWorkload(tmp_path).build()
