"""The board: rows of all benchmarks in one form, compared between commits, as static pages of the site.

    rows.py         Row and Figure; reads benchmarks/*.jsonl
    tables.py       reads the tables of docs/results.md, whose rows have no file of their own
    compare.py      series of one figure over commits, and which of their changes are earned
    statistics.py   counts: verdicts, claims against re-timings, the original against itself
    trend.py        a series as a drawing
    pages.py        board.html.j2 and statistics.html.j2, filled in; scripts/site_board.py adds them to the site
    keep.py         appends the rows of a run to benchmarks/measured.jsonl

Nothing here imports torch.
"""
