"""A vision-language folder without weights, pictures of many kinds as files, and messages that bring them."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIDE = 28
"""Pixels of a picture's side for each token."""
MOST_TOKENS = 64
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TOKEN = 256 + WORDS.index("<|image_pad|>")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The form of Qwen2-VL: parts of a content one after the other, in any role."""


def write_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder of Qwen2.5-VL whose tokenizer knows bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*WORDS, "<|video_pad|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    pictures = Qwen2VLImageProcessorPil(min_pixels=SIDE**2, max_pixels=MOST_TOKENS * SIDE**2)
    tokenizer.save_pretrained(folder)
    pictures.save_pretrained(folder)
    image = made.token_to_id("<|image_pad|>")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "image_token_id": image}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def picture(
    width: int = 56, height: int = 56, *, form: str = "PNG", mode: str = "RGB", **options: Any
) -> bytes:
    """A file of a picture with some structure."""
    ramp = np.add.outer(np.arange(height), np.arange(width)) % 256
    image = Image.fromarray(ramp.astype(np.uint8)).convert(mode)
    return saved(image, form, **options)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part(content: bytes | str, **more: Any) -> dict[str, Any]:
    """A picture as a chat completion's message has it."""
    text = content if isinstance(content, str) else url(content)
    return {"type": "image_url", "image_url": {"url": text, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text(one) if isinstance(one, str) else one for one in parts]}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, *, rows: bytes = b"", more: bytes = b"", depth: int = 8, color: int = 2
) -> bytes:
    """A PNG whose head says what it likes."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + data + chunk(b"IEND", b"")


BOMBS: dict[str, Callable[[], bytes]] = {
    "png of 100 million pixels": lambda: png(10_000, 10_000, rows=bytes(30_010_000)),
    "png of 900 million pixels": lambda: png(30_000, 30_000, rows=bytes(90_000_000)),
    "png with a comment that swells": lambda: png(
        56, 56, rows=bytes(56 * 169), more=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000)))
    ),
    "png with a profile that swells": lambda: png(
        56, 56, rows=bytes(56), more=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(100_000_000)))
    ),
}
"""Made for their tests alone: the compression takes a second."""
