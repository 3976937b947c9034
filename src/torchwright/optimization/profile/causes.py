"""Why graphs break, in plain words, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A common cause, and how torch's reason or the user's line shows it."""

    name: str
    reason: str
    cure: str
    torch_says: str = ""
    line_says: str = ""

    def is_of(self, reason: str, line: str) -> bool:
        """Check whether a break has this cause: by torch's message or, where that is ambiguous, by the line."""
        by_torch = re.search(self.torch_says, reason) is not None if self.torch_says else True
        return by_torch and (not self.line_says or re.search(self.line_says, line) is not None)


COMPLEX = Cause(
    "complex numbers",
    "Inductor makes no code for complex tensors: it runs these operators one by one between its own kernels.",
    "Keep real and imaginary parts as two real tensors. A rotary embedding (a + bi)(cos + i sin) is "
    "(a*cos - b*sin, a*sin + b*cos).",
)
LOOP = Cause(
    "loop with a break in it",
    "A line within this loop breaks the graph, so the whole function runs uncompiled.",
    "Mend the line within; the profile names it, too.",
    torch_says=r"graph break in loop|for/while loop",
)
TRACED_NUMPY = Cause(
    "NumPy",
    "torch.compile traces this NumPy call; torch.export, and so what compiles ahead of time or converts, does not.",
    "Use torch's function for it, or compute it once, outside of forward.",
)
CAUSES = (
    Cause(
        "print",
        "Printing needs a value now; the graph ends before the line and begins anew behind it.",
        "Remove it from forward, or put it under `if not torch.compiler.is_compiling():`.",
        torch_says=r"`print`|builtins\.print|reorderable_logging|logging",
        line_says=r"\bprint\(|\blog(?:ger|ging)?\b|\bwarn",
    ),
    Cause(
        "warning or logging",
        "A warning or a log line is Python's own work, which no graph holds.",
        "Remove it from forward, or put it under `if not torch.compiler.is_compiling():`.",
        line_says=r"\blog(?:ger|ging)?\.\w+\(|\bwarnings?\.warn",
    ),
    Cause(
        "data-dependent branch",
        "Which way the code goes depends on a tensor's values, which are not known while it is compiled.",
        "Compute both sides and choose by torch.where, or use torch.cond; a test of inputs belongs outside of forward.",
        torch_says=r"[Dd]ata-dependent (branching|control|jump|assert)|generic_jump|dynamic control flow",
    ),
    Cause(
        "NumPy",
        "This NumPy function has no counterpart in torch, so the line runs in Python.",
        "Use torch's function for it, or compute it once, outside of forward.",
        torch_says=r"numpy|cyfunction|Generator",
        line_says=r"\bnp\.|\bnumpy\b|\.numpy\(",
    ),
    Cause(
        "item()",
        "A tensor becomes a Python number (item(), tolist(), int(), float()): the call waits for the value.",
        "Keep it a tensor: y / y.max() instead of y / y.max().item(); sizes come from .shape.",
        torch_says=r"Tensor\.item\(\)|tolist\(\)|item\(\)|_local_scalar_dense|scalar_outputs",
    ),
    Cause(
        "size that depends on data",
        "How large the result is depends on a tensor's values (a mask as index, nonzero, unique).",
        "Keep the size and mask the values: torch.where(mask, x, 0), or a padded result of fixed size.",
        torch_says=r"[Dd]ynamic shape operator|[Dd]ata-dependent (operator|expression|symbol)|output shape depends"
        r"|GuardOnDataDependent",
    ),
    Cause(
        "disabled by hand",
        "The code itself says that it is not to be compiled.",
        "Remove torch.compiler.disable or torch._dynamo.graph_break where the reason for it has gone.",
        torch_says=r"torch\.compiler\.disable|graph_break\(\)|[Uu]ser-inserted",
    ),
    LOOP,
)
UNSUPPORTED = Cause(
    "unsupported call",
    "torch.compile cannot look into this call.",
    "Move it out of forward, use torch's own function for it, or make it an operator of your own "
    "(torch.library.custom_op).",
)


def cause_of(reason: str, line: str) -> Cause:
    """The cause of a break by torch's reason and the line at which it happened."""
    return next((cause for cause in CAUSES if cause.is_of(reason, line)), UNSUPPORTED)
