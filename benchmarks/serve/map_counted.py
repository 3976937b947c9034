"""`torchwright map` whose workers note each part that they begin, as a line of a file.

    python -m benchmarks.serve.map_counted FILE map MODEL IN -o OUT

The planner and the workers are the command's own. A note is written before the part is computed, by one write at the
file's end, so that a kill loses none.
"""

from __future__ import annotations

import os
import sys
from typing import Any

WORKER = "--worker"


def main(words: list[str]) -> int:
    if words[0] == WORKER:
        return _work(*words[1:])
    file, *rest = words
    from torchwright.cli import main as torchwright
    from torchwright.map import pool

    pool.WORKER = (sys.executable, "-m", "benchmarks.serve.map_counted", WORKER, file)
    return torchwright(rest)


def _work(file: str, *arguments: str) -> int:
    from torchwright.map import compute, worker

    plain, end = compute.compute, os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noted(task: Any, part: Any, form: Any) -> Any:
        os.write(end, f"{part.name}\n".encode())
        return plain(task, part, form)

    compute.compute = noted
    return worker.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
