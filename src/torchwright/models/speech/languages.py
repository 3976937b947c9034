"""Languages as people name them: "en", "English" or "castilian", in any case, as Whisper's own command takes them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from torchwright.core.errors import UnknownName

MOST_NAMED = 12
"""Languages that an error lists."""


def language_code(name: str, known: Collection[str]) -> str:
    """Return the code of a language that a model knows by its code; raise `UnknownName` with the nearest name."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    plain = " ".join(name.casefold().replace("_", " ").split())
    code = plain if plain in LANGUAGES else TO_LANGUAGE_CODE.get(plain, plain)
    if code in known:
        return code
    names = {title: code for title, code in TO_LANGUAGE_CODE.items() if code in known}
    near = difflib.get_close_matches(plain, [*names, *known], n=1)
    hint = f"; did you mean '{near[0].title() if near[0] in names else near[0]}'?" if near else ""
    shown = ", ".join(f"{code} ({LANGUAGES.get(code, code).title()})" for code in sorted(known)[:MOST_NAMED])
    rest = f" and {len(known) - MOST_NAMED} others" if len(known) > MOST_NAMED else ""
    raise UnknownName(f"unknown language '{name}'{hint}", allowed=f"a name or a code: {shown}{rest}")
