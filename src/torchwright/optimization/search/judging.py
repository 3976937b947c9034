"""Judge a candidate by the sample, and by more of the data where the sample leaves the budget open.

One row of 512 that changed its class is a loss of 0.2%, and of up to 1.08%: a budget of 1% decides nothing then. A
technique that loses a fifth of the budget would be dropped two times in three.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torchwright.core.records import Quality
from torchwright.optimization.search.state import Search
from torchwright.optimization.trial import client
from torchwright.optimization.trial.client import Candidate, TrialProcess

SHARE = 0.1
"""The share of the time left that one such verdict may take: the steps that have not been tried need the rest."""


def measure(search: Search, candidate: Candidate, *, unseen: bool = False, show: bool = False) -> None:
    """Measure a candidate's metric, on held-out data with `unseen`, and its memory."""
    candidate.quality = judge(search, candidate.process, unseen=unseen, show=show)
    candidate.measure_memory()


def judge(search: Search, process: TrialProcess, *, unseen: bool, show: bool = False) -> Quality:
    """Return the metric of what a process runs; with `show` the process keeps what `pictures` then gives."""
    return client.judge(
        process,
        search.budget.max_drop,
        reference=search.last_reference if unseen else search.reference,
        further=partial(_observed_further, search, unseen=unseen),
        unseen=unseen,
        show=show,
    )


def _observed_further(search: Search, *, unseen: bool) -> Any:
    """Return the original's observations on more of the data, or None without such data or the time for them."""
    original = search.baseline.process
    times = original.ask("further_times", unseen=unseen)
    observed = unseen in search.further
    seconds = (1 if observed else 2) * times * search.settle_seconds
    share = 1.0 if unseen else SHARE  # held-out data are judged when everything has been tried
    if not times or seconds > share * search.context.remaining():
        return None
    if not observed:
        search.further[unseen] = original.ask("observe", unseen=unseen, further=True)
    return search.further[unseen]
