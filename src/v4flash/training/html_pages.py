"""Documentation pages in HTML as plain text.

Knows: which elements break lines, which keep their white space, and which hold no text of the page. Does not know:
packages or documents.
"""

import re
from html.parser import HTMLParser

_SILENT = {"head", "script", "style", "svg", "nav", "form", "button"}
_SILENT_CLASSES = {"navheader", "navfooter", "nosearch", "toc"}
_EMPTY = {"br", "hr", "img", "input", "link", "meta", "col", "area", "base", "wbr", "source"}
_PARAGRAPHS = {"p", "div", "table", "ul", "ol", "dl", "pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"}
_LINES = {"tr", "br", "dt", "dd", "li"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []  # open elements below and including a silent one
        self._verbatim = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in _EMPTY:
            if tag == "br":
                self.parts.append("\n")
            return
        classes = set((dict(attributes).get("class") or "").split())
        if self._silent or tag in _SILENT or classes & _SILENT_CLASSES:
            self._silent.append(tag)
            return
        self._break(tag)
        if tag == "li":
            self.parts.append("* ")
        self._verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._silent:
            # Elements that were never closed end with the one around them.
            if tag in self._silent:
                while self._silent.pop() != tag:
                    pass
            return
        self._verbatim -= tag == "pre" and self._verbatim > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")


def page_text(html: str) -> str:
    """The text of a page: paragraphs apart by a blank line, preformatted text as it stands."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    text = re.sub(r"[ \t\xa0]+\n", "\n", "".join(reader.parts))
    text = re.sub(r"(?m)^ (?=\S)", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
