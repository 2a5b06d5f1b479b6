"""Token strings in a picture: escaped, cut to a width in terminal columns, painted."""

from __future__ import annotations

from collections.abc import Callable

from ghoststep.text import visible

TokenText = Callable[[int], str]
"""From a token id to its string, such as `tokenizer.convert_ids_to_tokens`. The string may come from a stranger."""

_MAX_READ = 200  # characters of a token that are looked at: a vocabulary may hold a string of megabytes


def shown(token_id: int, token_text: TokenText | None, limit: int) -> str:
    """The token as it can be printed in at most `limit` columns: "id" without strings, "·" for a negative id (no token).

    Control characters are escapes, a space and a line feed are "␣" and "↵", and a string that was cut ends with "…". A
    `token_text` that raises gives the id. `limit` is at least 1.
    """
    if token_id < 0:
        return "·"
    text = str(token_id)
    if token_text is not None:
        try:
            text = str(token_text(token_id))[:_MAX_READ]
        except Exception:  # a tokenizer without this id: any class of it raises something else
            text = f"#{token_id}"
    text = visible(text.replace(" ", "␣").replace("\n", "↵")) or "''"
    return cut(text, limit)


def columns(text: str) -> int:
    """Terminal columns of `text`: wide characters take two."""
    from rich.cells import cell_len  # lazy: not needed for a picture that nobody asks for

    return cell_len(text)


def cut(text: str, limit: int) -> str:
    """At most `limit` columns; "…" at the end where something was left out."""
    if columns(text) <= limit:
        return text
    kept, used = "", 0
    for character in text:
        wide = columns(character)
        if used + wide > limit - 1:
            break
        kept, used = kept + character, used + wide
    return kept + "…"


def pad(text: str, size: int, *, right: bool = False) -> str:
    """`text` filled up with spaces to `size` columns, on the left side if `right` (aligned to the right)."""
    fill = " " * max(0, size - columns(text))
    return fill + text if right else text + fill


def paint(text: str, code: str, *, color: bool) -> str:
    """`text` in an ANSI style ("31", "1;31", "38;5;33"), or as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if color and text else text


def wrap(pieces: list[str], width: int, lead: str = "") -> list[str]:
    """Pieces joined by two spaces into lines of at most `width` columns; each line after the first starts with `lead`."""
    lines, line = [], ""
    for piece in pieces:
        for part in _parts(piece, width - columns(lead)):
            candidate = f"{line}  {part}" if line.strip() else line + part
            if line.strip() and columns(candidate) > width:
                lines.append(line)
                candidate = lead + part
            line = candidate
    return [*lines, line] if line.strip() else lines


def _parts(piece: str, width: int) -> list[str]:
    """A piece that is too long for one line, broken at spaces."""
    if columns(piece) <= width:
        return [piece]
    parts = [""]
    for word in piece.split(" "):
        joined = f"{parts[-1]} {word}".strip()
        if parts[-1] and columns(joined) > width:
            parts.append(cut(word, width))
        else:
            parts[-1] = cut(joined, width)
    return parts
