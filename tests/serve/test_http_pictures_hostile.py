"""Pictures of unfriendly clients: each is refused with a 400 that says why, and the server lives."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from http_support import Running, error, serving
from picture_support import part, picture, png, saved, url, user, write_folder
from PIL import Image, features

from torchwright.serve.api_error import ApiError
from torchwright.serve.limits import INPUT_PICTURE_BYTES
from torchwright.serve.openai.conversation import Tools
from torchwright.serve.openai.language import Language, Prompts, load_language
from torchwright.serve.openai.parts import Message
from torchwright.serve.openai.picture_prompt import prompt_of

NONE = Tools(functions=(), choice="none")

PNG = picture(56, 84)
B64 = base64.b64encode(PNG).decode()


def bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b"\x2c" + bytes(9) + b"\x02\x00\x3b"


def tiff(tags: list[tuple[int, int, int, int]]) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", len(tags)) + entries + bytes(4)


def flipped(content: bytes, seed: int) -> bytes:
    """The file with bytes of its middle changed."""
    draw, damaged = random.Random(seed), bytearray(content)
    for at in draw.sample(range(16, len(content)), 24):
        damaged[at] ^= draw.randrange(1, 256)
    return bytes(damaged)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="56" height="56"><script>alert(1)</script></svg>'
FORMS = {form: picture(200, 200, form=form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")}
FILES: dict[str, bytes] = {
    "nothing": b"\0",
    "letters": b"abc",
    "zeros": bytes(1000),
    "random": random.Random(0).randbytes(10_000),
    "svg": SVG,
    "svg with a declaration": b"<?xml version='1.0'?>" + SVG,
    "svgz": zlib.compress(SVG),
    "html": b"<!doctype html><html><img src=x></html>",
    "json": b'{"error": "not found"}',
    "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 56 56\n(x) run\n",
    "zip": b"PK\x03\x04" + bytes(60),
    "elf": b"\x7fELF" + bytes(60),
    "mp4": b"\0\0\0\x18ftypisom" + bytes(60),
    "heic without content": b"\0\0\0\x18ftypheic" + bytes(60),
    "avif without content": b"\0\0\0\x18ftypavif" + bytes(60),
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60),
    "psd": b"8BPS\0\x01" + bytes(60),
    "ico": b"\0\0\x01\0\x01\0\x10\x10" + bytes(60),
    "ppm": b"P6 56 56 255\n" + bytes(56 * 56 * 3),
    "xbm": b"#define a_width 56\n#define a_height 56\nstatic char a_bits[] = {0};",
    "png's magic alone": PNG[:8],
    "png without a head": PNG[:8] + PNG[33:],
    "png without data": png(56, 56, rows=b""),
    "png with too few rows": png(56, 56, rows=bytes(100)),
    "png of no width": png(0, 56, rows=bytes(56)),
    "png of no height": png(56, 0),
    "png of no size": png(0, 0),
    "png of one pixel": png(1, 1, rows=bytes(4)),
    "png of two thin rows": png(4000, 2, rows=bytes(24_002)),
    "png of huge sides": png(2**31 - 1, 2**31 - 1),
    "png of negative sides": png(2**32 - 1, 2**32 - 1),
    "png of a huge width": png(100_000_000, 8),
    "png of 81 million pixels": png(9000, 9001),
    "png of a wrong depth": png(56, 56, rows=bytes(9520), depth=7),
    "png of a wrong color": png(56, 56, rows=bytes(9520), color=5),
    "png with a wrong check": PNG[:30] + bytes([PNG[30] ^ 1]) + PNG[31:],
    "bmp of huge sides": bmp(2**31 - 1, 2**31 - 1),
    "bmp of negative sides": bmp(-56, 56),
    "bmp of no size": bmp(0, 0),
    "bmp without rows": bmp(56, 56),
    "bmp's magic alone": b"BM",
    "gif of 65,535": gif(65_535, 65_535),
    "gif of no size": gif(0, 0),
    "gif of one pixel": gif(1, 1),
    "gif's magic alone": b"GIF89a",
    "jpeg's magic alone": b"\xff\xd8\xff",
    "jpeg of 65,535": FORMS["JPEG"].replace(struct.pack(">HH", 200, 200), b"\xff\xff\xff\xff", 1),
    "jpeg of no size": FORMS["JPEG"].replace(struct.pack(">HH", 200, 200), bytes(4), 1),
    "jpeg of markers": b"\xff\xd8" + b"\xff\xe1\x00\x02" * 10_000,
    "webp's magic alone": b"RIFF\x04\0\0\0WEBP",
    "webp of a wrong length": b"RIFF\xff\xff\xff\xffWEBPVP8 \xff\xff\xff\xff" + bytes(20),
    "webp lossless of 16,384": b"RIFF\x20\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xff\xff\xff\x0f" + bytes(10),
    "tiff without tags": tiff([]),
    "tiff that names itself": b"II*\x00\x08\x00\x00\x00\x00\x00\x08\x00\x00\x00",
    "tiff far away": b"II*\x00\xff\xff\xff\xff",
    "tiff of huge sides": tiff([(256, 4, 1, 2**31), (257, 4, 1, 2**31), (258, 3, 1, 8), (262, 3, 1, 1)]),
    "tiff with strips far away": tiff(
        [
            (256, 3, 1, 56),
            (257, 3, 1, 56),
            (258, 3, 1, 8),
            (262, 3, 1, 1),
            (273, 4, 1, 2**31),
            (279, 4, 1, 99),
        ]
    ),
    "tiff of many tags": b"II*\x00\x08\x00\x00\x00\xff\xff" + bytes(12) * 100,
    "numbers without a white": saved(Image.fromarray(np.ones((56, 56), np.float32)), "TIFF"),
    "32 bits without a white": saved(Image.fromarray(np.ones((56, 56), np.int32)), "TIFF"),
    "sides of 1 to 300": picture(3000, 10),
    "small": picture(7, 56),
}
FILES |= {
    f"{form} cut in the middle": content[: len(content) // 2]
    for form, content in FORMS.items()
    if form != "JPEG"
}
FILES |= {
    f"{form} without its end": content[:-40] for form, content in FORMS.items() if form in ("PNG", "BMP")
}
FILES |= {f"{form} cut after its head": content[:40] for form, content in FORMS.items()}
if features.check("avif"):
    FILES["avif without its picture"] = picture(56, 84, form="AVIF")[:-200] + bytes(200)
URLS: dict[str, str] = {
    "no URL": "picture.png",
    "base64 alone": B64,
    "data without anything": "data:",
    "data without a comma": f"data:image/png;base64{B64}",
    "data without base64": f"data:image/png,{B64}",
    "percent-encoded": "data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'/%3E",
    "percent-encoded base64": "data:image/png;base64," + B64.replace("=", "%3D").replace("+", "%2B") + "%0A",
    "base64 with other letters": "data:image/png;base64,!!!!" + B64,
    "base64 for URLs": "data:image/png;base64,-_-_-_-_",
    "base64 with one letter too many": "data:image/png;base64,A",
    "base64 with its end in the middle": "data:image/png;base64,AAAA====AAAA",
    "base64 of words": "data:image/png;base64,éééé",
    "nothing": "data:image/png;base64,",
    "twice encoded": "data:image/png;base64," + base64.b64encode(B64.encode()).decode(),
    "a URL in a URL": f"data:image/png;base64,{url(PNG)}",
    "a charset": f"data:text/plain;charset=utf-8,{B64}",
    "a local file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "ftp": "ftp://example.com/a.png",
    "blob": "blob:https://example.com/1",
    "script": "javascript:alert(1)",
    "a scheme without more": "http:",
    "a host's start": "//example.com/a.png",
    "too large": "data:image/png;base64," + "A" * (INPUT_PICTURE_BYTES * 4 // 3 + 8),
}
assert len(FILES) + len(URLS) >= 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def language(folder: Path) -> Language:
    return load_language(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def ask(http: httpx.Client, *parts: bytes | str) -> httpx.Response:
    body = {"messages": [user("a", *map(part, parts))], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body)


def read(language: Language, *parts: bytes | str) -> Prompts:
    """Read a message as the server's process for that does, in this one."""
    message = Message.model_validate(user("a", *map(part, parts)))
    return prompt_of(language, [message], NONE, "messages")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_usable_picture_is_refused(language: Language, name: str) -> None:
    with pytest.raises(ApiError, match=r"picture 2 cannot be used|memory") as found:
        read(language, PNG, FILES[name])
    assert (found.value.status, found.value.code) == (400, "invalid_image")


