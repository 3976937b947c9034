"""The published ladder of Segment Anything, a step at a time: images a second, memory, mIoU against fp32.

    python -m benchmarks.pictures.segment_anything [--size 1024 --layers 12 --hidden 768] [--points 8x8]
        [--only STEP …] [--search SECONDS] [--max-drop 0.02] [--openvino] [--rounds 5] [--json FILE]

Each step is a process of its own (Torchwright's trial process), timed in turns. It is judged by the masks of the grid's
points on synthetic images. An image costs its encoder and one call of points. The first steps have attention as plain
matrix products, as the post began with. The post's removal of device synchronization is in no step: no call reads a
value back. Random weights, wide enough that masks have two sides. --search 0 leaves out the last row, the search's own
result; --only adds the first step. `--size 256 --layers 6 --hidden 128 --points 4x4 --rounds 2 --search 0` runs all
steps on a small model, in minutes of a quiet machine.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import run
from benchmarks.harness.contenders import THIRD_PARTY, contenders, optimize_command
from benchmarks.harness.run import Row
from benchmarks.harness.turns import in_turns, ratio
from torchwright.core.errors import TorchwrightError
from torchwright.models.segment.workload import SegmentWorkload
from torchwright.optimization.trial.client import TrialFailed, TrialProcess
from torchwright.workloads.base import Workload
from torchwright.workloads.pictures import picture

TOGETHER = 4
"""Images of one call, at the step that has several."""
SHAPES = ((1.0, 0.75), (0.5, 1.0), (1.5, 1.5), (0.6, 0.2))
"""Width and height of those, in parts of the encoder's square."""
SECONDS = 6 * 3600.0
SEARCHED = "the search's own"


class PlainAttention(SegmentWorkload):
    """The encoder attends by matrix products, with the bias written out, as before the post's fourth step."""

    def build(self) -> nn.Module:
        from transformers.models.sam.modeling_sam import SamVisionAttention

        network = super().build()
        for module in network.modules():
            if isinstance(module, SamVisionAttention):
                module.__class__ = SamVisionAttention
        return network


class SeveralPictures(SegmentWorkload):
    """TOGETHER pictures of different sizes a call of the encoder, each in a square of its own."""

    def cases(self, dtype: torch.dtype) -> list[Any]:
        encode, *prompts = super().cases(dtype)
        asked = self.family(self.side, lambda **given: given)
        squares = [asked.pixels(self._of_shape(seed)) for seed in range(TOGETHER)]
        encode.kwargs["pixels"] = torch.cat(squares).to(self.device)
        return [encode, *prompts]

    def _of_shape(self, seed: int) -> Any:
        """RGB (H, W, 3) uint8, wide, high or square, smaller and larger than the encoder's."""
        across, down = SHAPES[seed % len(SHAPES)]
        made = picture(seed, (3, int(self.side * down), int(self.side * across)))
        return (made * 255).round().byte().permute(1, 2, 0).numpy()


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A step of the ladder: techniques on a kind of workload."""

    name: str
    steps: tuple[str, ...] = ()
    kind: type[SegmentWorkload] = SegmentWorkload

    @property
    def pictures(self) -> int:
        return TOGETHER if self.kind is SeveralPictures else 1


BF16, COMPILE = "dtype:dtype=bfloat16", "compile:engine=jit,freezing=false"
FUSED, DECODER, KEPT, GRAPHS = "grid_attention", "mask_decoder", "allocator", "cuda_graphs"
RUNGS = (
    Rung(name="fp32 eager", kind=PlainAttention),
    Rung(name="bf16, no waiting", steps=(BF16,), kind=PlainAttention),
    Rung(name="torch.compile", steps=(BF16, COMPILE), kind=PlainAttention),
    Rung(name="SDPA", steps=(BF16, COMPILE)),
    Rung(name="torch.compile, freezing", steps=(BF16, "compile:engine=jit")),
    Rung(name="fused attention", steps=(BF16, "compile", FUSED)),
    Rung(name=f"{TOGETHER} sizes a call", steps=(BF16, COMPILE, FUSED), kind=SeveralPictures),
    Rung(name="mask decoder by products", steps=(DECODER, BF16, "compile", FUSED)),
    Rung(name="int8 by row", steps=(DECODER, BF16, "compile", FUSED, "int8_dynamic")),
    Rung(name="bf16, memory kept", steps=(KEPT, DECODER, BF16, "compile", FUSED)),
    Rung(name="int8 by row, memory kept", steps=(KEPT, DECODER, BF16, "compile", FUSED, "int8_dynamic")),
    Rung(name="CUDA graphs", steps=(DECODER, BF16, COMPILE, FUSED, GRAPHS)),
    Rung(
        name="int8, CUDA graphs", steps=(DECODER, BF16, COMPILE, FUSED, "torchao:config=int8_dynamic", GRAPHS)
    ),
    Rung(
        name="float8, CUDA graphs",
        steps=(DECODER, BF16, COMPILE, FUSED, "torchao:config=float8_dynamic", GRAPHS),
    ),
    Rung(name="2:4 sparsity", steps=(DECODER, BF16, COMPILE, FUSED, "sparse24", GRAPHS)),
    Rung(name="2:4 sparsity, int8", steps=(DECODER, BF16, COMPILE, FUSED, "sparse24:bits=8", GRAPHS)),
)
OPENVINO = (
    Rung(name="OpenVINO bf16", steps=("openvino:precision=bf16",)),
    Rung(name="OpenVINO int8", steps=("openvino:precision=int8",)),
)


def main() -> None:
    every = (*RUNGS, *OPENVINO)
    options = run.options(
        __doc__,
        size=1024,
        layers=12,
        hidden=768,
        points="8x8",
        only=run.Option(action="append", choices=[rung.name for rung in every]),
        search=900.0,
        max_drop=0.02,
        openvino=False,
        rounds=5,
    )
    rows = run.Rows(options.json)
    asked = options.only or [rung.name for rung in (every if options.openvino else RUNGS)]
    wanted = [rung for rung in every if rung is RUNGS[0] or rung.name in asked]
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "sam")
        make_model(folder, options.size, options.layers, options.hidden)
        found = climb(folder, wanted, options)
    run.head(
        ("rung", "pictures/s", "encoder alone", "against the first", "peak memory, MB", "mIoU (worst tenth)")
    )
    for row in found:
        rows.add(row, cells(row, found[0]))


def make_model(folder: str, size: int, layers: int, hidden: int) -> None:
    """Write a SAM with random weights of unit gain: transformers' own give masks of 1e-20."""
    from transformers import SamConfig, SamModel

    # Every third layer of ViT-B looks at the whole picture.
    vision = {
        "image_size": size, "num_hidden_layers": layers, "hidden_size": hidden, "mlp_dim": 4 * hidden,
        "num_attention_heads": hidden // 64, "global_attn_indexes": list(range(2, layers, 3)),
    }  # fmt: skip
    prompts = {"image_size": size, "image_embedding_size": size // 16}
    torch.manual_seed(0)
    model = SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompts))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(std=0.02 if "rel_pos" in name else value[0].numel() ** -0.5)
    model.save_pretrained(folder)


