"""A small page of styled lines: wrapping, hanging indents, aligned keys. What `terminal` is written on."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text


class Page:
    """Collects lines of at most `width` columns; wide (CJK) and combining characters are measured as a terminal does."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = width
        self._lines: list[Text] = []
        # Everything that rich would otherwise read from the surroundings is stated: the caller has decided.
        self._console = Console(
            file=io.StringIO(),
            width=width,
            height=25,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=not color,
            legacy_windows=False,
            highlight=False,
            markup=False,
            emoji=False,
            _environ={},
        )

    @staticmethod
    def text(*pieces: str | tuple[str, str]) -> Text:
        """Plain and (text, style) pieces joined. They must be visible text already."""
        return Text.assemble(*pieces)

    def add(self, text: Text, indent: int = 0, *, hang: int = 0) -> None:
        """Wrapped at words, indented; continuation lines `hang` columns more. Words longer than a line are folded."""
        for i, line in enumerate(text.wrap(self._console, self.width - indent - hang, overflow="fold")):
            self._lines.append(_indented(line, indent + hang if i else indent))

    def pair(self, key: str, value: Text, indent: int, key_width: int, *, key_style: str = "dim") -> None:
        """A key in its column and the value wrapped beside it, or below when the key is too long for its column."""
        head = Text(key, style=key_style)
        if head.cell_len >= key_width or self.width - indent - key_width < 20:
            self.add(head, indent)
            if value.plain:
                self.add(value, indent + 2)
            return
        lines = value.wrap(self._console, self.width - indent - key_width, overflow="fold")
        head.pad_right(key_width - head.cell_len)
        for i, line in enumerate(lines or [Text()]):
            line.rstrip()
            self._lines.append(_indented(Text.assemble(head, line) if i == 0 else _indented(line, key_width), indent))

    def flow(self, items: list[str], indent: int, *, style: str, between: str = " · ") -> None:
        """Short items side by side, broken only between two of them where that is possible."""
        line = ""
        for i, item in enumerate(items):
            piece = item + (between.rstrip() if between == ", " and i < len(items) - 1 else "")
            joined = (line + (" " if between == ", " else between) + piece) if line else piece
            if line and Text(joined).cell_len > self.width - indent:
                self.add(Text(line, style=style), indent)
                line = piece
            else:
                line = joined
        if line:
            self.add(Text(line, style=style), indent)

    def rule(self, title: str, style: str) -> None:
        """A titled line across the page, then a blank one."""
        text = Text.assemble(("── ", "dim"), (title, style), " ")
        text.append("─" * max(0, self.width - text.cell_len), style="dim")
        self._lines += text.wrap(self._console, self.width, overflow="fold")

    def blank(self) -> None:
        """One empty line, never two."""
        if self._lines and self._lines[-1].plain:
            self._lines.append(Text())

    def whole(self, text: Text) -> None:
        """One line that is never wrapped, so that programs can rely on it."""
        self._lines.append(text)

    def render(self) -> str:
        """All lines, without trailing spaces, ending with one newline."""
        for line in self._lines:
            line.rstrip()
            self._console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
        out = self._console.file
        return out.getvalue() if isinstance(out, io.StringIO) else ""


def _indented(line: Text, indent: int) -> Text:
    line.rstrip()
    return Text.assemble(" " * indent, line) if indent and line.plain else line
