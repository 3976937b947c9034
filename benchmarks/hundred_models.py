"""A hundred architectures: name → what it is, how it is cut, and a factory of (module, example inputs).

Sizes are those that transformers, torchvision and timm publish as defaults (those of the base checkpoint). Where a
model would not fit beside its copies its depth is cut, and the row says so. Weights are random: layer scales that
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

from outside_modules import settle
from timm_import import import_timm

Inputs = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
BATCH, OTHER_BATCH, TOKENS = 2, 3, 64
"""Rows of the search's calls and of those that the artifact is tried on, tokens of a row."""
INPUTS = 4
"""Calls that a search is given: one calibrates, two judge, and one judges what was chosen."""
CLASSES = 1000
"""Of the published classifiers of pictures; the configurations say 2, and of two numbers a row no loss is certain."""
LATENT = 64
"""Latent pixels of a side of a denoiser's picture."""
IDLE = 0.01
"""Layer scales up to this begin near zero."""
SCALES = (
    "layer_scale",
    "layer_scale_parameter",
    "lambda_1",
    "lambda_2",
    "lambda1",
    "gamma_1",
    "gamma_2",
    "gamma1",
    "gamma2",
    "gamma",
    "skipinit_gain",
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture."""

    kind: str
    """Text, decoder, sequence to sequence, vision, detection, audio, two towers, series, denoiser."""
    make: Callable[..., tuple[nn.Module, Inputs]]
    """Batch, and fields of its configuration by name → a module with random weights and inputs of so many rows."""
    cut: str = ""
    """What is smaller than published."""


TIMM = "timm."
"""Before timm's names, of which torchvision has some, too."""
MODELS: dict[str, Entry] = {}


def make(
    name: str, batch: int = BATCH, *, weights: int = 0, inputs: int = 0, **fields: Any
) -> tuple[nn.Module, Inputs]:
    """A module for inference and inputs of so many rows: equal for equal seeds, in every process.

    `fields` are those of its configuration that are to differ.
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
    """The same module and INPUTS calls of BATCH rows, of which the first are those of `make`."""
    model, example = make(name, **fields)
    torch.manual_seed(2)
    _, rest = MODELS[name].make(BATCH * (INPUTS - 1), **fields)
    leaves, spec = pytree.tree_flatten(rest)
    calls = zip(*(leaf.split(BATCH) for leaf in leaves), strict=True)
    return model, [example, *(pytree.tree_unflatten(call, spec) for call in calls)]


# transformers


def _transformers(
    kind: str, model: str, config: str, feed: Callable[[Any, int], Inputs], *, cut: str = "", **fields: Any
) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        settings = getattr(transformers, config)(**fields | others)
        if getattr(settings, "use_cache", None) is not None:
            settings.use_cache = False
        return getattr(transformers, model)(settings), feed(settings, batch)

    MODELS[model] = Entry(kind=kind, make=build, cut=cut)


def _ids(config: Any, batch: int) -> torch.Tensor:
    words = getattr(config, "vocab_size", None) or config.text_config.vocab_size
    return torch.randint(5, words, (batch, TOKENS))


def words(config: Any, batch: int) -> dict[str, torch.Tensor]:
    """Token ids and a mask that hides the end of each second row."""
    mask_BT = torch.ones(batch, TOKENS, dtype=torch.long)
    mask_BT[1::2, TOKENS - TOKENS // 4 :] = 0
    return {"input_ids": _ids(config, batch), "attention_mask": mask_BT}


def ids(config: Any, batch: int) -> Inputs:
    return {"input_ids": _ids(config, batch)}


def translated(config: Any, batch: int) -> Inputs:
    return {**words(config, batch), "decoder_input_ids": _ids(config, batch)[:, : TOKENS // 2]}


def boxed(config: Any, batch: int) -> Inputs:
    """Words with their boxes on a page of 1000 by 1000."""
    corner = torch.randint(0, 500, (batch, TOKENS, 2))
    return {**words(config, batch), "bbox": torch.cat([corner, corner + 100], -1)}


def _size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def picture(config: Any, batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), *_size(config))}


def sized(height: int, width: int | None = None) -> Callable[[Any, int], Inputs]:
    def feed(config: Any, batch: int) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, height, width or height)}

    return feed


def film(frames: int, size: int) -> Callable[[Any, int], Inputs]:
    def feed(config: Any, batch: int) -> Inputs:
        return {"pixel_values": torch.randn(batch, frames, 3, size, size)}

    return feed


def wave(config: Any, batch: int) -> Inputs:
    """A second of sound at 16 kHz."""
    return {"input_values": torch.randn(batch, 16000)}


def spectrogram(bands: int, frames: int, name: str = "input_features", *, last: str = "frames") -> Any:
    shape = (bands, frames) if last == "frames" else (frames, bands)

    def feed(config: Any, batch: int) -> Inputs:
        return {name: torch.randn(batch, *shape)}

    return feed


def two_towers(config: Any, batch: int) -> Inputs:
    pixels = torch.randn(batch, 3, *_size(config.vision_config))
    return {
        "input_ids": torch.randint(5, config.text_config.vocab_size - 1, (batch, 16)),
        "pixel_values": pixels,
    }


for name, config in (
    ("BertModel", "BertConfig"),
    ("RobertaForSequenceClassification", "RobertaConfig"),
    ("DistilBertForSequenceClassification", "DistilBertConfig"),
    ("ElectraForTokenClassification", "ElectraConfig"),
    ("DebertaModel", "DebertaConfig"),
    ("MPNetModel", "MPNetConfig"),
    ("MobileBertModel", "MobileBertConfig"),
    ("SqueezeBertModel", "SqueezeBertConfig"),
    ("FunnelModel", "FunnelConfig"),
    ("BigBirdModel", "BigBirdConfig"),
    ("NystromformerModel", "NystromformerConfig"),
    ("RoFormerModel", "RoFormerConfig"),
    ("ConvBertModel", "ConvBertConfig"),
    ("CamembertForQuestionAnswering", "CamembertConfig"),
    ("ErnieModel", "ErnieConfig"),
    ("ModernBertModel", "ModernBertConfig"),
    ("NomicBertModel", "NomicBertConfig"),
    ("SplinterModel", "SplinterConfig"),
    ("MraModel", "MraConfig"),
    ("XmodModel", "XmodConfig"),
):
    if name == "XmodModel":
        _transformers("text", name, config, words, default_language="en_XX")
    else:
        _transformers("text", name, config, words)
_transformers("text", "DebertaV2Model", "DebertaV2Config", words, num_hidden_layers=12, cut="12 layers of 24")
_transformers(
    "text",
    "AlbertForMaskedLM",
    "AlbertConfig",
    words,
    cut="the base shape",
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
)
_transformers("text", "FNetModel", "FNetConfig", ids)
_transformers("text", "XLNetModel", "XLNetConfig", words, n_layer=12, cut="12 layers of 24")
_transformers("text", "EsmModel", "EsmConfig", words, vocab_size=33, pad_token_id=1, mask_token_id=32)
_transformers("text", "LayoutLMModel", "LayoutLMConfig", boxed)
_transformers("text", "BrosModel", "BrosConfig", boxed)
_transformers("text", "LiltModel", "LiltConfig", boxed)
_transformers("text", "RemBertModel", "RemBertConfig", words, num_hidden_layers=8, cut="8 layers of 32")

_transformers("decoder", "GPT2LMHeadModel", "GPT2Config", ids)
_transformers("decoder", "OPTForCausalLM", "OPTConfig", ids)
_transformers("decoder", "BioGptForCausalLM", "BioGptConfig", ids, cut="6 layers of 24", num_hidden_layers=6)
_transformers(
    "decoder",
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    ids,
    cut="4 layers of 24",
    num_layers=4,
    attention_types=[[["global", "local"], 2]],
)
_transformers("decoder", "CodeGenForCausalLM", "CodeGenConfig", ids, cut="1 layer of 28", n_layer=1)
_transformers(
    "decoder",
    "BloomForCausalLM",
    "BloomConfig",
    ids,
    cut="6 layers of 24, 50,000 words",
    hidden_size=1024,
    n_layer=6,
    n_head=16,
    vocab_size=50000,
)
_transformers("decoder", "MptForCausalLM", "MptConfig", ids, cut="2 layers of 24", n_layers=2)
_transformers(
    "decoder", "Starcoder2ForCausalLM", "Starcoder2Config", ids, cut="2 layers of 40", num_hidden_layers=2
)
_transformers(
    "decoder",
    "Qwen2ForCausalLM",
    "Qwen2Config",
    ids,
    cut="0.5B's width, 6 layers of 24, 50,000 words",
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=6,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=50000,
)
_transformers(
    "decoder",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    ids,
    cut="270M's width, 6 layers of 18, 50,000 words",
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    vocab_size=50000,
)
_transformers(
    "decoder", "StableLmForCausalLM", "StableLmConfig", ids, cut="2 layers of 32", num_hidden_layers=2
)
_transformers("decoder", "OlmoeForCausalLM", "OlmoeConfig", ids, cut="1 layer of 16", num_hidden_layers=1)
_transformers("decoder", "MambaForCausalLM", "MambaConfig", ids, cut="8 layers of 32", num_hidden_layers=8)
_transformers(
    "decoder",
    "RwkvForCausalLM",
    "RwkvConfig",
    ids,
    cut="169M's width, 6 layers of 12",
    hidden_size=768,
    num_hidden_layers=6,
)
_transformers(
    "decoder",
    "XGLMForCausalLM",
    "XGLMConfig",
    ids,
    cut="4 layers of 24, 50,000 words",
    num_layers=4,
    vocab_size=50000,
)

_transformers("sequence to sequence", "T5ForConditionalGeneration", "T5Config", translated)
_transformers(
    "sequence to sequence",
    "BartForConditionalGeneration",
    "BartConfig",
    translated,
    cut="the base shape",
    encoder_layers=6,
    decoder_layers=6,
    d_model=768,
    encoder_ffn_dim=3072,
    decoder_ffn_dim=3072,
    encoder_attention_heads=12,
    decoder_attention_heads=12,
)
_transformers(
    "sequence to sequence",
    "MarianMTModel",
    "MarianConfig",
    translated,
    cut="the shape of OPUS-MT",
    encoder_layers=6,
    decoder_layers=6,
    d_model=512,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
)
_transformers(
    "sequence to sequence", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", translated
)
_transformers(
    "sequence to sequence",
    "M2M100ForConditionalGeneration",
    "M2M100Config",
    translated,
    cut="4 layers of 12, 50,000 words",
    encoder_layers=4,
    decoder_layers=4,
    vocab_size=50000,
)
_transformers(
    "sequence to sequence",
    "PegasusForConditionalGeneration",
    "PegasusConfig",
    translated,
    cut="4 layers of 12",
    encoder_layers=4,
    decoder_layers=4,
    vocab_size=50000,
)
_transformers(
    "sequence to sequence",
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig",
    translated,
    cut="4 layers of 12",
    num_layers=4,
    num_decoder_layers=4,
)

for name, config in (
    ("ViTForImageClassification", "ViTConfig"),
    ("DeiTForImageClassification", "DeiTConfig"),
    ("BeitForImageClassification", "BeitConfig"),
    ("SwinForImageClassification", "SwinConfig"),
    ("Swinv2ForImageClassification", "Swinv2Config"),
    ("ConvNextForImageClassification", "ConvNextConfig"),
    ("ConvNextV2ForImageClassification", "ConvNextV2Config"),
    ("PvtForImageClassification", "PvtConfig"),
    ("PvtV2ForImageClassification", "PvtV2Config"),
    ("Dinov2ForImageClassification", "Dinov2Config"),
    ("HieraForImageClassification", "HieraConfig"),
    ("CvtForImageClassification", "CvtConfig"),
    ("LevitForImageClassification", "LevitConfig"),
    ("MobileViTForImageClassification", "MobileViTConfig"),
    ("MobileViTV2ForImageClassification", "MobileViTV2Config"),
    ("PoolFormerForImageClassification", "PoolFormerConfig"),
    ("SwiftFormerForImageClassification", "SwiftFormerConfig"),
    ("RegNetForImageClassification", "RegNetConfig"),
    ("ResNetForImageClassification", "ResNetConfig"),
    ("BitForImageClassification", "BitConfig"),
    ("FocalNetForImageClassification", "FocalNetConfig"),
    ("MobileNetV1ForImageClassification", "MobileNetV1Config"),
    ("SiglipVisionModel", "SiglipVisionConfig"),
    ("IJepaModel", "IJepaConfig"),
):
    _transformers("vision", name, config, picture, num_labels=CLASSES)
_transformers(
    "vision",
    "EfficientNetForImageClassification",
    "EfficientNetConfig",
    sized(300),
    num_labels=CLASSES,
    initializer_range=0.1,  # of 0.02 nothing is left after 55 blocks: batch norms add more than it to their variances
    cut="300 pixels of 600",
)
_transformers(
    "vision", "SegformerForSemanticSegmentation", "SegformerConfig", sized(256), cut="256 pixels of 512"
)
_transformers(
    "vision", "DPTForDepthEstimation", "DPTConfig", sized(224), image_size=224, cut="224 pixels of 384"
)
_transformers("vision", "Swin2SRForImageSuperResolution", "Swin2SRConfig", sized(64))
_transformers(
    "vision",
    "VideoMAEForVideoClassification",
    "VideoMAEConfig",
    film(16, 224),
    num_hidden_layers=4,
    cut="4 layers of 12",
)
_transformers(
    "vision",
    "TimesformerForVideoClassification",
    "TimesformerConfig",
    film(8, 224),
    num_hidden_layers=4,
    cut="4 layers of 12",
)
_transformers(
    "detection",
    "YolosForObjectDetection",
    "YolosConfig",
    picture,
    image_size=[256, 320],
    cut="256 x 320 pixels of 512 x 864",
)
_transformers(
    "detection", "RTDetrV2ForObjectDetection", "RTDetrV2Config", sized(320), cut="320 pixels of 640"
)

for name, config in (
    ("Wav2Vec2ForCTC", "Wav2Vec2Config"),
    ("HubertForCTC", "HubertConfig"),
    ("WavLMForCTC", "WavLMConfig"),
    ("UniSpeechForCTC", "UniSpeechConfig"),
    ("SEWForCTC", "SEWConfig"),
    ("Data2VecAudioForCTC", "Data2VecAudioConfig"),
):
    _transformers("audio", name, config, wave)
_transformers(
    "audio",
    "EncodecModel",
    "EncodecConfig",
    lambda config, batch: {"input_values": torch.randn(batch, 1, 24000)},
)
_transformers(
    "audio",
    "ASTForAudioClassification",
    "ASTConfig",
    spectrogram(128, 1024, "input_values", last="bands"),
    cut="4 layers of 12",
    num_hidden_layers=4,
)
_transformers(
    "audio",
    "Wav2Vec2BertModel",
    "Wav2Vec2BertConfig",
    spectrogram(160, 100, last="bands"),
    num_hidden_layers=6,
    cut="6 layers of 24",
)

_transformers("two towers", "CLIPModel", "CLIPConfig", two_towers)
_transformers("two towers", "SiglipModel", "SiglipConfig", two_towers)
_transformers("two towers", "GroupViTModel", "GroupViTConfig", two_towers)
_transformers(
    "two towers",
    "ViltModel",
    "ViltConfig",
    lambda config, batch: {**words(config, batch), "pixel_values": torch.randn(batch, 3, 384, 384)},
    max_position_embeddings=TOKENS,
)
_transformers(
    "series",
    "PatchTSTForPrediction",
    "PatchTSTConfig",
    lambda config, batch: {"past_values": torch.randn(batch, 512, 7)},
    num_input_channels=7,
    context_length=512,
    prediction_length=96,
)
_transformers(
    "series",
    "PatchTSMixerForPrediction",
    "PatchTSMixerConfig",
    lambda config, batch: {"past_values": torch.randn(batch, 512, 7)},
    num_input_channels=7,
    context_length=512,
    prediction_length=96,
)


# torchvision


def _torchvision(kind: str, name: str, *shape: int, path: str = "torchvision.models", **fields: Any) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        function = getattr(importlib.import_module(path), name)
        return function(weights=None, **fields | others), (torch.randn(batch, *(shape or (3, 224, 224))),)

    MODELS[name] = Entry(kind=kind, make=build)


for name in (
    "alexnet",
    "vgg11_bn",
    "resnet18",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "mnasnet1_0",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "regnet_y_400mf",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "convnext_small",
    "swin_s",
    "vit_b_32",
    "maxvit_t",
    "squeezenet1_1",
):
    _torchvision("vision", name)
_torchvision("vision", "inception_v3", 3, 299, 299, aux_logits=False, init_weights=False)
_torchvision("vision", "googlenet", aux_logits=False, init_weights=False)
_torchvision(
    "vision", "fcn_resnet50", 3, 224, 224, path="torchvision.models.segmentation", weights_backbone=None
)
_torchvision(
    "vision",
    "deeplabv3_mobilenet_v3_large",
    3,
    224,
    224,
    path="torchvision.models.segmentation",
    weights_backbone=None,
)
_torchvision(
    "vision",
    "lraspp_mobilenet_v3_large",
    3,
    224,
    224,
    path="torchvision.models.segmentation",
    weights_backbone=None,
)
_torchvision("vision", "r3d_18", 3, 8, 112, 112, path="torchvision.models.video")
_torchvision("vision", "r2plus1d_18", 3, 8, 112, 112, path="torchvision.models.video")


# timm


def add_timm(name: str) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        model = import_timm().create_model(name, **others)
        return model, (torch.randn(batch, *model.pretrained_cfg["input_size"]),)

    MODELS[f"{TIMM}{name}"] = Entry(kind="timm", make=build)


for name in (
    "resnetv2_50",
    "resnetv2_50x1_bit",
    "seresnet50",
    "ecaresnet50t",
    "resnest14d",
    "res2net50_26w_4s",
    "skresnet18",
    "dpn68",
    "dla34",
    "cspresnet50",
    "ese_vovnet19b_dw",
    "nf_resnet50",
    "dm_nfnet_f0",
    "gernet_s",
    "efficientnetv2_rw_t",
    "tf_efficientnetv2_b0",
    "tf_mixnet_s",
    "tf_mobilenetv3_large_100",
    "mobilenetv4_conv_small",
    "ghostnetv2_100",
    "lcnet_100",
    "rexnet_100",
    "repvgg_a0",
    "mobileone_s0",
    "fastvit_t8",
    "xception41",
    "inception_next_tiny",
    "convnextv2_tiny",
    "caformer_s18",
    "mixer_s32_224",
    "resmlp_12_224",
    "gmlp_s16_224",
    "coatnet_0_224",
    "efficientformer_l1",
    "edgenext_small",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "volo_d1_224",
    "botnet26t_256",
    "eva02_tiny_patch14_224",
):
    add_timm(name)


# diffusers: a step at 512 x 512 pixels, which guidance calls on two rows


def _diffusers(
    name: str, feed: Callable[[int], Inputs], layers: int, *, whole: int, **published: Any
) -> None:
    def build(batch: int, **others: Any) -> tuple[nn.Module, Inputs]:
        function = getattr(importlib.import_module("diffusers"), name)
        return function(**{"sample_size": LATENT, "num_layers": layers} | published | others), feed(batch)

    MODELS[name] = Entry(
        kind="denoiser", make=build, cut=f"{layers} layers of {whole}, {8 * LATENT} x {8 * LATENT} pixels"
    )


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
