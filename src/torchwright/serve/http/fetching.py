"""Pictures of http and https URLs, fetched from hosts that the server's owner named, and from nowhere else.

A client chooses the URL, so that it could make the server ask machines that only the server reaches (SSRF). A host's
name is therefore resolved once, every address that it has must be public, and the connection is made to one of these
addresses. An answer that leads elsewhere (a redirect) is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

import h11

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import INPUT_PICTURE_BYTES, Limits

PORTS = {"http": 80, "https": 443}
URL_CHARACTERS = 8192
READ_BYTES = 64 * 1024
AGENT = "torchwright"
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are those of an IPv4 address."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LookUp = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Called as `asyncio.open_connection`: with an address, a port, `ssl` and `server_hostname`."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The host, the port and the path of a URL."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def name(self) -> str:
        """The host as a request names it, and errors: with its port where that is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host's name; raise `OSError` or `UnicodeError` for a name that has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PictureFetcher:
    """Fetches pictures for all requests: a few at the same time, with bounds on size and time."""

    def __init__(
        self,
        hosts: Sequence[str],
        limits: Limits,
        *,
        look_up: LookUp = look_up,
        connect: Connect = asyncio.open_connection,
    ) -> None:
        """`look_up` gives the addresses of a host's name; `connect` is called with one that was checked."""
        self._hosts, self._limits = frozenset(map(str.lower, hosts)), limits
        self._look_up, self._connection = look_up, connect
        self._places = asyncio.Semaphore(limits.fetches)
        self._held = 0
        """Bytes of pictures whose requests have not been read."""

    @contextlib.asynccontextmanager
    async def fetched(self, urls: Sequence[str]) -> AsyncIterator[dict[str, bytes]]:
        """Yield the content of each URL; its memory is accounted for until the block ends.

        Raises `ApiError`: 400 for a URL that is not allowed or does not lead to a file, 429 where too much is fetched.
        """
        targets = [self._target(url) for url in urls]  # before any of them is asked
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            if held + count > self._limits.body_bytes:
                raise invalid(
                    f"the request's pictures have more than {self._limits.body_bytes} bytes together"
                )
            if self._held + count > self._limits.bodies_bytes:
                raise ApiError(
                    429, "too many pictures are fetched", code="queue_full", headers={"Retry-After": "1"}
                )
            held, self._held = held + count, self._held + count

        try:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._content(target, hold)) for target in targets]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            yield {url: task.result() for url, task in zip(urls, tasks, strict=True)}
        finally:
            self._held -= held

    def _target(self, url: str) -> Target:
        """Return where a URL leads; raise `ApiError` (400), which names the flag, for one that is not allowed."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise _refused(f"the URL cannot be read: {error}") from None
        scheme = parts.scheme.lower()
        written = url.isascii() and url.isprintable() and " " not in url and len(url) <= URL_CHARACTERS
        if not written or not host or "@" in parts.netloc or "\\" in parts.netloc:
            raise _refused("the URL has no host alone, or other characters than URLs have")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = Target(scheme=scheme, host=host, port=port or PORTS[scheme], path=path)
        if target.name not in self._hosts and f"{target.name}:{target.port}" not in self._hosts:
            raise _refused(f"'{target.name}' is not allowed: start the server with --allow-url {target.name}")
        return target

    async def _content(self, target: Target, hold: Callable[[int], None]) -> bytes:
        seconds = self._limits.fetch_seconds
        async with self._places:
            try:
                async with asyncio.timeout(seconds):
                    reader, writer = await self._connect(target)
                    try:
                        return await self._answer(target, reader, writer, hold)
                    finally:
                        writer.close()
            except TimeoutError:
                raise _refused(f"'{target.name}' has not sent the picture within {seconds:g} s") from None
            except (OSError, h11.ProtocolError) as error:
                raise _refused(
                    f"'{target.name}' cannot be asked: {str(error) or type(error).__name__}"
                ) from None

    async def _answer(
        self,
        target: Target,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hold: Callable[[int], None],
    ) -> bytes:
        """Ask and return the answer's body; `hold` is given the size of each piece."""
        connection, content = h11.Connection(h11.CLIENT), bytearray()
        headers = [
            ("Host", target.name),
            ("User-Agent", AGENT),
            ("Accept", "image/*, video/*"),
            ("Connection", "close"),
        ]
        asked = h11.Request(method="GET", target=target.path, headers=headers)
        writer.write((connection.send(asked) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response) and event.status_code != 200:
                where = ": redirects are not followed" if 300 <= event.status_code < 400 else ""
                raise _refused(f"'{target.name}' answered {event.status_code}{where}")
            elif isinstance(event, h11.Data):
                hold(len(event.data))
                content += event.data
                if len(content) > INPUT_PICTURE_BYTES:
                    raise _refused(f"'{target.name}' sends more than {INPUT_PICTURE_BYTES} bytes")
        return bytes(content)

    async def _connect(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an address that was checked; the name is not looked up a second time."""
        addresses = [target.host] if _address(target.host) else await self._resolved(target)
        encrypted = self._encryption if target.scheme == "https" else None
        fault: OSError = OSError("it has no address")
        for address in addresses:
            try:
                return await self._connection(
                    address,
                    target.port,
                    ssl=encrypted,
                    server_hostname=target.host if encrypted else None,
                )
            except OSError as error:
                fault = error
        raise fault

    async def _resolved(self, target: Target) -> list[str]:
        """Return the addresses of a host's name; raises `ApiError` (400) where one of them is not public."""
        try:
            addresses = await self._look_up(target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise OSError(f"its name is not known ({error})") from None
        for text in addresses:
            address = _address(text)
            if address is None or not is_public(address):
                raise _refused(f"'{target.name}' has the address {text}, which is not public")
        return addresses

    @cached_property
    def _encryption(self) -> ssl.SSLContext:
        return ssl.create_default_context()


def is_public(address: Address) -> bool:
    """Check that an address is one of the public internet, and an address inside an IPv6 one too."""
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo or ()
        inner = [address.ipv4_mapped, address.sixtofour, *teredo]
        if address in NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        known = [one for one in inner if one is not None]
        if known:
            return all(map(is_public, known))
    return address.is_global and not address.is_multicast and not address.is_reserved


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _refused(reason: str) -> ApiError:
    return invalid(f"a picture's URL cannot be used: {reason}", code="invalid_image_url")
