"""SQL over what runs leave: ledgers, figures, checkpoints, flight records and server logs of all ranks and attempts.

    tables.py     the tables and their columns
    lines.py      bounded reading of JSON lines and log lines; what is damaged is counted and named
    training.py   the rows of ledger, metrics and checkpoints
    recorder.py   the rows of flight-recorder dumps
    server.py     the rows of server logs
    collect.py    the rows of all runs
    questions.py  the questions with a name
    database.py   DuckDB, locked down
    show.py       answers as a table, JSON and CSV
    page.py       the named questions as one HTML page

A run folder is untrusted. Its files are read here, within limits; DuckDB gets the rows and opens nothing.
"""
