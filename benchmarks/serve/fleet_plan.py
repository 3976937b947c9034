"""The next order of magnitude of a fleet on paper: which resource ends first, by the measured costs.

    python -m benchmarks.serve.fleet_plan [--replicas 1000] [--gateways 10] [--tokens-per-s 150] [--answer 64]
        [--kv-tokens 65536] [--turns 6] [--shared 0.87] [--restart-s 7.4] [--json FILE]

Costs are those of `python -m benchmarks.serve.ceiling` with and without --fleet (`COSTS`), the gateway's limits those
of its `--help`. A replica makes `tokens_per_s` tokens in answers of `answer`; `turns` requests share `shared` of
their prompts. The share from cache assumes that each request goes to a gateway by chance, and that each gateway has a
tree of its own. `benchmarks.serve.fleet` has measured rows to compare it with.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.harness import run


@dataclass(frozen=True)
class Costs:
    """Processor milliseconds on a quiet Xeon."""

    http_request: float = 1.06
    http_event: float = 0.16
    """(3.83 - 1.06) / 17.2 events of the streamed chat."""
    http_probe: float = 0.27
    gateway_request: float = 0.34
    gateway_event: float = 0.045
    """(1.12 - 0.34) / 17.2."""


COSTS = Costs()
PROBE_S = 2.0
"""Between two probes of a replica by a gateway (serve/fleet/gateway.py)."""
ADMITTED = 4096
"""Requests that a gateway holds at most: 1,024 for each core, at least this."""
TREE_CHARACTERS = 64 << 20
"""Characters of a gateway's prefix tree for one model."""
CHARACTERS = 3
"""About those of a token."""
RUNNING = 64
"""Answers that a replica writes at once (`--max-running`)."""
PROBES_AT_ONCE, PROBE_TIMEOUT_S = 128, 5.0


def main() -> None:
    options = run.options(
        __doc__,
        replicas=1000,
        gateways=10,
        tokens_per_s=150.0,
        answer=64,
        kv_tokens=65536,
        turns=6,
        shared=0.87,
        restart_s=7.4,
    )
    replicas, gateways = options.replicas, options.gateways
    rows = run.Rows(
        options.json, ("resource", "with one gateway and 2 replicas", f"{gateways} and {replicas}", "limit")
    )
    small = figures(options, 2, 1)
    for name, (value, limit) in figures(options, replicas, gateways).items():
        rows.add({"resource": name, "value": value, "limit": limit}, (name, small[name][0], value, limit))


def figures(options: argparse.Namespace, replicas: int, gateways: int) -> dict[str, tuple[str, str]]:
    """Resource → (its use, its limit)."""
    given = vars(options)
    tokens = replicas * given["tokens_per_s"]
    requests = tokens / given["answer"]
    cores = (requests * COSTS.gateway_request + tokens * COSTS.gateway_event) / 1000
    mine = given["tokens_per_s"] / given["answer"]
    http = (mine * COSTS.http_request + given["tokens_per_s"] * COSTS.http_event) / 1000
    probes = gateways / PROBE_S * COSTS.http_probe / 1000
    tree = replicas * given["kv_tokens"] * CHARACTERS
    cached = from_cache(given["shared"], given["turns"], gateways)
    return {
        "requests/s": (f"{requests:.0f}", ""),
        "gateway processors, of all gateways": (f"{cores:.1f}", "4 a gateway, say"),
        "HTTP process of a replica": (f"{http:.1%} of a processor", "100%"),
        "probes of a replica": (f"{probes:.2%} of a processor", ""),
        "streams at once, of a gateway": (f"{replicas * RUNNING / gateways:.0f}", f"{ADMITTED}"),
        "a gateway's prefix tree": (f"{tree / 2**20:.1f} Mi characters", f"{TREE_CHARACTERS / 2**20:.0f} Mi"),
        "prompt tokens from cache": (
            f"{cached:.2f}",
            f"{from_cache(given['shared'], given['turns'], 1):.2f}",
        ),
        "hanging replicas noticed after": (
            f"{PROBE_S + 2 * max(1.0, replicas / PROBES_AT_ONCE) * PROBE_TIMEOUT_S:.0f} s",
            "",
        ),
        "rolling restart, one at a time": (f"{replicas * given['restart_s'] / 3600:.2f} h", ""),
    }


def from_cache(shared: float, turns: int, trees: int) -> float:
    """Return the share of prompt tokens from cache where each of `turns` requests goes to one of `trees` by chance.

    The first request at each tree computes the beginning; `trees` times (1 - (1 - 1/trees)^turns) trees see one.
    """
    return shared * (1 - trees * (1 - (1 - 1 / trees) ** turns) / turns)


if __name__ == "__main__":
    main()
