"""Options of a fleet: its replicas, and how the gateway routes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from torchwright.core.errors import WorkloadError
from torchwright.serve.options import ServerOptions

Policy = Literal["cache_aware", "round_robin", "power_of_two", "least_load", "random"]
POLICIES = get_args(Policy)
LOOPBACK = "127.0.0.1"
METRICS_PORT = 29000
"""The gateway's own default for its figures, so that a scraper's configuration needs no change."""
MOST_REPLICAS = 1024
"""More addresses than that are a mistake: the gateway's own queue of registrations holds a thousand."""
PLACE = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A number of servers on this machine, or the places of servers elsewhere."""

    count: int = 0
    places: tuple[str, ...] = ()
    """HOST:PORT of each."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `4` or `hostA:8000,hostB:8000`; raises `WorkloadError` for anything else."""
        if re.fullmatch(r"[0-9]{1,4}", text):
            if not 1 <= int(text) <= MOST_REPLICAS:
                raise WorkloadError(f"--replicas {text}", allowed=f"1 to {MOST_REPLICAS}")
            return cls(count=int(text))
        places = tuple(text.split(","))
        wrong = [place for place in places if not _is_place(place)]
        if wrong or len(places) > MOST_REPLICAS:
            raise WorkloadError(
                f"--replicas {text}",
                found=f"{len(places)} places" if not wrong else f"'{wrong[0]}'",
                allowed=f"a number of servers here, such as 2, or at most {MOST_REPLICAS} servers elsewhere, such as "
                "hostA:8000,hostB:8000",
            )
        twice = [place for place in dict.fromkeys(places) if places.count(place) > 1]
        if twice:
            raise WorkloadError(f"--replicas names {twice[0]} twice")
        return cls(places=places)


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The settings of `torchwright serve --replicas`."""

    server: ServerOptions
    """The settings of each replica; host and port are the gateway's."""
    replicas: Replicas
    policy: Policy = "cache_aware"
    metrics_port: int = METRICS_PORT
    """0 takes a free one, which is printed."""


def _is_place(text: str) -> bool:
    found = PLACE.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= 65535
