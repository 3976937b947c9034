"""The account of a job: sessions grouped into attempts, lost work separated from recovery, ranks merged.

A process can only say what it is doing; a lost step shows only when a later attempt resumes before it.
So two things are decided here, after the fact:

- **lost work**: time in `step` after the state that a later attempt (or a rollback in the same one) went back to;
- **recovery**: after a failure, all time other than steps until the step is reached again at which the job had been.

The steps that are done again stay `step`, since it is these that the weights contain: every step counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torchwright.train.ledger.buckets import BUCKETS, NANO
from torchwright.train.ledger.launcher import Launcher
from torchwright.train.ledger.read import ProcessLife, Span, read_sessions

Piece = tuple[str, int, int]
"""Bucket, start, end (nanoseconds since 1970)."""
_NEVER = 1 << 62


@dataclass
class Attempt:
    """One start of the job, over all its ranks."""

    number: int
    start: int
    end: int
    world: int
    lanes: dict[int, list[Piece]]
    """Rank → what it did from `start` to `end`, without holes."""
    finished: bool
    failed: bool
    """True if an exception ended it; a killed process cannot record that."""
    resumed: int | None
    """The step whose state it began from, where that was a checkpoint."""
    reached: int
    """The last step that any rank completed."""
    saved: int | None
    """The newest step of which a checkpoint lay whole on the disk."""
    found: int | None
    """Graphs that all its ranks found compiled; None where none compiles."""
    made: int | None
    """Graphs and files that they compiled."""

    def spent(self, rank: int) -> dict[str, int]:
        """Bucket → nanoseconds of one rank; they sum to `end - start`."""
        totals = dict.fromkeys(BUCKETS, 0)
        for bucket, start, end in self.lanes[rank]:
            totals[bucket] += end - start
        return totals

    def seconds(self) -> dict[str, float]:
        """Bucket → seconds, the mean over its ranks; they sum to the attempt's wall time."""
        ranks = [self.spent(rank) for rank in self.lanes]
        return {bucket: sum(spent[bucket] for spent in ranks) / len(ranks) / NANO for bucket in BUCKETS}


