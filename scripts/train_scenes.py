"""Train a small Segment Anything on the scenes of `scenes.py`, and hold models against the true masks of new ones.

python scripts/train_scenes.py train FOLDER [--minutes M]         a model as transformers saves a SamModel
python scripts/train_scenes.py judge DIR ... [--scenes N]         IoU with true masks of folders and artifacts
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import SamConfig, SamModel

import torchwright as tw
from scenes import SIDE, UNSEEN, Scene, box_of, point_on, scene
from torchwright.models.segment.masks import iou
from torchwright.models.segment.square import normalized
from torchwright.optimization.open_model import is_artifact

PATCH, WIDTH, LAYERS, HEADS = 8, 96, 4, 3
DECODER = 64
BATCH, PROMPTS = 8, 6
"""Scenes of a step, and prompts on each."""
BOXES = 0.35
"""Share of the steps whose prompts are boxes; other steps have points."""
RATE, WARM_UP = 1.5e-3, 60
FOCUS, FOCAL_WEIGHT = 2.0, 20.0
"""Published weights: 20 parts of the focal loss and one of the dice loss (Kirillov et al., 2023)."""
TELL_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    training = verbs.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--minutes", type=float, default=20.0, help="of processor time")
    training.set_defaults(run=lambda options: train(options.folder, options.minutes))
    judging = verbs.add_parser("judge")
    judging.add_argument("models", nargs="+")
    judging.add_argument("--scenes", type=int, default=100)
    judging.set_defaults(run=lambda options: judge(options.models, options.scenes))
    options = parser.parse_args()
    options.run(options)


def new_model() -> SamModel:
    """Four layers over squares of 12 x 12 places, two of them in windows.

    Weights of unit gain, and the published frequencies of places. transformers begins an encoder with weights of
    1e-10, a decoder whose attention is even, and places with 48 times the frequencies: such a model had after 1,913
    steps the loss that this one had after 288 (2.00).
    """
    vision = {
        "hidden_size": WIDTH, "output_channels": DECODER, "num_hidden_layers": LAYERS, "mlp_dim": 4 * WIDTH,
        "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH, "window_size": 6,
        "global_attn_indexes": [1, 3], "num_pos_feats": DECODER // 2, "initializer_range": WIDTH**-0.5,
        "scale": 1.0,
    }  # fmt: skip
    prompt = {
        "hidden_size": DECODER, "image_size": SIDE, "patch_size": PATCH, "mask_input_channels": 4,
        "image_embedding_size": SIDE // PATCH,
    }  # fmt: skip
    decoder = {
        "hidden_size": DECODER, "mlp_dim": 4 * DECODER, "num_hidden_layers": 2, "num_attention_heads": 4,
        "iou_head_hidden_dim": DECODER,
    }  # fmt: skip
    torch.manual_seed(0)
    config = SamConfig(
        vision_config=vision,
        prompt_encoder_config=prompt,
        mask_decoder_config=decoder,
        initializer_range=DECODER**-0.5,
    )
    return SamModel(config).train()


def train(folder: Path, minutes: float) -> None:
    """For so many minutes of one thread's processor time, then save: a busy machine trains as far, but later."""
    torch.set_num_threads(1)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    random = np.random.default_rng(0)
    begun, told = time.process_time(), time.monotonic()
    step, losses = 0, list[float]()
    while (share := (time.process_time() - begun) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * (1 - share))
        loss = loss_of(model, [scene(step * BATCH + place) for place in range(BATCH)], random)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print(f"step {step}, {share:.0%}: loss {np.mean(losses[-50:]):.3f}", flush=True)
    model.eval().save_pretrained(folder)
    print(f"{step} steps of {BATCH} scenes, {sum(p.numel() for p in model.parameters()):,} parameters")


