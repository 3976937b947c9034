"""Twenty modules that no test of Torchwright uses: name → a factory of (module, example inputs).

Imports nothing of Torchwright, and torchvision and transformers only in the factories that need them. Every weight is
random, from a configuration or a constructor; nothing is downloaded. Running statistics of batch norms are settled on
the example, so that answers are of order one as those of a trained model are.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = tuple[Any, ...] | dict[str, Any]
Made = tuple[nn.Module, Inputs]


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape)


def torchvision_model(name: str, **options: Any) -> nn.Module:
    # Imported by name: torchvision is optional.
    return getattr(importlib.import_module("torchvision.models"), name)(weights=None, **options)


def convnext_tiny() -> Made:
    """Return ConvNeXt with layer scales as if trained."""
    model = torchvision_model("convnext_tiny")
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            nn.init.constant_(parameter, 0.5)  # 1e-6 before training: the blocks would not matter
    return model, (torch.randn(1, 3, 224, 224),)


class Segmenter(nn.Module):
    """SegFormer, as pixel values → logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        config = SegformerConfig.from_dict({"num_labels": 21, "initializer_range": 0.05})
        self.inner = SegformerForSemanticSegmentation(config)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.inner(pixel_values).logits


class Separable(nn.Module):
    """A stem, depthwise-separable residual blocks of three dilations, and a pooled head."""

    def __init__(self, width: int = 96, classes: int = 50) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(width)
        )
        self.blocks = nn.ModuleList(self._block(width, dilation) for dilation in (1, 2, 4, 1, 2, 4))
        self.head = nn.Linear(width, classes)

    @staticmethod
    def _block(width: int, dilation: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x_BCHW = F.relu6(self.stem(image))
        for block in self.blocks:
            x_BCHW = F.relu6(x_BCHW + block(x_BCHW))
        return self.head(x_BCHW.mean((2, 3)))


class TemporalConv(nn.Module):
    """Causal dilated convolutions with gates and skips (the shape of WaveNet)."""

    def __init__(self, channels: int = 16, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(channels, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2**i) for i in range(depth))
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.outlet = nn.Conv1d(width, channels, 1)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        x_BCT = self.inlet(signal)
        skip_BCT = torch.zeros_like(x_BCT)
        for i, (layer, mixer) in enumerate(zip(self.layers, self.mixers, strict=True)):
            value, gate = layer(F.pad(x_BCT, (2 ** (i + 1), 0))).chunk(2, 1)
            step = mixer(value.tanh() * gate.sigmoid())
            x_BCT, skip_BCT = x_BCT + step, skip_BCT + step
        return self.outlet(F.relu(skip_BCT))


class Keywords(nn.Module):
    """Log-mel frames through strided convolutions and a bidirectional GRU; takes any floating type and casts it."""

    def __init__(self, mels: int = 80, width: int = 96, classes: int = 35) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(mels, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.BatchNorm1d(width),
            nn.GELU(),
        )
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_BCT = mel.to(self.head.weight.dtype)
        x_BCT = x_BCT - x_BCT.mean(-1, keepdim=True)
        y_BTE, last = self.gru(self.convs(x_BCT).transpose(1, 2))
        return self.head(y_BTE.mean(1)), last


class Speech(nn.Module):
    """Wav2Vec2, as a waveform → frames."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        config = Wav2Vec2Config(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=512,
            conv_dim=(128,) * 7,
            num_conv_pos_embeddings=32,
            num_conv_pos_embedding_groups=8,
        )
        self.inner = Wav2Vec2Model(config)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        return self.inner(waveform).last_hidden_state


class TwoTower(nn.Module):
    """Users by their history and numbers, items by their tags: embeddings of both and how well they fit."""

    def __init__(self, users: int = 5000, items: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.history = nn.EmbeddingBag(items, width, mode="mean")
        self.tags = nn.EmbeddingBag(1000, width, mode="sum")
        self.item = nn.Embedding(items, width)
        self.left = nn.Sequential(nn.Linear(2 * width + 8, 256), nn.ReLU(), nn.Linear(256, width))
        self.right = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, width))

    def forward(
        self,
        user: torch.Tensor,
        history: torch.Tensor,
        numbers: torch.Tensor,
        item: torch.Tensor,
        tags: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        left = self.left(torch.cat([self.user(user), self.history(history), numbers], 1))
        right = self.right(torch.cat([self.item(item), self.tags(tags)], 1))
        return {"score": (left * right).sum(1), "user": F.normalize(left), "item": F.normalize(right)}


class GraphNet(nn.Module):
    """Messages along edges, averaged where they arrive (the shape of GraphSAGE)."""

    def __init__(self, features: int = 32, width: int = 128, depth: int = 3, classes: int = 12) -> None:
        super().__init__()
        sizes = [features] + [width] * depth
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.near = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index[0], edge_index[1]
        ones = nodes.new_ones(target.shape[0], 1)
        degree = nodes.new_zeros(nodes.shape[0], 1).index_add(0, target, ones).clamp_min(1)
        x_NE = nodes
        for own, near in zip(self.own, self.near, strict=True):
            mean_NE = torch.zeros_like(x_NE).index_add(0, target, x_NE[source]) / degree
            x_NE = F.relu(own(x_NE) + near(mean_NE))
        return self.head(x_NE)


class Robot(nn.Module):
    """A dict of observations (camera, joints) → a dict of an action and its value."""

    def __init__(self, joints: int = 14, width: int = 128) -> None:
        super().__init__()
        self.eye = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4), nn.ELU(), nn.Conv2d(16, 32, 3, stride=2), nn.ELU(), nn.Flatten()
        )
        self.body = nn.Sequential(nn.Linear(joints, width), nn.LayerNorm(width), nn.ELU())
        self.trunk = nn.Sequential(nn.Linear(32 * 7 * 7 + width, width), nn.ELU())
        self.actor, self.critic = nn.Linear(width, joints), nn.Linear(width, 1)

    def forward(self, observation: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen = torch.cat([self.eye(observation["camera"]), self.body(observation["joints"])], 1)
        x_BE = self.trunk(seen)
        return {"action": self.actor(x_BE).tanh(), "value": self.critic(x_BE).squeeze(1)}


class Albert(nn.Module):
    """ALBERT, as token ids → hidden states."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AlbertConfig, AlbertModel

        config = AlbertConfig(
            vocab_size=8000,
            embedding_size=64,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=1024,
        )
        self.inner = AlbertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids).last_hidden_state