@dataclass
class Account:
    """A job's time, from its first attempt's start to its last one's end."""

    attempts: list[Attempt]
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Nanoseconds since 1970."""
        return self.attempts[0].start

    @property
    def end(self) -> int:
        """Nanoseconds since 1970."""
        return self.attempts[-1].end

    @property
    def wall(self) -> float:
        """Seconds."""
        return (self.end - self.start) / NANO

    @property
    def between(self) -> float:
        """Seconds in which no attempt ran."""
        return (self.end - self.start - sum(attempt.end - attempt.start for attempt in self.attempts)) / NANO

    def seconds(self) -> dict[str, float]:
        """Bucket → seconds; they sum to `wall`."""
        totals = dict.fromkeys(BUCKETS, 0.0)
        for attempt in self.attempts:
            for bucket, seconds in attempt.seconds().items():
                totals[bucket] += seconds
        totals["idle"] += self.between
        return totals

    @property
    def effective(self) -> float:
        """Effective training time: the share of the wall time spent on steps that the weights contain, 0 to 1."""
        return self.seconds()["step"] / self.wall if self.wall else 0.0

    def most(self, bucket: str) -> tuple[int, float]:
        """The rank that spent most in `bucket`, and its seconds; the time between attempts is idle for each."""
        totals: dict[int, int] = {}
        for attempt in self.attempts:
            for rank in attempt.lanes:
                totals[rank] = totals.get(rank, 0) + attempt.spent(rank)[bucket]
        rank = max(totals, key=lambda rank: (totals[rank], -rank))
        return rank, totals[rank] / NANO + (self.between if bucket == "idle" else 0.0)


def read_account(run_dir: str | Path) -> Account:
    """Return the account of the job in `run_dir`. Raises `LedgerError` if no ledger can be read."""
    return account_of(read_sessions(run_dir))


def account_of(sessions: list[ProcessLife]) -> Account:
    """The account of `sessions`, sorted by start."""
    groups = _attempts(sessions)
    account = Account([], [note for session in sessions for note in session.notes])
    goals = _kept_until(groups)
    furthest, failed, ends = 0, False, 0
    last_launcher: Launcher | None = None
    for number, group in enumerate(groups, 1):
        start, end = min(session.start for session in group), max(session.end for session in group)
        later = max(0, ends - start) if number > 1 else 0
        if later:
            account.notes.append(
                f"attempt {number} begins {later / NANO:.3f} s before attempt {number - 1} ends: two runs in one "
                "folder, or clocks that disagree; it is counted from that end on"
            )
        if (launcher := min(group, key=lambda session: session.rank).launcher) is not None:
            # What torchrun did until then is this attempt's: its own start, and processes that died without a ledger.
            start = min(start, max(launcher.wall, ends))
            if (unseen := _unseen(launcher, last_launcher)) > 0:
                account.notes.append(
                    f"attempt {number}: torchrun had started its processes {unseen} times without a ledger: they died "
                    f"before they opened one; that time is in its {'recovery' if failed else 'start'}"
                )
        last_launcher = launcher
        lanes: dict[int, list[Piece]] = {}
        reached = 0
        for session in group:
            pieces, last = _pieces(session, goals[number - 1], furthest, failed)
            lanes[session.rank] = _padded(pieces, start, session.start, session.end, end, later, failed)
            reached = max(reached, last)
        ends = end + later
        missing = max(session.world for session in group) - len(group)
        if missing > 0:
            account.notes.append(f"attempt {number}: {missing} of its ranks left no ledger")
        account.attempts.append(
            Attempt(
                number=number,
                start=start + later,
                end=ends,
                world=max(session.world for session in group),
                lanes=dict(sorted(lanes.items())),
                finished=all(session.finished for session in group) and missing <= 0,
                failed=any(session.failed for session in group),
                resumed=min(_marks(group, "resume"), default=None),
                reached=reached,
                saved=max(_marks(group, "checkpoint"), default=None),
                found=_sum(_marks(group, "found")),
                made=_sum(_marks(group, "made")),
            )
        )
        if account.attempts[-1].found and not account.attempts[-1].made:
            account.notes.append(
                f"attempt {number} compiled nothing: its {account.attempts[-1].found} graphs lay in the cache or came "
                "with the run"
            )
        furthest, failed = max(furthest, reached), not account.attempts[-1].finished
    _note_risk(account)
    return account


def _attempts(sessions: list[ProcessLife]) -> list[list[ProcessLife]]:
    """Group sessions by start of the job: no rank twice, one launch and one number of processes.

    If nothing names the launch, each began before all the others had ended. A process that died may have lived on for
    as long as it leaves between lines.
    """
    groups: list[list[ProcessLife]] = []
    for session in sessions:
        group = groups[-1] if groups else []
        if (
            group
            and session.rank not in {other.rank for other in group}
            and (session.launch, session.world) == (group[0].launch, group[0].world)
            and (session.launch or session.start <= max(other.end + other.every for other in group))
        ):
            group.append(session)
        else:
            groups.append([session])
    return groups


def _kept_until(groups: list[list[ProcessLife]]) -> list[int]:
    """For each attempt the step up to which its work was kept by those after it."""
    kept: list[int] = []
    until = _NEVER
    for group in reversed(groups):
        kept.append(until)
        until = min([until, *(_went_back_to(session) for session in group)])
    return kept[::-1]


def _went_back_to(session: ProcessLife) -> int:
    """The earliest step from whose state `session` went on; one that took no step undid nothing."""
    resumed = (span.resume for span in session.spans if span.resume is not None)
    return min([_begins_from(session, _NEVER), *resumed])


def _begins_from(session: ProcessLife, otherwise: int) -> int:
    """The step from whose state `session` began: its first `resume`, or 0 if it took a step before any."""
    for span in session.spans:
        if span.step is not None:
            return 0
        if span.resume is not None:
            return span.resume
    return otherwise


def _sum(counts: list[int]) -> int | None:
    return sum(counts) if counts else None


def _marks(group: list[ProcessLife], name: str) -> list[int]:
    marks = (getattr(span, name) for session in group for span in session.spans)
    return [mark for mark in marks if mark is not None]


def _pieces(session: ProcessLife, kept: int, furthest: int, failed: bool) -> tuple[list[Piece], int]:
    """Return the pieces of one process, with lost work and recovery marked, and the last step that it completed.

    `kept`: the step up to which later attempts kept the work; `furthest`: where the attempts before had been;
    `failed`: whether the one before this did.
    """
    limits = []  # for each span: the step up to which its work was kept, by rollbacks later in this session too
    for span in reversed(session.spans):
        limits.append(kept)
        kept = min(kept, span.resume if span.resume is not None else kept)
    pieces: list[Piece] = []
    done, last = _begins_from(session, furthest), 0
    stepped = not failed
    for span, limit in zip(session.spans, reversed(limits), strict=True):
        after = done if span.step is None else span.step
        if after > done:
            lost = _share(after - limit, after - done)
            back = _share(furthest - done, after - done)
            stepped = True
        else:
            lost = (1, 1) if done >= limit else (0, 1)
            back = (1, 1) if done < furthest or (done == furthest and not stepped) else (0, 1)
        pieces += _told_apart(span, lost, back)
        done = after if span.resume is None else span.resume
        last = max(last, after)
        furthest = max(furthest, after)
    return pieces, last


def _told_apart(span: Span, lost: tuple[int, int], back: tuple[int, int]) -> list[Piece]:
    """A span's time as pieces, one after another: `lost` of its steps are lost work, `back` of the rest recovery."""
    spent: dict[str, int] = {}
    for bucket, time in span.spent.items():
        (part, whole), other = (lost, "lost_work") if bucket == "step" else (back, "recovery")
        moved = time * part // whole
        for name, share in ((bucket, time - moved), (other, moved)):
            if share:
                spent[name] = spent.get(name, 0) + share
    pieces: list[Piece] = []
    at = span.start
    for bucket, time in spent.items():
        pieces.append((bucket, at, at + time))
        at += time
    return pieces


def _share(part: int, whole: int) -> tuple[int, int]:
    return min(max(part, 0), whole), whole


def _unseen(launcher: Launcher, before: Launcher | None) -> int:
    """Count the launcher's starts since the attempt before whose processes left no ledger."""
    same = before is not None and before.pid == launcher.pid and abs(before.wall - launcher.wall) < NANO
    return launcher.restarts - (before.restarts + 1 if before is not None and same else 0)


def _padded(
    pieces: list[Piece], start: int, begun: int, ended: int, end: int, later: int, failed: bool
) -> list[Piece]:
    """Extend `pieces` to the attempt's start and end.

    A process that came later was starting, or coming back after an attempt that failed; one that died is idle.
    """
    whole = [("recovery" if failed else "start", start, begun), *pieces, ("idle", ended, end)]
    return [(bucket, first + later, last + later) for bucket, first, last in whole if last > first]


def _note_risk(account: Account) -> None:
    """Say how much of a dead last attempt no checkpoint holds."""
    last = account.attempts[-1]
    saved = max((attempt.saved for attempt in account.attempts if attempt.saved is not None), default=0)
    if not last.finished and last.reached > saved:
        account.notes.append(
            f"the last attempt has not ended by itself (it runs still, or died) at step {last.reached}; the newest "
            f"checkpoint holds step {saved}: what was done since counts as step until an attempt resumes"
        )
