"""The end of a server that a gateway or Kubernetes replaces: /ready says 503 first, and running requests finish."""

from __future__ import annotations

import signal

import httpx
import pytest
from fake_engine import Trouble
from http_support import Running, serving, wait_until

from torchwright.core.errors import WorkloadError
from torchwright.serve.options import MOST_DRAIN_SECONDS, ServerOptions

SLOW = {"prompt": "The quick brown fox", "max_tokens": 100, "stream": True, "priority": Trouble.SLOW}
QUICK = {"prompt": "The quick brown fox", "max_tokens": 1}


def gone(running: Running) -> bool:
    try:
        httpx.get(running.url + "/ready")
        return False
    except httpx.TransportError:
        return True


def test_sigterm_refuses_new_requests_and_finishes_running_ones() -> None:
    with serving() as running, httpx.Client(base_url=running.url) as http:
        with http.stream("POST", "/v1/completions", json=SLOW) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(running.url + "/ready").status_code == 503)
            assert httpx.get(running.url + "/ready").json() == {
                "ready": False,
                "detail": "the server is stopping",
            }
            assert httpx.get(running.url + "/health").status_code == 200  # it lives: no probe shall kill it
            refused = httpx.post(running.url + "/v1/completions", json=QUICK)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert httpx.get(running.url + "/load").json() == {"server_load": 1}  # a gateway goes on looking
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        wait_until(lambda: gone(running))


def test_requests_are_taken_while_gateways_have_not_noticed() -> None:
    with serving() as running:
        running.server.drain_seconds = 1.0
        running.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(running.url + "/ready").status_code == 503)
        assert httpx.post(running.url + "/v1/completions", json=QUICK).status_code == 200
        wait_until(lambda: gone(running))


def test_an_idle_server_ends_at_once_and_a_second_signal_ends_a_busy_one() -> None:
    with serving() as running:
        running.signal(signal.SIGTERM)
        wait_until(lambda: gone(running))
    with serving() as running, httpx.stream("POST", running.url + "/v1/completions", json=SLOW) as answer:
        next(answer.iter_lines())
        running.signal(signal.SIGTERM)
        running.signal(signal.SIGTERM)
        wait_until(lambda: gone(running))


@pytest.mark.parametrize("seconds", [-1, MOST_DRAIN_SECONDS + 1, float("nan")])
def test_an_endless_drain_is_refused(seconds: float) -> None:
    with pytest.raises(WorkloadError, match="drain_seconds"):
        ServerOptions(drain_seconds=seconds)
