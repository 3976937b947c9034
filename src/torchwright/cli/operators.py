"""`torchwright doctor --operators`: the scorecard of a device's operators, printed, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click

from torchwright.cli.printing import console, print_json, say
from torchwright.core.process.files import replacing
from torchwright.core.process.interrupts import importing

LISTED = 40
"""Failures that are printed; the page and the JSON have all."""


def check(match: str | None) -> None:
    """Raise `UsageError` for a pattern that is not a regular expression."""
    try:
        re.compile(match or "")
    except re.error as error:
        raise click.UsageError(
            f"--match takes a regular expression, and '{match}' is not one: {error}"
        ) from None


def run(device: str | None, match: str | None, into: Path | None, as_json: bool) -> None:
    """Take the scorecard and show it."""
    with importing():
        from torchwright.hardware.devices import get_device
        from torchwright.hardware.operators.scorecard import take
        from torchwright.report import operators as page

    name = get_device(device).name
    if as_json:
        card = take(name, match=match)
    else:
        with console().status("starting") as status:
            card = take(
                name,
                match=match,
                tell=lambda done, total, entry: status.update(f"{done} of {total}: {entry}"),
            )
    data = dataclasses.asdict(card)
    shares = [(share.family, share.passed, share.total) for share in card.shares()]
    if into is not None:
        with replacing(into) as beside:
            beside.write_text(page.render(data, shares), encoding="utf-8")
    if as_json:
        print_json({**data, "shares": {family: [passed, total] for family, passed, total in shares}})
        return
    for family, passed, total in shares:
        say(f"{page.FAMILIES[family]}: {passed} of {total} samples, {page.percent(passed, total)}")
    for fault in card.faults[:LISTED]:
        say(f"{fault.entry} ({fault.family}): {fault.outcome}, {fault.samples} samples: {fault.message}")
    if len(card.faults) > LISTED:
        say(f"and {len(card.faults) - LISTED} more failures, which --page and --json list")
    if into is not None:
        say(f"page: {into}")
