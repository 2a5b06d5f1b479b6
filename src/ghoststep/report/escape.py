"""One escaping function per reader. Each starts from `visible`: no output holds a raw control character.

Escaping happens here and only here, at the moment of writing: findings keep the strings as they came.
"""

from __future__ import annotations

import html
import re
from urllib.parse import quote

from ghoststep.text import printable, visible

__all__ = [
    "for_code_span",
    "for_html",
    "for_json",
    "for_markdown",
    "github_data",
    "github_property",
    "printable",
    "relative_uri",
]
__all__ += ["sarif_text", "utf8_text", "visible"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_PLAIN_ASCII = re.compile(r"[^\n\x20-\x7e]")
_MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]#|~])")
_LINK_START = re.compile(r"\b(https?|ftp|mailto|xmpp)(:)|\b(www)(\.)", re.IGNORECASE)


def utf8_text(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, written as "\\udc80"; everything else unchanged."""
    return _SURROGATE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def for_json(document: str) -> str:
    """A JSON document whose unseen characters (bidirectional controls, U+2028, DEL, ...) and "<" are JSON escapes.

    Same meaning; "<" only ever stands inside strings, and without it a page may hold the document in a script element.
    """
    shown = _NOT_PLAIN_ASCII.sub(lambda m: m[0] if m[0].isprintable() else _json_escape(m[0]), document)
    return shown.replace("<", "\\u003c")


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def for_html(text: str) -> str:
    """Safe as HTML text and inside a quoted attribute."""
    return html.escape(visible(text), quote=True)


def for_markdown(text: str) -> str:
    """Safe as the text of a GitHub table cell: no markup, no HTML, no link, and nobody is mentioned."""
    escaped = _MARKDOWN_SPECIAL.sub(r"\\\1", visible(text))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = _LINK_START.sub(lambda m: (m[1] or m[3]) + "<!-- -->" + (m[2] or m[4]), escaped)
    return escaped.replace("@", "@<!-- -->")


def for_code_span(text: str) -> str:
    """Markdown that shows exactly the visible text as code, also within a table; markup in it becomes entities."""
    shown = visible(text).replace("|", "\\|")
    if "<" in shown or "&" in shown:  # a code span would show it right, but not every renderer is to be trusted with it
        return f"<code>{for_markdown(text)}</code>"
    if not shown.strip():
        return f"`'{shown}'`"
    runs = re.findall("`+", shown)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    room = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{room}{shown}{room}{fence}"


def github_data(text: str) -> str:
    """The message of a workflow command."""
    return visible(text).replace("%", "%25")


def github_property(text: str) -> str:
    """A property of a workflow command, such as its title or file."""
    return github_data(text).replace(":", "%3A").replace(",", "%2C")


def sarif_text(text: str) -> str:
    """A SARIF plain-text message: neither an embedded link nor a placeholder."""
    return visible(text).replace("](", "] (").replace("{", "{{").replace("}", "}}")


def relative_uri(path: str) -> str:
    """A path as a relative URI reference: "/" between parts, no scheme, no "..", percent-encoded; "." when nothing is left."""
    parts = [p for p in utf8_text(path).replace("\\", "/").split("/") if p not in ("", ".", "..")]
    return "/".join(quote(p, safe="") for p in parts) or "."
