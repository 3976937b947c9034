"""Text in ASCII, for terminals and files whose encoding lacks a character."""

from __future__ import annotations

import unicodedata

WORDS = {
    "→": "->",
    "←": "<-",
    "↔": "<->",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "≠": "!=",
    "×": "x",
    "±": "+-",
    "−": "-",
    "–": "-",
    "—": "-",
    "‖": "||",
    "…": "...",
    "·": "|",
    "•": "*",
    "µ": "u",
    "μ": "u",
    "√": "sqrt",
    "∞": "inf",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "„": '"',
    "✓": "+",
    "✗": "x",
}
HORIZONTAL, VERTICAL = "─━┄┅┈┉╌╍═╴╶╸╺╼╾", "│┃┆┇┊┋╎╏║╵╷╹╻╽╿"


def to_ascii(text: str) -> str:
    """Return `text` in ASCII: near spellings where there are some, letters without accents, `?` for the rest."""
    return text if text.isascii() else "".join(map(_spelled, text))


def _spelled(character: str) -> str:
    if character.isascii():
        return character
    if character in WORDS:
        return WORDS[character]
    if "\u2500" <= character <= "\u257f":  # box drawing
        return "-" if character in HORIZONTAL else "|" if character in VERTICAL else "+"
    if "\u2580" <= character <= "\u259f":  # blocks, of bars
        return "#"
    if "\u2800" <= character <= "\u28ff":  # Braille, of spinners
        return "*"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or ("" if unicodedata.combining(character) else "?")
