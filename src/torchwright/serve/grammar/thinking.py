"""The bound of reasoning: of a client's, or before a constrained answer, whose grammar of any text has no end."""

from __future__ import annotations

from collections.abc import Sequence

from torchwright.serve.wire.messages import ThinkingBudget


class Thinking:
    """Follows one answer's reasoning, and names the tokens that end it once its budget is spent."""

    def __init__(self, budget: ThinkingBudget, pieces: Sequence[bytes]) -> None:
        """`pieces` has the bytes of each token."""
        self._budget, self._pieces = budget, pieces
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._text = b""
        """A possible beginning mark, and then as much text as may hold the end mark."""
        self._begun = not self._begin
        self._open = True
        self._count = self._forced = 0

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where the model is free."""
        if not self._open or not self._begun or self._count < self._budget.tokens:
            return None
        return self._budget.end_ids[self._forced]

    @property
    def free(self) -> int | None:
        """Tokens that the model may still choose by itself; None for no bound."""
        return max(0, self._budget.tokens - self._count) if self._open else None

    def accept(self, token: int) -> None:
        """Go on by one token of the answer."""
        if not self._open:
            return
        self._forced += self.forced is not None
        self._count += 1
        self._text += self._pieces[token]
        if not self._begun:
            self._text = self._text.lstrip()
            self._begun = self._text.startswith(self._begin)
            self._open = self._begun or self._begin.startswith(self._text)
            self._text = self._text[len(self._begin) :] if self._begun else self._text
        if self._begun:
            self._open = self._end not in self._text and self._forced < len(self._budget.end_ids)
            self._text = self._text[-len(self._end) :]
