"""The model zoo: name of an architecture → its kind, its cut, and a factory of (module, example inputs).

Sizes are those that transformers, torchvision and timm publish as defaults (those of the base checkpoint). Where a
model would not fit next to its copies its depth is cut, and the row says so. Weights are random: layer scales that
training begins near zero are half, so that no block is idle, and batch norms have the statistics of the example.
Nothing is downloaded, nothing of Torchwright imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.models.outside import settle
from benchmarks.models.timm_import import import_timm

Inputs = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
BATCH, OTHER_BATCH, TOKENS = 2, 3, 64
"""Batch sizes of the search's calls and of those that the artifact is tried on, tokens of a sequence."""
INPUTS = 4
"""Calls that a search is given: one calibrates, two judge, and one judges what was chosen."""
CLASSES = 1000
"""Classes of image classifiers as published. The configurations say 2, of which no loss is certain."""
LATENT = 64
"""Latent pixels of a side of a denoiser's picture."""
IDLE = 0.01
"""Layer scales up to this begin near zero."""
# fmt: off
SCALES = (
    "layer_scale", "layer_scale_parameter", "lambda_1", "lambda_2", "lambda1", "gamma_1", "gamma_2", "gamma1",
    "gamma2", "gamma", "skipinit_gain",
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture."""

    kind: str
    """Text, decoder, sequence to sequence, vision, detection, audio, two towers, series, timm, denoiser."""
    make: Callable[..., tuple[nn.Module, Inputs]]
    """Batch size, and fields of its configuration by name → a module with random weights and inputs."""
    cut: str = ""
    """The part that is smaller than published."""


TIMM = "timm."
"""Prefix of timm's names, of which torchvision has some, too."""
MODELS: dict[str, Entry] = {}


def make(
    name: str, batch: int = BATCH, *, weights: int = 0, inputs: int = 0, **fields: Any
) -> tuple[nn.Module, Inputs]:
    """Return a module for inference and inputs of a batch: equal for equal seeds, in every process.

    `fields` replace those of its configuration.
    """
    torch.manual_seed(weights)
    model, example = MODELS[name].make(BATCH, **fields)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.rpartition(".")[2] in SCALES and parameter.abs().max() <= IDLE:
                parameter.fill_(0.5)
            # timm begins with the last norm of a block, and some heads, at zero.
            elif key.endswith("weight") and not parameter.any():
                parameter.fill_(0.5) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    settle(model, example)
    if (batch, inputs) == (BATCH, 0):
        return model, example
    torch.manual_seed(1 + inputs)
    return model, MODELS[name].make(batch, **fields)[1]


def make_several(name: str, **fields: Any) -> tuple[nn.Module, list[Inputs]]:
    """Return the same module and INPUTS calls of BATCH, of which the first are those of `make`."""
    model, example = make(name, **fields)
    torch.manual_seed(2)
    _, rest = MODELS[name].make(BATCH * (INPUTS - 1), **fields)
    leaves, spec = pytree.tree_flatten(rest)
    calls = zip(*(leaf.split(BATCH) for leaf in leaves), strict=True)
    return model, [example, *(pytree.tree_unflatten(call, spec) for call in calls)]


# transformers


def _transformers(
    kind: str, model: str, feed: Callable[[Any, int], Inputs], cut: str = "", **fields: Any
) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        cls = getattr(transformers, model)
        settings = cls.config_class(**fields | others)
        if getattr(settings, "use_cache", None) is not None:
            settings.use_cache = False
        return cls(settings), feed(settings, batch)

    MODELS[model] = Entry(kind=kind, make=build, cut=cut)


def _ids(config: Any, batch: int) -> torch.Tensor:
    words = getattr(config, "vocab_size", None) or config.text_config.vocab_size
    return torch.randint(5, words, (batch, TOKENS))


def words(config: Any, batch: int) -> dict[str, torch.Tensor]:
    """Return token ids and a mask that hides the end of each second sequence."""
    mask_BT = torch.ones(batch, TOKENS, dtype=torch.long)
    mask_BT[1::2, TOKENS - TOKENS // 4 :] = 0
    return {"input_ids": _ids(config, batch), "attention_mask": mask_BT}


def ids(config: Any, batch: int) -> Inputs:
    return {"input_ids": _ids(config, batch)}


def translated(config: Any, batch: int) -> Inputs:
    return {**words(config, batch), "decoder_input_ids": _ids(config, batch)[:, : TOKENS // 2]}


def boxed(config: Any, batch: int) -> Inputs:
    """Return words with their boxes on a page of 1000 by 1000."""
    corner = torch.randint(0, 500, (batch, TOKENS, 2))
    return {**words(config, batch), "bbox": torch.cat([corner, corner + 100], -1)}


def _size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def picture(config: Any, batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), *_size(config))}


def shaped(name: str, *shape: int) -> Callable[[Any, int], Inputs]:
    """Return a feed of one random input of this shape."""
    return lambda config, batch: {name: torch.randn(batch, *shape)}


def sized(side: int) -> Callable[[Any, int], Inputs]:
    return shaped("pixel_values", 3, side, side)


def two_towers(config: Any, batch: int) -> Inputs:
    pixels = torch.randn(batch, 3, *_size(config.vision_config))
    return {
        "input_ids": torch.randint(5, config.text_config.vocab_size - 1, (batch, 16)),
        "pixel_values": pixels,
    }


def words_and_picture(config: Any, batch: int) -> Inputs:
    return {**words(config, batch), "pixel_values": torch.randn(batch, 3, 384, 384)}


# fmt: off
for name in (
    "BertModel", "RobertaForSequenceClassification", "DistilBertForSequenceClassification",
    "ElectraForTokenClassification", "DebertaModel", "MPNetModel", "MobileBertModel", "SqueezeBertModel",
    "FunnelModel", "BigBirdModel", "NystromformerModel", "RoFormerModel", "ConvBertModel",
    "CamembertForQuestionAnswering", "ErnieModel", "ModernBertModel", "NomicBertModel", "SplinterModel", "MraModel",
):
    _transformers("text", name, words)
_transformers("text", "XmodModel", words, default_language="en_XX")
_transformers("text", "DebertaV2Model", words, "12 layers of 24", num_hidden_layers=12)
_transformers("text", "AlbertForMaskedLM", words, "the base shape",
              hidden_size=768, intermediate_size=3072, num_attention_heads=12)
_transformers("text", "FNetModel", ids)
_transformers("text", "XLNetModel", words, "12 layers of 24", n_layer=12)
_transformers("text", "EsmModel", words, vocab_size=33, pad_token_id=1, mask_token_id=32)
_transformers("text", "LayoutLMModel", boxed)
_transformers("text", "BrosModel", boxed)
_transformers("text", "LiltModel", boxed)
_transformers("text", "RemBertModel", words, "8 layers of 32", num_hidden_layers=8)

_transformers("decoder", "GPT2LMHeadModel", ids)
_transformers("decoder", "OPTForCausalLM", ids)
_transformers("decoder", "BioGptForCausalLM", ids, "6 layers of 24", num_hidden_layers=6)
_transformers("decoder", "GPTNeoForCausalLM", ids, "4 layers of 24",
              num_layers=4, attention_types=[[["global", "local"], 2]])
_transformers("decoder", "CodeGenForCausalLM", ids, "1 layer of 28", n_layer=1)
_transformers("decoder", "BloomForCausalLM", ids, "6 layers of 24, 50,000 words",
              hidden_size=1024, n_layer=6, n_head=16, vocab_size=50000)
_transformers("decoder", "MptForCausalLM", ids, "2 layers of 24", n_layers=2)
_transformers("decoder", "Starcoder2ForCausalLM", ids, "2 layers of 40", num_hidden_layers=2)
_transformers("decoder", "Qwen2ForCausalLM", ids, "0.5B's width, 6 layers of 24, 50,000 words",
              hidden_size=896, intermediate_size=4864, num_hidden_layers=6, num_attention_heads=14,
              num_key_value_heads=2, vocab_size=50000)
_transformers("decoder", "Gemma3ForCausalLM", ids, "270M's width, 6 layers of 18, 50,000 words",
              hidden_size=640, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=4,
              num_key_value_heads=1, vocab_size=50000)
_transformers("decoder", "StableLmForCausalLM", ids, "2 layers of 32", num_hidden_layers=2)
_transformers("decoder", "OlmoeForCausalLM", ids, "1 layer of 16", num_hidden_layers=1)
_transformers("decoder", "MambaForCausalLM", ids, "8 layers of 32", num_hidden_layers=8)
_transformers("decoder", "RwkvForCausalLM", ids, "169M's width, 6 layers of 12", hidden_size=768, num_hidden_layers=6)
_transformers("decoder", "XGLMForCausalLM", ids, "4 layers of 24, 50,000 words", num_layers=4, vocab_size=50000)

_transformers("sequence to sequence", "T5ForConditionalGeneration", translated)
_transformers("sequence to sequence", "BartForConditionalGeneration", translated, "the base shape",
              encoder_layers=6, decoder_layers=6, d_model=768, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
              encoder_attention_heads=12, decoder_attention_heads=12)
_transformers("sequence to sequence", "MarianMTModel", translated, "the shape of OPUS-MT",
              encoder_layers=6, decoder_layers=6, d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
              encoder_attention_heads=8, decoder_attention_heads=8)
_transformers("sequence to sequence", "BlenderbotSmallForConditionalGeneration", translated)
_transformers("sequence to sequence", "M2M100ForConditionalGeneration", translated, "4 layers of 12, 50,000 words",
              encoder_layers=4, decoder_layers=4, vocab_size=50000)
_transformers("sequence to sequence", "PegasusForConditionalGeneration", translated, "4 layers of 12",
              encoder_layers=4, decoder_layers=4, vocab_size=50000)
_transformers("sequence to sequence", "SwitchTransformersForConditionalGeneration", translated, "4 layers of 12",
              num_layers=4, num_decoder_layers=4)

for name in (
    "ViT", "DeiT", "Beit", "Swin", "Swinv2", "ConvNext", "ConvNextV2", "Pvt", "PvtV2", "Dinov2", "Hiera", "Cvt",
    "Levit", "MobileViT", "MobileViTV2", "PoolFormer", "SwiftFormer", "RegNet", "ResNet", "Bit", "FocalNet",
    "MobileNetV1",
):
    _transformers("vision", f"{name}ForImageClassification", picture, num_labels=CLASSES)
_transformers("vision", "SiglipVisionModel", picture, num_labels=CLASSES)
_transformers("vision", "IJepaModel", picture, num_labels=CLASSES)
# Of an initializer_range of 0.02 nothing is left after 55 blocks: batch norms add more than that to their variances.
_transformers("vision", "EfficientNetForImageClassification", sized(300), "300 pixels of 600",
              num_labels=CLASSES, initializer_range=0.1)
_transformers("vision", "SegformerForSemanticSegmentation", sized(256), "256 pixels of 512")
_transformers("vision", "DPTForDepthEstimation", sized(224), "224 pixels of 384", image_size=224)
_transformers("vision", "Swin2SRForImageSuperResolution", sized(64))
_transformers("vision", "VideoMAEForVideoClassification", shaped("pixel_values", 16, 3, 224, 224), "4 layers of 12",
              num_hidden_layers=4)
_transformers("vision", "TimesformerForVideoClassification", shaped("pixel_values", 8, 3, 224, 224), "4 layers of 12",
              num_hidden_layers=4)
_transformers("detection", "YolosForObjectDetection", picture, "256 x 320 pixels of 512 x 864", image_size=[256, 320])
_transformers("detection", "RTDetrV2ForObjectDetection", sized(320), "320 pixels of 640")

for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "SEW", "Data2VecAudio"):
    _transformers("audio", f"{name}ForCTC", shaped("input_values", 16000))  # a second of sound at 16 kHz
_transformers("audio", "EncodecModel", shaped("input_values", 1, 24000))
_transformers("audio", "ASTForAudioClassification", shaped("input_values", 1024, 128), "4 layers of 12",
              num_hidden_layers=4)
_transformers("audio", "Wav2Vec2BertModel", shaped("input_features", 100, 160), "6 layers of 24", num_hidden_layers=6)

_transformers("two towers", "CLIPModel", two_towers)
_transformers("two towers", "SiglipModel", two_towers)
_transformers("two towers", "GroupViTModel", two_towers)
_transformers("two towers", "ViltModel", words_and_picture, max_position_embeddings=TOKENS)
for name in ("PatchTST", "PatchTSMixer"):
    _transformers("series", f"{name}ForPrediction", shaped("past_values", 512, 7),
                  num_input_channels=7, context_length=512, prediction_length=96)
# fmt: on


# torchvision


def _torchvision(name: str, *shape: int, path: str = "torchvision.models", **fields: Any) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        function = getattr(importlib.import_module(path), name)
        return function(weights=None, **fields | others), (torch.randn(batch, *(shape or (3, 224, 224))),)

    MODELS[name] = Entry(kind="vision", make=build)


# fmt: off
for name in (
    "alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "mnasnet1_0",
    "mobilenet_v2", "mobilenet_v3_large", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s", "convnext_small",
    "swin_s", "vit_b_32", "maxvit_t", "squeezenet1_1",
):
    _torchvision(name)
# fmt: on
_torchvision("inception_v3", 3, 299, 299, aux_logits=False, init_weights=False)
_torchvision("googlenet", aux_logits=False, init_weights=False)
for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
    _torchvision(name, path="torchvision.models.segmentation", weights_backbone=None)
for name in ("r3d_18", "r2plus1d_18"):
    _torchvision(name, 3, 8, 112, 112, path="torchvision.models.video")


# timm


def add_timm(name: str) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        model = import_timm().create_model(name, **others)
        return model, (torch.randn(batch, *model.pretrained_cfg["input_size"]),)

    MODELS[f"{TIMM}{name}"] = Entry(kind="timm", make=build)


# fmt: off
for name in (
    "resnetv2_50", "resnetv2_50x1_bit", "seresnet50", "ecaresnet50t", "resnest14d", "res2net50_26w_4s", "skresnet18",
    "dpn68", "dla34", "cspresnet50", "ese_vovnet19b_dw", "nf_resnet50", "dm_nfnet_f0", "gernet_s",
    "efficientnetv2_rw_t", "tf_efficientnetv2_b0", "tf_mixnet_s", "tf_mobilenetv3_large_100", "mobilenetv4_conv_small",
    "ghostnetv2_100", "lcnet_100", "rexnet_100", "repvgg_a0", "mobileone_s0", "fastvit_t8", "xception41",
    "inception_next_tiny", "convnextv2_tiny", "caformer_s18", "mixer_s32_224", "resmlp_12_224", "gmlp_s16_224",
    "coatnet_0_224", "efficientformer_l1", "edgenext_small", "cait_xxs24_224", "xcit_nano_12_p16_224", "volo_d1_224",
    "botnet26t_256", "eva02_tiny_patch14_224",
):
    add_timm(name)
# fmt: on


# diffusers: a step at 512 x 512 pixels, which guidance calls on a batch of two


def _diffusers(
    name: str, feed: Callable[[int], Inputs], layers: int, *, whole: int, **published: Any
) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        function = getattr(importlib.import_module("diffusers"), name)
        return function(**{"sample_size": LATENT, "num_layers": layers} | published | others), feed(batch)

    cut = f"{layers} layers of {whole}, {8 * LATENT} x {8 * LATENT} pixels"
    MODELS[name] = Entry(kind="denoiser", make=build, cut=cut)


def pixart(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, LATENT, LATENT),
        "encoder_hidden_states": torch.randn(batch, 120, 4096),
        "timestep": torch.randint(1000, (batch,)),
    }


def stable_diffusion_3(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 16, LATENT, LATENT),
        "encoder_hidden_states": torch.randn(batch, 333, 4096),
        "pooled_projections": torch.randn(batch, 2048),
        "timestep": 1000 * torch.rand(batch),
    }


_diffusers("PixArtTransformer2DModel", pixart, 4, whole=28, caption_channels=4096)
_diffusers(
    "SD3Transformer2DModel",
    stable_diffusion_3,
    2,
    whole=24,
    num_attention_heads=24,
    caption_projection_dim=1536,
    pos_embed_max_size=192,
)
