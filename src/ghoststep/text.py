"""Strings from strangers made safe to show. Pure, and without imports, so that every layer may use it."""

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """`text` with every character that cannot be seen written as an escape; the rest, backslashes too, stays as it is.

    Escaped are control characters ("\\n", "\\x1b", "\\x00"), bidirectional and zero-width controls ("\\u202e"), unusual
    spaces, unassigned and private code points, and lone surrogates: what is left can be encoded as UTF-8, stays on one line
    and steers neither a terminal nor an XML reader. Applying it twice changes nothing. Cost: O(len(text)).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable(text: str, limit: int = 80) -> str:
    """`text` between single quotes, escaped and at most `limit` characters long in all: for quoting a token in a message.

    Unlike in `visible`, backslashes and single quotes are escaped too, so that two different strings never look the same.
    A string that was cut ends with "…" outside the quotes. "" gives "''". Cost: O(limit), however long the text is.
    `limit` is at least 3, the room for the quotes and the mark of a cut.
    """
    pieces = [_quote(c) for c in text[: max(limit, 3)]]
    if len(text) <= len(pieces) and sum(map(len, pieces)) <= limit - 2:
        return "'" + "".join(pieces) + "'"
    room, kept = limit - 3, ""
    for piece in pieces:
        if len(kept) + len(piece) > room:
            break
        kept += piece
    return f"'{kept}'…"


def error_text(error: BaseException, limit: int = 1000) -> str:
    """ "ValueError: what it says", on one line, safe to show, cut at `limit` characters. Never raises, whatever its `str` does."""
    try:
        said = str(error)
    except Exception:
        said = "its text cannot be read"
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return visible(text[:limit]) + ("…" if len(text) > limit else "")


def counted(number: int, one: str, several: str) -> str:
    """ "1 table row is", "3 table rows are"."""
    return f"{number} {one if number == 1 else several}"


def _quote(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    return character if character.isprintable() else _escape(character)


def _escape(character: str) -> str:
    number = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
