"""RUN.toml of the kinds "image-classification", "speech" and "vision-language", checked before anything is built (no
torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from torchwright.hub.folder import read_config_file
from torchwright.models.vision.reader import takes_pictures
from torchwright.train.layout import Layout
from torchwright.train.run.config.data_section import RunError, Section
from torchwright.train.run.config.run import Adapters, HeldOut, Positive, Rate, SampleRun, Share
from torchwright.train.run.config.run_file import parse_file, read_toml

PAGE = "docs/train.md"
IMAGES, SPEECH, VISION = "image-classification", "speech", "vision-language"
Kind = Literal["image-classification", "speech", "vision-language"]
FREE = (
    *("samples", "evaluation", "checkpoint", "layout", "threads", "out", "timeout_s", "log_every", "wandb"),
    "data.strict",
)
"""Settings that may change when a run is continued; any other change makes a different run."""


AnyMedia = TypeVar("AnyMedia", bound="MediaRun")


class Model(Section):
    """The model to train."""

    folder: str
    """A Hugging Face folder whose weights the run starts from."""


class MediaData(Section):
    """The data of all kinds."""

    train: list[str] = Field(min_length=1)
    validation: list[str] = Field(default=[])
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of the training samples that is held out in place of `validation`, 512 at the most, drawn by `seed`."""
    strict: bool = False
    """Stop at a broken file; by default it is counted, reported and left out."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of samples, of what is random in them and of what is held out."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.validation and self.hold_out is not None:
            raise ValueError("give either `validation` or `hold_out`")
        return self

    @property
    def validates(self) -> bool:
        """Check whether anything is held out."""
        return bool(self.validation) or self.hold_out is not None


class ImageData(MediaData):
    """Pictures and their classes."""

    train: list[str] = Field(min_length=1)
    """Folders with a subfolder for each class; tables (JSONL, Parquet, Arrow, CSV) with columns image and label."""
    labels: Annotated[list[str], Field(min_length=2)] | None = None
    """The classes in their order; by default the model's own, or those that the training data name, sorted."""
    image_column: str = "image"
    label_column: str = "label"
    augment: list[Literal["crop", "flip"]] = Field(default=[])
    """Random augmentations of training pictures: a crop, and a horizontal flip."""


class SpeechData(MediaData):
    """Sounds and what is said in them."""

    train: list[str] = Field(min_length=1)
    """Manifests (JSONL, Parquet, Arrow, CSV) with columns audio and text, and where there are several a language."""
    audio_column: str = "audio"
    text_column: str = "text"
    language_column: str = "language"
    language: str = "en"
    """Language of rows that name none."""
    timestamps: bool = True
    """Put the text between timestamps of the recording's start and end."""


class ChatData(MediaData):
    """Conversations about pictures."""

    train: list[str] = Field(min_length=1)
    """Tables (JSONL, Parquet, Arrow) with a column of messages, and one of the pictures that these show."""
    messages_column: str = "messages"
    images_column: str = "images"
    context: Positive = 2048
    """Tokens of a conversation with its pictures at most; a longer one is left out."""


class MediaOptimizer(Section):
    """The optimizer: AdamW."""

    lr: Rate = 1e-4
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of matrices; norms and biases have none."""


class MediaLora(Adapters):
    """Adapters on the layers of the model's blocks; a classifier's head is trained whole.

    Both are written: `adapter/` in peft's format, and `model/` with the adapters in its weights.
    """


class Schedule(Section):
    """The factor on the peak learning rate."""

    name: Literal["cosine", "wsd"] = "cosine"
    warmup_samples: int = Field(default=0, ge=0)
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`wsd`: share of all steps over which the rate falls at the end."""
    final: Share = 0.0
    """The factor of the last step."""


class MediaEvaluation(HeldOut):
    """The evaluation on held-out samples."""

    samples: Positive = 10_000
    """Held-out samples of one evaluation, at most."""


class SpeechEvaluation(MediaEvaluation):
    """The same, and what the trained model makes of held-out sounds when the run has ended."""

    transcribed: int = Field(default=32, ge=0)
    """Held-out sounds whose word error rate is taken at the end, at most."""


