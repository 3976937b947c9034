"""MobileNetV3-small as its paper's table has it, with random weights (Howard et al., 2019, table 2)."""

from __future__ import annotations

from torch import Tensor, nn

# Kernel, expanded width, width, squeeze-and-excite, hard-swish, stride.
ROWS = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Excite(nn.Module):
    """Weighs channels by what all of a picture says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, max(8, width // 4), 1),
            nn.ReLU(),
            nn.Conv2d(max(8, width // 4), width, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


class Block(nn.Module):
    def __init__(
        self, inputs: int, kernel: int, wide: int, outputs: int, excite: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        self.layers = nn.Sequential(
            *(() if wide == inputs else (*conv(inputs, wide, 1), act())),
            *conv(wide, wide, kernel, stride, wide),
            act(),
            *((Excite(wide),) if excite else ()),
            *conv(wide, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV3Small(nn.Module):
    """Pictures (N, 3, H, W) → logits (N, classes)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        widths = [16, *(row[2] for row in ROWS)]
        self.stem = nn.Sequential(*conv(3, 16, 3, 2), nn.Hardswish())
        self.blocks = nn.Sequential(
            *(Block(inputs, *row) for inputs, row in zip(widths[:-1], ROWS, strict=True))
        )
        self.top = nn.Sequential(*conv(96, 576, 1), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)  # what is left of a picture decides, and not the biases

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.top(self.blocks(self.stem(x))).mean((2, 3)))
