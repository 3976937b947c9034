"""The published ladder of Segment Anything, a rung at a time: pictures a second, memory, mIoU against fp32.

    python benchmarks/segment_anything.py [--size 1024 --layers 12 --hidden 768] [--points 8x8] [--only RUNG …]
        [--search SECONDS] [--openvino] [--json FILE]

Each rung is a process of its own (Torchwright's trial process), timed in turns; what it is judged by are the masks of
the grid's points on made-up pictures. A picture costs its encoder and one call of points. The first rungs have
attention as plain matrix products, as the post began with. What the post removed of waiting for the device is in no
rung: no call reads a value back. Random weights, wide enough that masks have two sides. `--size 256 --layers 6
--hidden 128 --points 4x4 --rounds 2 --search 0` climbs all of it on a small model, in minutes of a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import turns
from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Quality, Step
from torchwright.hardware.devices import get_device
from torchwright.models.segment.workload import SegmentWorkload
from torchwright.optimization.api import optimize_cli
from torchwright.optimization.techniques.base import parse_step, techniques
from torchwright.optimization.trial.client import Context, TrialFailed, TrialProcess
from torchwright.workloads.base import Workload
from torchwright.workloads.pictures import picture

TOGETHER = 4
"""Pictures of one call, at the rung that has several."""
SHAPES = ((1.0, 0.75), (0.5, 1.0), (1.5, 1.5), (0.6, 0.2))
"""Width and height of those, in parts of the encoder's square."""
SECONDS = 6 * 3600.0
PEERS = ("openvino", "onnxruntime")