def climb(folder: str, rungs: list[Rung], options: Any) -> list[Row]:
    """Return one row for each step; those that run are timed in turns."""
    rows, live = list[Row](), dict[int, TrialProcess]()
    reference = None
    with contenders() as start:

        def add(row: Row, workload: Workload, **how: Any) -> None:
            each = start(row["rung"], workload, reference=reference, seconds=SECONDS, **how)
            rows.append(row)
            if not each.fits:
                row["failure"] = each.failure
                return
            live[len(rows) - 1] = each.process
            quality = each.quality or each.process.ask("compare", reference=each.observe())
            row |= {"miou": quality.value, "drop_high": quality.drop_high, "ready_s": each.ready_s}
            row |= quality.extras

        for rung in rungs:
            run.say(f"{rung.name} …")
            row = {"rung": rung.name, "steps": rung.steps, "pictures": rung.pictures}
            add(row, rung.kind(folder, points=options.points), steps=rung.steps)
            if rung is RUNGS[0]:
                if "failure" in row:
                    raise SystemExit(row["failure"])  # there is nothing to compare the others with
                reference = live[0].ask("observe")
        if options.search:
            row: Row = {"rung": SEARCHED, "steps": (), "pictures": 1}
            run.say("the search …")
            try:
                row["steps"] = searched(folder, options)
            except TorchwrightError as error:
                rows.append(row | {"failure": str(error)[:200]})
            else:
                workload = SegmentWorkload(folder, points=options.points)
                add(row, workload, artifact=f"{folder}-out")
        time_in_turns(rows, live, options.rounds)
    return rows


def searched(folder: str, options: Any) -> tuple[str, ...]:
    """Run `torchwright optimize`; return the steps of its artifact."""
    say = lambda event: run.say(f"[{event.elapsed:6.0f} s] {event.kind} {event.text}")
    more = {"points": options.points, "without": list(THIRD_PARTY), "on_event": say}
    result = optimize_command(folder, f"{folder}-out", options.max_drop, options.search, **more)
    return tuple(map(str, result.recipe.steps))


def time_in_turns(rows: list[Row], live: dict[int, TrialProcess], rounds: int) -> None:
    asked = {number: lambda process=process: process.ask("time") for number, process in live.items()}
    for number, turns in in_turns(asked, rounds).items():
        try:
            peak = live[number].ask("memory").peak
        except (TorchwrightError, TrialFailed) as error:  # too many recompilations are reported here
            if not number:
                raise
            rows[number]["failure"] = str(error)[:200]
            continue
        encode = [turn["encode"] / rows[number]["pictures"] for turn in turns]
        points = [turn["points"] for turn in turns]
        rows[number] |= {
            "seconds": [sum(pair) for pair in zip(encode, points, strict=True)],
            "encode_s": statistics.median(encode),
            "points_s": statistics.median(points),
            "peak_bytes": peak,
        }


def cells(row: Row, first: Row) -> tuple[str, ...]:
    if "failure" in row:
        return row["rung"], row["failure"], "", "", "", ""
    name = f"{row['rung']}: {' + '.join(row['steps'])}" if row["rung"] == SEARCHED else row["rung"]
    speed = f"{1 / statistics.median(row['seconds']):.3f}", f"{1 / row['encode_s']:.3f}"
    gain = f"{ratio(first['seconds'], row['seconds']):.2f}x"
    quality = f"{row['miou']:.4f} ({row['worst_tenth']:.3f})"
    return (name, *speed, gain, f"{row['peak_bytes'] / 1e6:,.0f}", quality)


if __name__ == "__main__":
    main()
