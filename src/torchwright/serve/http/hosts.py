"""Which names a server without a key answers to, so that no web page reaches it from a browser beside it.

A page may lead its own name to 127.0.0.1 (DNS rebinding), and then read what a server there answers: its requests name
the page's host. A page of another site may send requests without reading the answers: they name the page as Origin.
An address as Host is nobody's name, and a request without either header comes from no browser.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from torchwright.serve.api_error import ApiError

LOOPBACK_NAMES = ("localhost", "*.localhost")


class Hosts:
    """This machine's names, and those that `names` add, which may be patterns such as *.example.com."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._patterns = [name.lower() for name in (*LOOPBACK_NAMES, socket.gethostname(), *names)]

    def check(self, headers: Headers) -> None:
        """Raise `ApiError` (403) for a request to another host's name, or from another host's page."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(f"//{host}")
        if host and _address(name) is None and not self._knows(name):
            raise _refused(f"the host '{host}' is none of this server's names", f"--allowed-host {name}")
        if origin is None or origin.partition("://")[2] == host:
            return
        page = _name(origin)
        address = _address(page)
        if not (address.is_loopback if address else self._knows(page)):
            raise _refused(f"the page {origin} is not this server's", f"--allowed-host {page}")

    def _knows(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def _name(url: str) -> str:
    """The host of a URL, empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _refused(what: str, flag: str) -> ApiError:
    return ApiError(
        403, f"{what}; start it with {flag}, or with an API key, to allow this", code="host_not_allowed"
    )