class PlainAttention(SegmentWorkload):
    """Its encoder attends by matrix products, with the bias written down, as before the post's fourth rung."""

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=1024, help="pixels of the encoder's square")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="features of the encoder, 64 a head")
    parser.add_argument("--points", default="8x8")
    parser.add_argument(
        "--only",
        action="append",
        choices=[rung.name for rung in (*RUNGS, *OPENVINO)],
        help="a rung by its name, beside the first; repeatable; --search 0 leaves the last row out",
    )
    parser.add_argument(
        "--search", type=float, default=900.0, help="seconds of the last row; 0 leaves it out"
    )
    parser.add_argument("--max-drop", type=float, default=0.02)
    parser.add_argument("--openvino", action="store_true", help="OpenVINO too, where it is installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    turns.print_machine()
    asked = options.only or [rung.name for rung in (*RUNGS, *(OPENVINO if options.openvino else ()))]
    wanted = [rung for rung in (*RUNGS, *OPENVINO) if rung is RUNGS[0] or rung.name in asked]
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "sam")
        make_model(folder, options.size, options.layers, options.hidden)
        rows = climb(folder, wanted, options, Path(scratch))
    print("| rung | pictures/s | encoder alone | against the first | peak memory, MB | mIoU (worst tenth) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(as_line(row, rows[0]), flush=True)
    turns.write_json(options.json, rows)


def make_model(folder: str, size: int, layers: int, hidden: int) -> None:
    """A SAM with random weights of unit gain: transformers' own give masks of 1e-20."""
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


def climb(folder: str, rungs: list[Rung], options: Any, scratch: Path) -> list[dict[str, Any]]:
    """One row for each rung; those that run are timed in turns."""
    rows, live = list[dict[str, Any]](), dict[int, TrialProcess]()
    reference = None
    try:
        for rung in rungs:
            turns.say(f"{rung.name} …")
            row: dict[str, Any] = {"rung": rung.name, "steps": rung.steps, "pictures": rung.pictures}
            rows.append(row)
            if reason := refused(rung.steps):
                row["failure"] = reason
                continue
            workload = rung.kind(folder, points=options.points)
            try:
                process, prepared = started(workload, rung.steps, scratch)
                live[len(rows) - 1] = process
                if reference is None:
                    reference = process.ask("observe")
                judge(row, process.ask("compare", reference=reference), prepared)
            except Exception as error:  # whatever a rung dies of is its row
                if rung is RUNGS[0]:
                    raise  # there is nothing to compare the others with
                row["failure"] = f"{type(error).__name__}: {error}"[:200]
                if process := live.pop(len(rows) - 1, None):
                    process.close()
        if options.search:
            rows.append(searched(folder, options, reference, scratch, live, len(rows)))
        time_in_turns(rows, live, options)
    finally:
        for process in live.values():
            process.close()
    return rows


def refused(steps: tuple[str, ...]) -> str | None:
    """What a technique says of this device."""
    device = get_device().identify()
    reasons = [techniques.get(parse_step(step).name).available(device) for step in steps]
    return next((reason for reason in reasons if reason), None)


def started(
    workload: Workload, steps: tuple[str, ...], scratch: Path, artifact: str | None = None
) -> tuple[TrialProcess, float]:
    """A process that has the rung ready, and how long that took."""
    begun = time.perf_counter()
    context = turns.context_of(workload, scratch, SECONDS)
    process = TrialProcess(context)
    try:
        if artifact:
            process.ask("load_artifact", path=artifact, trust=False)
        else:
            prepare(process, context, tuple(map(parse_step, steps)))
    except BaseException:
        process.close()
        raise
    return process, time.perf_counter() - begun


def prepare(process: TrialProcess, context: Context, steps: tuple[Step, ...]) -> None:
    """Ahead-of-time code and others' graphs are made in one process and loaded in this one, as the search does it."""
    ahead = [step for step in steps if step.name == "compile" and step.options.get("engine", "aot") == "aot"]
    if not ahead and not any(step.name in PEERS for step in steps):
        process.ask("prepare", steps=steps)
        return
    folder = tempfile.mkdtemp(dir=context.scratch)
    compiler = TrialProcess(context)
    try:
        prepared = compiler.ask("prepare", steps=steps, folder=folder)
    finally:
        compiler.close()
    process.ask("load", steps=steps, folder=folder, prepared=prepared)


def judge(row: dict[str, Any], quality: Quality, ready: float) -> None:
    row |= {"miou": quality.value, "drop_high": quality.drop_high, "ready_s": ready, **quality.extras}


def searched(
    folder: str, options: Any, reference: Any, scratch: Path, live: dict[int, TrialProcess], number: int
) -> dict[str, Any]:
    """The row of what `torchwright optimize` finds, loaded as its user would."""
    out = str(scratch / "out")
    row: dict[str, Any] = {"rung": "the search's own", "steps": (), "pictures": 1}
    turns.say("the search …")
    try:
        result = optimize_cli(
            folder, max_drop=options.max_drop, objective="latency", time_budget=options.search, batch=None,
            prompt_tokens=None, new_tokens=None, tokens=None, eval_text=None, points=options.points, with_steps=[],
            without=list(PEERS), device=None, out=out, seed=0,
            on_event=lambda event: turns.say(f"[{event.elapsed:6.0f} s] {event.kind} {event.text}"),
            command="benchmarks/segment_anything.py",
        )  # fmt: skip
        row["steps"] = tuple(map(str, result.recipe.steps))
        live[number], ready = started(
            SegmentWorkload(folder, points=options.points), (), scratch, artifact=out
        )
        judge(row, live[number].ask("compare", reference=reference), ready)
    except TorchwrightError as error:
        row["failure"] = str(error)[:200]
    return row


def time_in_turns(rows: list[dict[str, Any]], live: dict[int, TrialProcess], options: Any) -> None:
    encode, points = ({number: list[float]() for number in live} for _ in range(2))
    for _, order in zip(range(options.rounds), turns.orders(list(live)), strict=False):
        for number in order:
            seconds = live[number].ask("time")
            encode[number].append(seconds["encode"] / rows[number]["pictures"])
            points[number].append(seconds["points"])
    for number, process in live.items():
        try:
            peak = process.ask("memory").peak
        except (TorchwrightError, TrialFailed) as error:  # a storm of recompilations is told here
            if not number:
                raise
            rows[number]["failure"] = str(error)[:200]
            continue
        times = list(zip(encode[number], points[number], strict=True))
        rows[number] |= {
            "seconds": [sum(pair) for pair in times],
            "encode_s": statistics.median(encode[number]),
            "points_s": statistics.median(points[number]),
            "peak_bytes": peak,
        }


def as_line(row: dict[str, Any], first: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['rung']} | {row['failure']} | | | | |"
    whole = statistics.median(row["seconds"])
    ratio = statistics.median(a / b for a, b in zip(first["seconds"], row["seconds"], strict=True))
    name = (
        f"{row['rung']}: {' + '.join(row['steps'])}" if row["rung"].startswith("the search") else row["rung"]
    )
    return (
        f"| {name} | {1 / whole:.3f} | {1 / row['encode_s']:.3f} | {ratio:.2f}x | {row['peak_bytes'] / 1e6:,.0f} | "
        f"{row['miou']:.4f} ({row['worst_tenth']:.3f}) |"
    )


if __name__ == "__main__":
    main()
