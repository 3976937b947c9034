"""Reports: the live table, the waterfall in a terminal, and self-contained HTML pages.

    wording.py    numbers and untrusted text as words
    view.py       what a page shows but a recipe does not store: rows, ratios, tokens per second
    terminal.py   LiveProgress, waterfall, plain
    figures.py    the recipe's figures as inline SVG
    pictures.py   what the original and the optimized model made, side by side
    html.py       render: report.html.j2 with report.css.j2 and the figures
    curves.py     charts over the steps of a training run, for chart.html.j2

Nothing here imports torch: a recipe can be read on a machine that cannot run it.
"""