class Tagger(nn.Module):
    """nn.TransformerEncoder with a causal mask over learned positions."""

    def __init__(
        self, vocabulary: int = 4000, width: int = 256, labels: int = 17, longest: int = 128
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, labels)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        T = ids.shape[1]
        x_BTE = self.embed(ids) + self.position(torch.arange(T, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=ids.device)
        return self.head(self.encoder(x_BTE, mask=mask, is_causal=True))


class Translator(nn.Module):
    """T5, as two rows of token ids → logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=4000,
            d_model=192,
            d_kv=32,
            d_ff=512,
            num_layers=3,
            num_heads=6,
            feed_forward_proj="gated-gelu",
        )
        self.inner = T5ForConditionalGeneration(config)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


class LstmTranslator(nn.Module):
    """An LSTM encoder, and an LSTM decoder that attends to it (Luong's)."""

    def __init__(self, vocabulary: int = 3000, width: int = 192) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.score = nn.Linear(width, width, bias=False)
        self.mix, self.head = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory_BSE, state = self.encoder(self.source(source))
        y_BTE, _ = self.decoder(self.target(target), state)
        weights_BTS = (self.score(y_BTE) @ memory_BSE.transpose(1, 2)).softmax(-1)
        mixed = self.mix(torch.cat([y_BTE, weights_BTS @ memory_BSE], -1)).tanh()
        return self.head(mixed), weights_BTS


def waves(time_B: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of diffusion steps, (B, width)."""
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, device=time_B.device) / (width // 2))
    angles = time_B[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class DitBlock(nn.Module):
    """Attention and an MLP whose norms are scaled and shifted, and whose sums are gated, by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x_BTE: torch.Tensor, condition_BE: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.condition(F.silu(condition_BE))[:, None].chunk(6, -1)
        x_BTE = x_BTE + c * self._attend(F.layer_norm(x_BTE, x_BTE.shape[-1:]) * (1 + a) + b)
        return x_BTE + f * self.mlp(F.layer_norm(x_BTE, x_BTE.shape[-1:]) * (1 + d) + e)

    def _attend(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q, k, v = self.qkv(x_BTE).view(B, T, 3, self.heads, E // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, E))


class Dit(nn.Module):
    """A diffusion transformer over patches of a latent, conditioned on the step and the label."""

    def __init__(self, channels: int = 4, side: int = 16, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.5)
        self.step = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(DitBlock(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 4 * channels)

    def forward(self, latent: torch.Tensor, timestep: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        B, C, H, W = latent.shape
        x_BTE = self.patches(latent).flatten(2).transpose(1, 2) + self.position
        condition_BE = self.step(waves(timestep, x_BTE.shape[-1])) + self.label(label)
        for block in self.blocks:
            x_BTE = block(x_BTE, condition_BE)
        patches = self.head(F.layer_norm(x_BTE, x_BTE.shape[-1:])).view(B, H // 2, W // 2, 2, 2, C)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(B, C, H, W)


class Residual(nn.Module):
    """Two convolutions with group norms between, and the step's embedding added."""

    def __init__(self, before: int, after: int, step: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.step = nn.Linear(step, after)
        self.second = nn.Sequential(nn.GroupNorm(8, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x_BCHW: torch.Tensor, step_BE: torch.Tensor) -> torch.Tensor:
        y_BCHW = self.first(x_BCHW) + self.step(step_BE)[:, :, None, None]
        return self.skip(x_BCHW) + self.second(y_BCHW)


class UNet(nn.Module):
    """A denoiser of three scales with skips between the way down and the way up; its step is a floating number."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.inlet, self.outlet = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.step = nn.Sequential(nn.Linear(64, 128), nn.SiLU())
        self.down = nn.ModuleList(Residual(a, b, 128) for a, b in zip([width, *sizes], sizes, strict=False))
        self.middle = Residual(sizes[-1], sizes[-1], 128)
        self.up = nn.ModuleList(
            Residual(2 * b, a, 128) for a, b in zip([width, *sizes][2::-1], sizes[::-1], strict=True)
        )

    def forward(self, noisy: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        step_BE = self.step(waves(sigma * 1000, 64))
        x_BCHW, skips = self.inlet(noisy), []
        for block in self.down:
            x_BCHW = block(x_BCHW, step_BE)
            skips.append(x_BCHW)
            x_BCHW = F.avg_pool2d(x_BCHW, 2)
        x_BCHW = self.middle(x_BCHW, step_BE)
        for block in self.up:
            x_BCHW = F.interpolate(x_BCHW, scale_factor=2.0, mode="nearest")
            x_BCHW = block(torch.cat([x_BCHW, skips.pop()], 1), step_BE)
        return self.outlet(x_BCHW)


class PointNet(nn.Module):
    """Points turned by a learned matrix, lifted one by one, and pooled by their maximum; points are (B, N, 3)."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.turn = nn.Sequential(self._shared(3, 32), self._shared(32, 64))
        self.matrix = nn.Linear(64, 9)
        self.lift = nn.Sequential(self._shared(3, 64), self._shared(64, 128), self._shared(128, 512))
        self.head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, classes))

    @staticmethod
    def _shared(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU())

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        turn_B33 = self.matrix(self.turn(points.transpose(1, 2)).amax(2)).view(-1, 3, 3)
        turned = points @ (turn_B33 + torch.eye(3, device=points.device, dtype=points.dtype))
        return self.head(self.lift(turned.transpose(1, 2)).amax(2))


def two_tower() -> Made:
    """Return the towers, called by keywords."""
    return TwoTower(), {
        "user": tokens(5000, 64),
        "history": tokens(20000, 64, 20),
        "numbers": torch.randn(64, 8),
        "item": tokens(20000, 64),
        "tags": tokens(1000, 64, 5),
    }


MODULES: dict[str, Callable[[], Made]] = {
    "mobilenet_v3_small": lambda: (torchvision_model("mobilenet_v3_small"), (torch.randn(8, 3, 224, 224),)),
    "shufflenet_v2": lambda: (torchvision_model("shufflenet_v2_x1_0"), (torch.randn(8, 3, 224, 224),)),
    "convnext_tiny": convnext_tiny,
    "swin_t": lambda: (torchvision_model("swin_t"), (torch.randn(1, 3, 224, 224),)),
    "segformer": lambda: (Segmenter(), (torch.randn(4, 3, 128, 128),)),
    "separable": lambda: (Separable(), (torch.randn(16, 3, 64, 64),)),
    "temporal_conv": lambda: (TemporalConv(), (torch.randn(8, 16, 256),)),
    "keyword_gru": lambda: (Keywords(), (torch.randn(8, 80, 100),)),
    "wav2vec2": lambda: (Speech(), (torch.randn(4, 8000),)),
    "two_tower": two_tower,
    "graph": lambda: (GraphNet(), (torch.randn(600, 32), torch.randint(0, 600, (2, 4000)))),
    "robot": lambda: (Robot(), ({"camera": torch.randn(8, 3, 64, 64), "joints": torch.randn(8, 14)},)),
    # Ten microseconds of work: what is left is the call itself.
    "small_mlp": lambda: (
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
        (torch.randn(8, 32),),
    ),
    "albert": lambda: (Albert(), (tokens(8000, 8, 48),)),
    "causal_tagger": lambda: (Tagger(), (tokens(4000, 8, 64),)),
    "t5": lambda: (Translator(), (tokens(4000, 4, 40), tokens(4000, 4, 24))),
    "lstm_seq2seq": lambda: (LstmTranslator(), (tokens(3000, 8, 24), tokens(3000, 8, 16))),
    "diffusion_transformer": lambda: (
        Dit(),
        (torch.randn(8, 4, 16, 16), torch.randint(0, 1000, (8,)), torch.randint(0, 100, (8,))),
    ),
    "unet": lambda: (UNet(), (torch.randn(4, 3, 48, 48), torch.rand(4))),
    "pointnet": lambda: (PointNet(), (torch.randn(8, 512, 3),)),
}


def make(name: str, seed: int = 0) -> Made:
    """Return a module in eval mode without gradients and its inputs, the same for a seed in every process."""
    torch.manual_seed(seed)
    model, inputs = MODULES[name]()
    model.eval().requires_grad_(False)
    settle(model, inputs)
    return model, inputs


def settle(model: nn.Module, inputs: Inputs) -> None:
    """Give batch norms the statistics of the example."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
