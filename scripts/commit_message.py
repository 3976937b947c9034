"""Check the subject of a commit message: `area: do something`, in the imperative, at most 72 characters.

    python scripts/commit_message.py FILE    exit code 1 and what is wrong with the message in FILE

`make setup` installs it as git's commit-msg hook (.githooks/commit-msg).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
SUBJECT = re.compile(r"(?P<area>[a-z0-9_./*-]+(?:, [a-z0-9_./*-]+)*): (?P<verb>\S+)(?: .*)?")
GENERATED = re.compile(r"(?:Merge|Revert|fixup!|squash!|amend!) ")
"""Messages that git writes itself."""

_NOT_A_VERB = re.compile(
    r"a|an|the|this|what|how|why|some|more|new|no|all|also|now|\w+ing|\w+ed|\w+[^s]s", re.I
)
_ENDS_LIKE_ONE = {
    "bring",
    "embed",
    "feed",
    "need",
    "shed",
    "speed",
    "seed",
    "focus",
    "bias",
    "alias",
    "canvas",
}
"""Imperatives that look like another form of a verb."""


def main(arguments: list[str]) -> int:
    (name,) = arguments
    faults = problems(Path(name).read_text("utf-8"))
    if faults:
        print("The commit message is refused (CONTRIBUTING.md, Commit):", file=sys.stderr)
        print("\n".join(f"  {fault}" for fault in faults), file=sys.stderr)
    return 1 if faults else 0


def problems(message: str) -> list[str]:
    """Return what is wrong with a message: nothing, or a sentence for each fault."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0].rstrip() if lines else ""
    if GENERATED.match(subject):
        return []
    found = SUBJECT.fullmatch(subject)
    faults: list[str] = []
    if found is None:
        faults.append(
            f"The subject is {subject!r}; write 'area: do something', as in 'search: drop slow steps'."
        )
    elif _NOT_A_VERB.fullmatch(found["verb"]) and found["verb"].lower() not in _ENDS_LIKE_ONE:
        faults.append(
            f"'{found['verb']}' is not an imperative; write what the commit does: 'drop', 'add', 'fix'."
        )
    if len(subject) > LONGEST:
        faults.append(f"The subject has {len(subject)} characters; at most {LONGEST} are allowed.")
    if subject.endswith("."):
        faults.append("The subject ends with a full stop; leave it out.")
    if len(lines) > 1 and lines[1].strip():
        faults.append("The second line is not empty; leave it empty, and give the reason below it.")
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
