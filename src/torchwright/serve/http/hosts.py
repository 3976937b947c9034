"""Host and Origin checks of a server without a key, so that no web page reaches it from a local browser.

A page may lead its own name to 127.0.0.1 (DNS rebinding), and then read what a server there answers: its requests name
the page's host. A page of another site may send requests without reading the answers: they name the page as Origin.
An address as Host is nobody's name, and a request without either header comes from no browser.

Pages of this machine, and those that are allowed by name, also read the answers: browsers ask for that by the headers
of CORS, before a request (the preflight) and in its answer.
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
EXPOSED = "x-request-id, x-torchwright-ignored, x-torchwright-notices, retry-after"
"""Headers of answers that a page's script may read."""
PREFLIGHT_SECONDS = "600"
"""Lifetime of a preflight's answer in a browser: Chromium allows at most two hours, and a server is restarted."""
Pairs = list[tuple[bytes, bytes]]


class Hosts:
    """This machine's names and the names of pages that may call the server.

    `names` and `origins` add to them; both may be patterns, such as *.example.com and https://*.example.com.
    """

    def __init__(self, names: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._patterns = [name.lower() for name in (*LOOPBACK_NAMES, socket.gethostname(), *names)]
        self._origins = [origin.lower().rstrip("/") for origin in origins]

    def check(self, headers: Headers) -> None:
        """Raise `ApiError` (403) for a request to another host's name, or from another host's page."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(f"//{host}")
        if host and _address(name) is None and not self._knows(name):
            raise _refused(f"the host '{host}' is none of this server's names", f"--allowed-host {name}")
        if origin is None or origin.partition("://")[2] == host or self._allows(origin):
            return
        raise _refused(f"the page {origin} is not this server's", f"--allowed-origin {origin}")

    def cors(self, headers: Headers) -> Pairs:
        """Return the headers by which a browser lets an allowed page read the answer."""
        origin = headers.get("origin")
        if origin is None or not self._allows(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

    def preflight(self, headers: Headers) -> Pairs:
        """Return the further headers of a preflight's answer; empty unless an allowed page sent the preflight."""
        if "access-control-request-method" not in headers or not self.cors(headers):
            return []
        asked = headers.get("access-control-request-headers", "")
        answer = {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": asked,
            "access-control-max-age": PREFLIGHT_SECONDS,
        }
        if headers.get("access-control-request-private-network") == "true":
            answer["access-control-allow-private-network"] = "true"
        return [(name.encode(), value.encode("latin-1")) for name, value in answer.items()]

    def _allows(self, origin: str) -> bool:
        """Check whether a page's origin is this machine's, or one that was allowed; `null` is one by name alone."""
        if any(fnmatchcase(origin.lower(), pattern) for pattern in self._origins):
            return True
        page = _name(origin)
        address = _address(page)
        return address.is_loopback if address else bool(page) and self._knows(page)

    def _knows(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def _name(url: str) -> str:
    """Return the host of a URL, or an empty string."""
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
