"""Pictures by URL: only from hosts that were named, only at public addresses, and within bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from http_support import error, serving
from picture_support import part, picture, user, write_folder

from torchwright.core.errors import WorkloadError
from torchwright.serve.api_error import ApiError
from torchwright.serve.command import _check_url_hosts  # pyright: ignore[reportPrivateUsage]
from torchwright.serve.http.fetching import PictureFetcher, look_up
from torchwright.serve.limits import MIB, Limits

PNG = picture(56, 56)
NAME = "pictures.test"
ADDRESSES = {
    "loopback": "127.0.0.1",
    "loopback elsewhere": "127.8.8.8",
    "this machine": "0.0.0.0",
    "private 10": "10.0.0.1",
    "private 172": "172.16.0.1",
    "private 192": "192.168.1.1",
    "link-local, where clouds keep keys": "169.254.169.254",
    "shared by carriers": "100.64.0.1",
    "multicast": "224.0.0.1",
    "multicast of the world": "233.252.0.1",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "documentation": "192.0.2.1",
    "benchmarking": "198.18.0.1",
    "IPv6 loopback": "::1",
    "IPv6 unspecified": "::",
    "IPv6 link-local": "fe80::1",
    "IPv6 unique local": "fd00:ec2::254",
    "IPv6 multicast": "ff02::1",
    "IPv6 documentation": "2001:db8::1",
    "mapped loopback": "::ffff:127.0.0.1",
    "mapped private": "::ffff:10.0.0.1",
    "6to4 private": "2002:0a00:0001::1",
    "NAT64 private": "64:ff9b::a00:1",
    "NAT64 link-local": "64:ff9b::a9fe:a9fe",
    "Teredo private": "2001:0:a00:1::1",
    "no address": "a-name",
}


class Answers(BaseHTTPRequestHandler):
    """A host of pictures; paths say what goes wrong."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["host"]))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        elif self.path == "/large":
            self._send(b"", 40 * MIB)
            for _ in range(40):
                self.wfile.write(bytes(MIB))
        elif self.path == "/slow":
            self._send(b"a", 100)
            threading.Event().wait(2)
        elif self.path == "/short":
            self._send(b"abc", 100)
        elif self.path == "/html":
            self._send(b"<html></html>", kind="text/html")
        elif self.path == "/noise":
            self.wfile.write(b"no HTTP at all\r\n\r\n")
        else:
            self._send(PNG, kind="application/octet-stream")

    def _send(self, body: bytes, length: int | None = None, kind: str = "image/png") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def pictures() -> Iterator[int]:
    """A host of pictures on this machine; its port."""
    Answers.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as host:
        host.handle_error = lambda request, client_address: None
        thread = threading.Thread(target=host.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield host.server_port
        finally:
            host.shutdown()
            thread.join()


async def looked_up(host: str, port: int) -> list[str]:
    """Look no name up: tests name the addresses."""
    raise AssertionError(f"{host} was looked up")


def fetch(
    hosts: list[str],
    *urls: str,
    limits: Limits | None = None,
    look_up: Any = looked_up,
    connect: Any = asyncio.open_connection,
) -> dict[str, bytes]:
    fetcher = PictureFetcher(hosts, limits or Limits().with_pictures(), look_up=look_up, connect=connect)

    async def run() -> dict[str, bytes]:
        async with fetcher.fetched(urls) as found:
            return found

    try:
        return asyncio.run(run())
    finally:
        assert fetcher._held == 0  # pyright: ignore[reportPrivateUsage]


class Names:
    """Every name has these addresses; `asked` are the names that were looked up."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.asked = list(addresses), list[str]()

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.addresses


@pytest.mark.parametrize("kind", ADDRESSES)
@pytest.mark.parametrize("public", [False, True], ids=["alone", "after a public one"])
def test_a_name_with_an_address_that_is_not_public_is_refused(kind: str, public: bool) -> None:
    async def connect(*place: Any, **options: Any) -> Any:
        raise AssertionError(f"connected to {place}")

    names = Names(*(["93.184.215.14"] if public else []), ADDRESSES[kind])
    for scheme in ("http", "https"):
        with pytest.raises(ApiError, match="which is not public") as caught:
            fetch([NAME], f"{scheme}://{NAME}/a.png", look_up=names, connect=connect)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8"]
)
def test_a_public_address_is_connected_to(address: str) -> None:
    names, connected = Names(address), list[tuple[Any, ...]]()

    async def connect(*place: Any, **options: Any) -> Any:
        connected.append((*place, options["server_hostname"]))
        raise ConnectionRefusedError("closed")

    with pytest.raises(ApiError, match="cannot be asked: closed"):
        fetch([NAME], f"https://{NAME.upper()}./a.png", look_up=names, connect=connect)
    assert names.asked == [NAME]
    assert connected == [(address, 443, NAME)]


def test_a_name_of_this_machine_is_looked_up_and_refused() -> None:
    with pytest.raises(ApiError, match=r"'localhost' has the address .*, which is not public"):
        fetch(["localhost"], "http://localhost/a.png", look_up=look_up)


def test_the_checked_address_is_asked_by_its_name() -> None:
    """A second look-up could lead elsewhere (DNS rebinding): there is none."""
    names, connected = Names("93.184.215.14"), set[str]()

    def connect(address: str, port: int, **options: Any) -> Any:
        connected.add(address)
        return asyncio.open_connection("127.0.0.1", port, **options)

    with pictures() as port:
        host = f"{NAME}:{port}"
        urls = (f"http://{host}/a%20b.png?c=d#e", f"http://{host}/other")
        found = fetch([host], *urls, look_up=names, connect=connect)
    assert list(found.values()) == [PNG, PNG]
    assert sorted(Answers.seen) == [("/a%20b.png?c=d", host), ("/other", host)]
    assert names.asked == [NAME, NAME]  # once for each of the URLs
    assert connected == set(names.addresses)


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ([], "http://pictures.test/a.png"),
        ([NAME], "http://other.test/a.png"),
        ([NAME], "http://pictures.test.evil.test/a.png"),
        ([NAME], "http://evil.test/pictures.test"),
        ([NAME], "http://evil.test#pictures.test"),
        ([NAME], "http://evil.test?pictures.test"),
        ([NAME], "http://pictures.test:22/a.png"),
        ([NAME], "https://pictures.test:80/a.png"),
        ([NAME], "http://a.pictures.test/a.png"),
        ([NAME], "http://127.0.0.1/a.png"),
        ([NAME], "http://[::1]/a.png"),
        ([NAME], "http://2130706433/a.png"),
        ([NAME], "http://0x7f.1/a.png"),
        ([f"{NAME}:8080"], "http://pictures.test/a.png"),
        (["127.0.0.1"], "http://127.0.0.2/a.png"),
        (["127.0.0.1:81"], "http://127.0.0.1/a.png"),
    ],
)
def test_a_host_that_was_not_named_is_refused_with_the_flag(hosts: list[str], url: str) -> None:
    with pytest.raises(ApiError, match="start the server with --allow-url") as caught:
        fetch(hosts, url)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "url",
    [
        "http://user@pictures.test/a.png",
        "http://pictures.test@evil.test/a.png",
        "http://evil.test\\@pictures.test/a.png",
        "http://pictures.test/a b.png",
        "http://pictures.test/a\r\nX: y",
        "http://pictures.test/é.png",
        "http:///a.png",
        "http://",
        "http://[::1/a.png",
        "http://pictures.test:99999/a.png",
        "http://pictures.test:x/a.png",
        "http://pictures.test/" + "a" * 9000,
    ],
)
def test_a_url_with_two_meanings_is_refused(url: str) -> None:
    with pytest.raises(ApiError) as caught:
        fetch([NAME, "evil.test"], url)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("redirect", "answered 302: redirects are not followed"),
        ("missing", "answered 404"),
        ("large", "sends more than 20971520 bytes"),
        ("slow", "has not sent the picture within 0.3 s"),
        ("short", "cannot be asked"),
        ("noise", "cannot be asked"),
    ],
)
def test_what_a_host_may_not_answer(path: str, words: str) -> None:
    limits = Limits(fetch_seconds=0.3 if path == "slow" else 20.0).with_pictures()
    with pictures() as port:
        here = f"127.0.0.1:{port}"
        with pytest.raises(ApiError, match=words) as caught:
            fetch([here], f"http://{here}/{path}", f"http://{here}/a.png", limits=limits)
        assert caught.value.status == 400
        assert [one for one, _ in Answers.seen if one == "/picture.png"] == []


def test_pictures_of_a_request_and_of_all_are_bounded() -> None:
    with pictures() as port:
        here = f"127.0.0.1:{port}"
        urls = [f"http://{here}/{number}" for number in range(4)]
        with pytest.raises(ApiError, match=r"pictures have more than .* bytes together"):
            fetch([here], *urls, limits=Limits(body_bytes=3 * len(PNG)))
        with pytest.raises(ApiError) as caught:
            fetch([here], *urls, limits=Limits(bodies_bytes=3 * len(PNG)))
        assert caught.value.status == 429


def test_a_few_are_fetched_at_the_same_time() -> None:
    running, most = 0, 0

    class Writer:
        def write(self, data: bytes) -> None: ...

        def close(self) -> None:
            nonlocal running
            running -= 1

    async def connect(*_: Any, **__: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        reader.feed_eof()
        return reader, Writer()

    urls = [f"http://127.0.0.1/{number}" for number in range(50)]
    assert set(fetch(["127.0.0.1"], *urls, limits=Limits(fetches=3), connect=connect).values()) == {b""}
    assert (most, running) == (3, 0)


@pytest.mark.parametrize("host", ["http://a.test", "a.test/path", "user@a.test", "", "a b", "*.a.test"])
def test_a_host_that_no_url_has_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(WorkloadError, match="--allow-url"):
        _check_url_hosts([host])
    _check_url_hosts(["a.test", "a.test:8080", "10.0.0.5", "[fd00::5]:80"])


@pytest.mark.slow
def test_a_request_with_urls_is_answered(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_folder(tmp_path_factory.mktemp("vision"))
    with pictures() as port:
        here = f"127.0.0.1:{port}"
        with (
            serving(folder=folder, picture_hosts=[here]) as running,
            httpx.Client(base_url=running.url, timeout=60) as http,
        ):
            asked = {"messages": [user(part(f"HTTP://{here}/a.png"), part(PNG))]}
            found = http.post("/tokenize", json=asked).json()
            by_data = http.post("/tokenize", json={"messages": [user(part(PNG), part(PNG))]}).json()
            assert found["tokens"] == by_data["tokens"]
            assert http.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).status_code == 200
            for url, words in {
                f"http://{here}/html": "no picture that can be read",
                f"http://{here}/redirect": "redirects are not followed",
                "http://169.254.169.254/latest/meta-data/": "--allow-url 169.254.169.254",
                "https://example.com/a.png": "--allow-url example.com",
            }.items():
                response = http.post("/v1/chat/completions", json={"messages": [user(part(url))]})
                assert response.status_code == 400
                assert words in error(response)["message"]
            source = {"type": "url", "url": f"http://{here}/a.png"}
            message = {"role": "user", "content": [{"type": "image", "source": source}]}
            response = http.post("/v1/messages", json={"max_tokens": 1, "messages": [message]})
            assert response.status_code == 200