class MediaRun(SampleRun):
    """The fields of all kinds."""

    kind: Kind
    micro_batches: Positive = 1
    """Pieces in which each process computes its samples."""
    clip: Rate | None = 1.0
    """The largest norm of all gradients together; false in the file turns clipping off."""
    precision: Literal["fp32", "bf16"] = "bf16"
    model: Model
    optimizer: MediaOptimizer = MediaOptimizer()
    schedule: Schedule = Schedule()
    lora: MediaLora | None = None
    layout: dict[str, int] = Field(default_factory=dict)
    """dp_replicate and dp_shard."""
    data: ImageData | SpeechData | ChatData
    evaluation: MediaEvaluation = MediaEvaluation()

    @property
    def parallel(self) -> Layout:
        """The layout; raises `UnknownName` or `LayoutError`."""
        return Layout.from_degrees(self.layout)

    def check_processes(self, world: int) -> None:
        self.parallel.check_processes(world)


class ImageRun(MediaRun):
    """An image classifier's run file."""

    kind: Literal["image-classification"]
    data: ImageData


class SpeechRun(MediaRun):
    """A speech recognizer's run file."""

    kind: Literal["speech"]
    data: SpeechData
    evaluation: SpeechEvaluation = SpeechEvaluation()


class VisionRun(MediaRun):
    """The run file of a model that answers text about pictures; its adapters are on the language model."""

    kind: Literal["vision-language"]
    data: ChatData


AnyRun = ImageRun | SpeechRun | VisionRun
RUNS: dict[str, type[AnyRun]] = {IMAGES: ImageRun, SPEECH: SpeechRun, VISION: VisionRun}


def media_kind(folder: Path) -> Kind | None:
    """Which of the kinds trains a folder's model, as its configuration names it."""
    if takes_pictures(folder):
        return "vision-language"
    path = folder / "config.json"
    told = read_config_file(path) if path.is_file() else {}
    if told.get("model_type") == "whisper":
        return "speech"
    names: Any = told.get("architectures")
    pictures = isinstance(names, list) and any(str(name).endswith("ForImageClassification") for name in names)
    return "image-classification" if pictures else None


def read_images(path: Path) -> ImageRun:
    """The run of a file. Raises `RunError`, or `UnknownName` with the nearest field, naming file and key."""
    return _parsed(ImageRun, read_toml(path), str(path))


def read_speech(path: Path) -> SpeechRun:
    """Read a speech run file, as `read_images` does for pictures."""
    return _parsed(SpeechRun, read_toml(path), str(path))


def read_vision(path: Path) -> VisionRun:
    """Read the run file of a vision-language model, as `read_images` does for pictures."""
    return _parsed(VisionRun, read_toml(path), str(path))


def parse_media(data: dict[str, object], source: str) -> AnyRun:
    """A run of any of the kinds from plain data; `source` is named in errors."""
    return _parsed(RUNS[str(data["kind"])], data, source)


def _parsed(kind: type[AnyMedia], data: dict[str, object], source: str) -> AnyMedia:
    if data.get("clip") is False:  # TOML has no null
        data = {**data, "clip": None}
    run = parse_file(kind, data, source, PAGE)
    check_media(run)
    return run


def check_media(run: MediaRun) -> None:
    """Raise `RunError` or `LayoutError` for values that do not fit together."""
    layout = run.parallel
    ways = layout.batch_ways * run.micro_batches
    if layout.pp * layout.cp * layout.tp * layout.ep > 1:
        raise RunError(
            f"a run of kind {run.kind} divides samples over processes, not layers",
            found=str(layout),
            allowed="dp_replicate and dp_shard",
        )
    if run.batch % ways:
        raise RunError(
            f"batch={run.batch} cannot be divided",
            found=f"{layout.batch_ways} parts of the batch (dp_replicate x dp_shard) x {run.micro_batches} "
            f"micro-batches = {ways}",
            next=f"use a multiple of {ways}, or fewer micro_batches",
        )
    if isinstance(run, VisionRun) and run.lora is None:
        raise RunError(
            f"a run of kind {run.kind} trains adapters of the language model", next="add [lora], or --lora"
        )
    if run.evaluation.every_steps and not run.data.validates:
        raise RunError(
            "evaluation.every_steps is set, but there is nothing to evaluate",
            next="set data.validation or data.hold_out",
        )
