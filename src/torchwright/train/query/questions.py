"""The questions with a name."""

from __future__ import annotations

from dataclasses import dataclass

from torchwright.core.errors import unknown


@dataclass(frozen=True)
class Question:
    """A question: its name, its meaning, the tables that it needs and its SQL."""

    name: str
    asks: str
    tables: tuple[str, ...]
    sql: str
    across: str | None = None
    """The column over which the page draws the figures of `drawn`."""
    drawn: str | None = None


QUESTIONS = {
    question.name: question
    for question in (
        Question(
            "slowest rank",
            "Which rank do the others wait for? The first row: it comes last to collectives most often, or spends "
            "most time outside of steps.",
            ("ledger",),
            """
WITH times AS (
    SELECT run, rank, sum(seconds) FILTER (cause = 'step') AS step_s,
           sum(seconds) FILTER (cause = 'data_wait') AS data_wait_s,
           sum(seconds) FILTER (cause NOT IN ('step', 'idle')) AS outside_s
    FROM ledger WHERE rank IS NOT NULL GROUP BY ALL
), arrivals AS (
    SELECT run, rank, created, min(created) OVER same AS first, max(created) OVER same AS last,
           count(*) OVER same AS came
    FROM calls WHERE peer IS NULL AND created IS NOT NULL WINDOW same AS (PARTITION BY run, group_name, seq)
), late AS (
    SELECT run, rank, count(*) AS calls, count(*) FILTER (created = last) AS came_last,
           avg(epoch_us(created) - epoch_us(first)) / 1000 AS late_ms
    FROM arrivals WHERE came > 1 GROUP BY ALL
)
SELECT run, rank, came_last, calls, late_ms, data_wait_s, outside_s, step_s
FROM times LEFT JOIN late USING (run, rank)
ORDER BY run, came_last DESC NULLS LAST, outside_s DESC NULLS LAST, rank
""",
        ),
        Question(
            "lost time by cause",
            "Where did the wall time go, other than into steps that the weights contain? Means over ranks, as in "
            "time-report.",
            ("ledger",),
            """
WITH causes AS (SELECT run, cause, sum(seconds / ranks) AS seconds FROM ledger GROUP BY ALL),
     ranks AS (SELECT run, cause, rank, sum(seconds) AS seconds FROM ledger WHERE rank IS NOT NULL GROUP BY ALL)
SELECT run, cause, seconds, seconds / sum(seconds) OVER (PARTITION BY run) AS share,
       (SELECT arg_max(rank, ranks.seconds) FROM ranks WHERE ranks.run = causes.run AND ranks.cause = causes.cause)
           AS rank_with_most
FROM causes QUALIFY cause <> 'step' ORDER BY run, seconds DESC, cause
""",
        ),
        Question(
            "tokens per second by step",
            "How fast was each step that was reported?",
            ("steps",),
            """
SELECT run, step, tokens_per_s, samples_per_s, loss, mfu FROM steps
WHERE coalesce(tokens_per_s, samples_per_s) IS NOT NULL ORDER BY run, step
""",
            across="step",
            drawn="tokens_per_s",
        ),
        Question(
            "slowest steps",
            "Which twenty reports were the slowest, against the run's median?",
            ("steps",),
            """
SELECT run, step, coalesce(tokens_per_s, samples_per_s) AS per_s,
       per_s / median(per_s) OVER (PARTITION BY run) AS of_median, loss, grad_norm
FROM steps WHERE per_s IS NOT NULL ORDER BY of_median, run, step LIMIT 20
""",
        ),
        Question(
            "restarts",
            "How did each attempt end, from which step did the next one go on, and what did that cost?",
            ("attempts", "ledger"),
            """
WITH cost AS (
    SELECT run, attempt, sum(seconds / ranks) FILTER (cause = 'lost_work') AS lost_work_s,
           sum(seconds / ranks) FILTER (cause = 'recovery') AS recovery_s
    FROM ledger GROUP BY ALL
)
SELECT run, attempt, started, wall_s, world, how_ended, resumed_step, reached_step, saved_step,
       coalesce(lost_work_s, 0) AS lost_work_s, coalesce(recovery_s, 0) AS recovery_s
FROM attempts LEFT JOIN cost USING (run, attempt) ORDER BY run, attempt
""",
        ),
        Question(
            "checkpoints",
            "Which checkpoints lie there, how large are they, and how far apart were they written?",
            ("checkpoints",),
            """
SELECT run, step, tokens, files, bytes, written,
       epoch_us(written) / 1e6 - lag(epoch_us(written) / 1e6)
           OVER (PARTITION BY run ORDER BY step) AS seconds_since_last
FROM checkpoints ORDER BY run, step
""",
        ),
        Question(
            "late at collectives",
            "At which line of the program do ranks wait for each other longest?",
            ("calls",),
            """
WITH met AS (
    SELECT run, group_name, seq, any_value(op) AS op, arg_min(place, rank) AS place,
           (max(epoch_us(created)) - min(epoch_us(created))) / 1000 AS spread_ms, arg_max(rank, created) AS last_rank
    FROM calls WHERE peer IS NULL AND created IS NOT NULL GROUP BY run, group_name, seq HAVING count(*) > 1
)
SELECT run, op, place, count(*) AS calls, avg(spread_ms) AS mean_ms, max(spread_ms) AS longest_ms,
       mode(last_rank) AS last_most_often
FROM met GROUP BY run, op, place ORDER BY sum(spread_ms) DESC, run, op, place
""",
        ),
        Question(
            "calls not ended",
            "Which collectives had not ended when the ranks dumped? `torchwright why-stuck` says why.",
            ("calls",),
            """
SELECT run, group_name, seq, op, list(rank ORDER BY rank) AS ranks, any_value(what) AS what, any_value(place) AS place
FROM calls WHERE NOT done GROUP BY run, group_name, seq, op ORDER BY run, group_name, seq
""",
        ),
        Question(
            "requests over p99",
            "Which requests took longer than 99% of the run's? Probes do not count.",
            ("requests",),
            """
SELECT run, time, id, path, status, seconds, quantile_cont(seconds, 0.99) OVER (PARTITION BY run) AS p99_s,
       prompt_tokens, new_tokens, reason
FROM requests WHERE path NOT IN ('/health', '/ready', '/metrics') QUALIFY seconds > p99_s ORDER BY seconds DESC, id
""",
        ),
        Question(
            "requests by path",
            "How many requests came to each path, how long did they take, and how many failed?",
            ("requests",),
            """
SELECT run, path, count(*) AS requests, count(*) FILTER (status >= 400) AS failed,
       quantile_cont(seconds, 0.5) AS p50_s, quantile_cont(seconds, 0.99) AS p99_s,
       sum(prompt_tokens) AS prompt_tokens, sum(new_tokens) AS new_tokens
FROM requests GROUP BY run, path ORDER BY requests DESC, run, path
""",
        ),
    )
}
"""Name → question, in the order in which `--list` and the page have them."""


def named(words: str) -> Question | None:
    """Return the question of a name, whose words may stand apart or be joined by hyphens; None for SQL.

    Raises `UnknownName` for words that are neither a name nor begin as SQL does.
    """
    name = " ".join(words.replace("-", " ").lower().split())
    if name in QUESTIONS:
        return QUESTIONS[name]
    first = words.split(None, 1)[0].lower() if words.strip() else ""
    if first.strip("(") in SQL_BEGINS or first.startswith(("--", "/*", "(")):
        return None
    raise unknown("question", words, QUESTIONS)


SQL_BEGINS = frozenset(
    (
        "select",
        "with",
        "from",
        "values",
        "describe",
        "summarize",
        "show",
        "explain",
        "pivot",
        "unpivot",
        "table",
    )
)
"""First words of SQL that reads."""
