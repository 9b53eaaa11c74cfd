"""Paragraphs of English prose out of plain text and HTML. A document is a list of paragraphs."""

import glob
import html
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

DOCUMENT_SEPARATOR = "\n\x1e\n"

PLAIN_CHARACTERS = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " -- ",
        "\u2026": "...",
        "\u00ad": "",
        "\u00b6": "",
        "\u2212": "-",
    }
)

# Shorter pages are indexes and redirects.
MIN_PAGE_CHARS = 400


def normalise(text: str) -> str:
    """NFKC with plain quotes and dashes, and single spaces; line breaks stay."""
    text = unicodedata.normalize("NFKC", text).translate(PLAIN_CHARACTERS)
    return re.sub(r"[ \t\r\f\v\xa0]+", " ", text)


def is_prose(paragraph: str, min_chars: int = 40) -> bool:
    """Whether this is a paragraph of English: long enough, mostly letters, ends like a sentence."""
    if len(paragraph) < min_chars or paragraph[-1] not in ".!?:\"')":
        return False
    letters = sum(char.isascii() and (char.isalpha() or char == " ") for char in paragraph)
    if letters < 0.86 * len(paragraph):
        return False
    words = paragraph.split()
    return len(words) >= 6 and max(map(len, words)) < 45


def unwrap(text: str) -> list[str]:
    """Paragraphs of hard-wrapped text, each on one line."""
    return [
        normalise(re.sub(r"\s*\n\s*", " ", paragraph)).strip()
        for paragraph in re.split(r"\n\s*\n", text)
        if paragraph.strip()
    ]


def prose_of(text: str, min_chars: int = 40) -> list[str]:
    """The paragraphs of hard-wrapped text that are prose."""
    return [paragraph for paragraph in unwrap(text) if is_prose(paragraph, min_chars)]


def num_chars(paragraphs: list[str]) -> int:
    return sum(map(len, paragraphs))


def group_paragraphs(paragraphs: list[str], min_chars: int = 6000) -> list[list[str]]:
    """Cuts a run of paragraphs into documents of at least `min_chars` characters (but the last)."""
    documents: list[list[str]] = []
    current: list[str] = []
    size = 0
    for paragraph in paragraphs:
        current.append(paragraph)
        size += len(paragraph)
        if size >= min_chars:
            documents.append(current)
            current, size = [], 0
    if current:
        documents.append(current)
    return documents


def strip_tags(markup: str) -> str:
    """Text of a fragment of HTML, one line a `<br>`."""
    text = re.sub(r"<br\s*/?>", "\n", markup)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\s*\n\s*", "\n", normalise(text)).strip()


class ParagraphParser(HTMLParser):
    """Collects the text of block elements; code, tables, navigation and scripts are dropped."""

    DROPPED = frozenset("script style pre table nav footer svg math head select form".split())  # noqa: SIM905
    BLOCKS = frozenset(
        "p li dd dt div h1 h2 h3 h4 h5 h6 section article body ul ol dl blockquote main br".split()  # noqa: SIM905
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._dropped_depth = 0
        self._pieces: list[str] = []

    def flush(self) -> None:
        """Ends the paragraph that is being read."""
        text = normalise("".join(self._pieces).replace("\n", " ")).strip()
        self._pieces = []
        if text:
            self.paragraphs.append(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.DROPPED:
            self._dropped_depth += 1
        if tag in self.BLOCKS:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.DROPPED and self._dropped_depth:
            self._dropped_depth -= 1
        if tag in self.BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._dropped_depth:
            self._pieces.append(data)


def html_paragraphs(path: Path) -> list[str]:
    """Prose of one page; nothing where html.parser gives up on a broken declaration."""
    parser = ParagraphParser()
    try:
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    except (AssertionError, ValueError):
        return []
    parser.flush()
    return [paragraph for paragraph in parser.paragraphs if is_prose(paragraph)]


def matching_files(root: Path, pattern: str, *, skip: str | None = None) -> list[Path]:
    """Files under `root`, in the order of their names as strings; `skip` is searched in "/" + relative name.

    `glob`, not `Path.glob`: it follows the links of Debian's documentation and sorts "a-b/c" before "a/c",
    and the order decides which of two equal paragraphs is kept.
    """
    names = sorted(glob.glob(pattern, root_dir=root, recursive=True))
    return [root / name for name in names if not (skip and re.search(skip, f"/{name}"))]


def html_documents(root: Path, pattern: str, *, skip: str | None = None) -> list[list[str]]:
    """One document a page that holds enough prose."""
    pages = (html_paragraphs(path) for path in matching_files(root, pattern, skip=skip))
    return [paragraphs for paragraphs in pages if num_chars(paragraphs) > MIN_PAGE_CHARS]
