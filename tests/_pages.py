"""A page read back: what a parser finds in it."""

from html.parser import HTMLParser

from cenet.report.writing import build_page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


class Reader(HTMLParser):
    """Tags, attributes, headings and the cells of every table by the id of its figure."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.headings, self.tables = [], [], [], {}
        self.text, self._figure, self._cell, self._raw = "", None, False, None
        self.scripts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        found = dict(attrs)
        if tag == "figure":
            self._figure = found.get("id")
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(int(tag[1]))
        if tag == "tr" and self._figure:
            self.tables.setdefault(self._figure, []).append([])
        if tag in ("td", "th"):
            self._cell = True
            if self._figure:
                self.tables[self._figure][-1].append("")
        self._raw = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        if tag == "figure":
            self._figure = None
        if tag in ("td", "th"):
            self._cell = False
        self._raw = None

    def handle_data(self, data):
        if self._raw == "script":
            self.scripts.append(data)
        elif not self._raw:
            self.text += data
        if self._cell and self._figure:
            self.tables[self._figure][-1][-1] += data


def figures(page):
    return {figure.key: figure for section in page.sections for figure in section.figures}


def sections(source):
    return [section.key for section in build_page([source]).sections]