@pytest.mark.parametrize("name", URLS)
def test_a_url_that_holds_no_picture_is_refused(language: Language, name: str) -> None:
    with pytest.raises(ApiError) as found:
        read(language, URLS[name])
    assert (found.value.status, found.value.code) == (400, "invalid_image")
    assert len(found.value.message) < 600


@pytest.mark.slow  # `test_http_pictures` asks a server for a few of each
@pytest.mark.parametrize("name", [*FILES, *URLS])
def test_the_server_refuses_them_too(http: httpx.Client, name: str) -> None:
    response = ask(http, PNG, FILES[name] if name in FILES else URLS[name])
    assert response.status_code == 400, response.text
    found = error(response)
    assert found["code"] in ("invalid_image", "request_limit")
    assert "picture 2 cannot be used" in found["message"] or "memory" in found["message"]


@pytest.mark.slow
def test_damaged_files_are_refused_or_read(http: httpx.Client) -> None:
    statuses = set[int]()
    for form, content in FORMS.items():
        for seed in range(6):
            statuses.add(ask(http, flipped(content, seed)).status_code)
            assert statuses <= {200, 400}, (form, seed)
    assert statuses == {200, 400}


@pytest.mark.slow
def test_a_million_urls_are_refused_before_any_is_read(http: httpx.Client) -> None:
    few = '{"type":"image_url","image_url":"data:image/png;base64,AA"}'
    for count in (1000, 1_000_000 // 40):
        parts = ",".join([few] * 1000)
        messages = ",".join(['{"role":"user","content":[' + parts + "]}"] * max(1, count // 1000))
        body = ('{"messages":[' + messages + "]}").encode()
        response = http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert "at most 64 are read" in error(response)["message"]
    text = "data:image/png;base64,AA" * 1_000_000
    assert ask(http, text).status_code == 400


EXIF = Image.Exif()
EXIF[0x0112] = 6
GOOD: dict[str, bytes] = {
    "cmyk": picture(56, 84, form="JPEG", mode="CMYK"),
    "grey": picture(56, 84, mode="L"),
    "one bit": picture(56, 84, mode="1"),
    "a palette": picture(56, 84, mode="P"),
    "a palette with alpha": picture(56, 84, mode="P", transparency=b"\0\x80" * 128),
    "grey with alpha": picture(56, 84, mode="LA"),
    "rgba": picture(56, 84, mode="RGBA"),
    "16 bits": saved(Image.fromarray(np.full((84, 56), 40_000, np.uint16)), "PNG"),
    "animated": saved(
        Image.new("P", (56, 84)), "GIF", save_all=True, append_images=[Image.new("P", (56, 84), 1)] * 9
    ),
    "animated webp": saved(
        Image.new("RGB", (56, 84)), "WEBP", save_all=True, append_images=[Image.new("RGB", (56, 84), "red")]
    ),
    "rotated": picture(84, 56, form="JPEG", exif=EXIF),
    "progressive": picture(56, 84, form="JPEG", progressive=True),
    "webp": picture(56, 84, form="WEBP"),
    "tiff": picture(56, 84, form="TIFF"),
    "bmp": picture(56, 84, form="BMP"),
}


@pytest.mark.parametrize("name", GOOD)
def test_rare_but_good_pictures_are_read(language: Language, name: str) -> None:
    [found] = read(language, GOOD[name]).pictures
    assert found.tokens == 6


@pytest.mark.parametrize(
    "text",
    [
        url(PNG),
        url(PNG, "image/jpeg"),  # the file itself says what it is
        url(PNG, "text/html"),
        url(PNG, ""),
        url(PNG, "image/png;charset=utf-8"),
        url(PNG).replace("data:", "DATA:").replace("base64", "BASE64"),
        url(PNG).rstrip("="),
        "data:image/png;base64,\n" + "\r\n".join(B64[at : at + 76] for at in range(0, len(B64), 76)) + "\n",
    ],
)
def test_clients_spellings_of_a_data_url(language: Language, text: str) -> None:
    [found] = read(language, text).pictures
    assert found.tokens == 6


@pytest.mark.slow
def test_the_server_lives(http: httpx.Client, server: Running) -> None:
    """After all of the above."""
    assert server.service.client.restarts == 0
    assert ask(http, PNG).status_code == 200