def loss_of(model: SamModel, scenes: list[Scene], random: np.random.Generator) -> torch.Tensor:
    """Return the loss of each prompt's best mask, and of the model's estimate of each mask's quality."""
    boxes = random.random() < BOXES
    asked, wanted = list[Any](), list[np.ndarray]()
    for each in scenes:
        chosen = each.masks_NHW[random.integers(len(each.masks_NHW), size=PROMPTS)]
        asked.append([box_of(mask) if boxes else [point_on(mask, random)] for mask in chosen])
        wanted.append(chosen)
    pixels = normalized(
        torch.from_numpy(np.stack([s.picture_HW3 for s in scenes])).permute(0, 3, 1, 2).float()
    )
    prompts: dict[str, Any] = {"input_boxes" if boxes else "input_points": torch.tensor(asked)}
    if not boxes:
        prompts["input_labels"] = torch.ones(len(scenes), PROMPTS, 1, dtype=torch.int32)
    out = model(pixel_values=pixels, multimask_output=not boxes, **prompts)
    logits_QMSS, scores_QM = out.pred_masks.flatten(0, 1), out.iou_scores.flatten(0, 1)
    true_QHW = torch.from_numpy(np.concatenate(wanted)).float()
    side = logits_QMSS.shape[-1]
    true_Q1SS = F.interpolate(true_QHW[:, None], (side, side), mode="area")
    each_QM = FOCAL_WEIGHT * focal(logits_QMSS, true_Q1SS) + dice(logits_QMSS, true_Q1SS)
    with torch.no_grad():
        inside, true = logits_QMSS > 0, true_Q1SS > 0.5
        both, either = (inside & true).sum((-2, -1)), (inside | true).sum((-2, -1))
        iou_QM = both / either.clamp(min=1)
    return each_QM.min(1).values.mean() + F.mse_loss(scores_QM, iou_QM)


def focal(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(Q, M), Lin et al., 2017, with the true share of a pixel."""
    true = true.expand_as(logits)
    chance = torch.sigmoid(logits)
    right = chance * true + (1 - chance) * (1 - true)
    plain = F.binary_cross_entropy_with_logits(logits, true, reduction="none")
    return ((1 - right) ** FOCUS * plain).mean((-2, -1))


def dice(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(Q, M): one minus twice the overlap over the sum of the areas."""
    chance = torch.sigmoid(logits)
    both, areas = (chance * true).sum((-2, -1)), chance.sum((-2, -1)) + true.sum((-2, -1))
    return 1 - (2 * both + 1) / (areas + 1)


def judge(models: list[str], count: int) -> None:
    """Mean IoU with the true masks of scenes that nobody was trained on, by a point on each object and by its box."""
    print("| model | objects | IoU by a point | by a box | best of a point's three |")
    print("|---|---|---|---|---|")
    for name in models:
        segmenter = tw.load(name).model if is_artifact(name) else tw.load_segmenter(name)
        random, found = np.random.default_rng(1), list[tuple[float, float, float]]()
        for seed in range(UNSEEN, UNSEEN + count):
            found += of_scene(segmenter, scene(seed), random)
        row = np.array(found)
        point, box, best = row.mean(0)
        print(f"| {name} | {len(row)} | {point:.4f} | {box:.4f} | {best:.4f} |", flush=True)


def of_scene(segmenter: Any, each: Scene, random: np.random.Generator) -> list[tuple[float, float, float]]:
    """(IoU by a point, by a box, of the best of the point's three masks) of each object."""
    from torchwright.models.segment.prompts import Prompt

    encoded, found = segmenter.encode(each.picture_HW3), []
    for true_HW in each.masks_NHW:
        prompt = Prompt(points=(point_on(true_HW, random),), inside=(True,))
        logits_1MSS, scores_1M = segmenter.decode(encoded, [prompt], several=True)
        three = [
            iou(segmenter.finished(encoded, logits, 0.0, ()).pixels_HW, true_HW) for logits in logits_1MSS[0]
        ]
        by_box = segmenter.mask(encoded, Prompt(box=box_of(true_HW))).pixels_HW
        found.append((three[int(scores_1M[0].argmax())], iou(by_box, true_HW), max(three)))
    return found


if __name__ == "__main__":
    main()
