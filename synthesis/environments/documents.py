"""Documents as sources of questions: Markdown, HTML, text and PDF, in passages with their place.

A passage is a part of one section, of `MOST` characters at most, and ends at a paragraph where one ends near. In PDF a
page is a section. Sections of fewer than `LEAST` characters are in one passage with the section that follows.
"""

from __future__ import annotations

import codecs
import glob
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from astra_jax.base.errors import InputError
from synthesis.core.mirror import fetched
from synthesis.core.records import DocumentPassage
from synthesis.environments.sources import Source, SourceError
from synthesis.pipeline.languages import language_of

LEAST, MOST = 200, 3_000
"""Characters of a passage. Of less a model asks from its memory; of more it uses only a part."""
_MAX_BYTES = 64 << 20


@dataclass
class Documents:
    """Passages of documents.

    Attributes:
        files: that a passage is of, in their order, by the names that the user gave.
        passages: in the order of the files, each with its place.
        rejected: number of files and pages that were left out, by reason.
        details: one example for each reason.
    """

    files: list[str] = field(default_factory=list)
    passages: list[Source] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, detail: str) -> None:
        self.rejected[reason] += 1
        self.details.setdefault(reason, detail)


class _Rejected(Exception):
    """A file that cannot be used: its reason and the detail."""


class _Block(NamedTuple):
    """A heading (`level` from 1) or a paragraph (0); `start` and `end` are its characters in the file, or the page."""

    text: str
    start: int
    end: int
    level: int = 0


def read_documents(entries: Sequence[str]) -> Documents:
    """Read the documents that the setting `documents` names.

    Args:
        entries: files, folders (all files in them), patterns such as `docs/**/*.md`, and addresses in a bucket.

    Raises:
        SourceError: an entry names no file, or no file has a passage.
    """
    found = Documents()
    for name in dict.fromkeys(name for entry in entries for name in _files_of(entry)):
        before = len(found.passages)
        try:
            found.passages += _passages(name, found)
        except _Rejected as rejection:
            found.reject(*rejection.args)
        if len(found.passages) > before:
            found.files.append(name)
    if entries and not found.passages:
        why = "; ".join(f"{count} {reason}: {found.details[reason]}" for reason, count in found.rejected.items())
        raise SourceError(f"documents: no file has text to ask about ({why})")
    return found


def _files_of(entry: str) -> list[str]:
    """Return the names of an entry's files. Raises `SourceError`: there are none."""
    if "://" in entry:
        return [entry]
    path = Path(entry)
    if path.is_dir():
        below = (one for one in path.rglob("*") if one.is_file())
        names = [str(one) for one in below if not any(part.startswith(".") for part in one.relative_to(path).parts)]
    elif path.is_file():
        names = [entry]
    else:
        names = [one for one in glob.glob(entry, recursive=True) if Path(one).is_file()]
    if not names:
        raise SourceError(f"documents: {entry!r} matches no file; give a file, a folder or a pattern that does")
    return sorted(names)


def _passages(name: str, found: Documents) -> list[Source]:
    """Return a file's passages. Raises `_Rejected`."""
    suffix = Path(name).suffix.lower()
    if suffix not in _READERS:
        known = ", ".join(_READERS)
        raise _Rejected("unknown_format", f"{name}: {suffix or 'no suffix'} is not read; convert it to one of {known}")
    try:
        data = fetched(name).read_bytes()
    except (OSError, InputError) as error:
        raise _Rejected("unreadable_file", f"{name}: {error}") from None
    if len(data) > _MAX_BYTES:
        raise _Rejected("too_large", f"{name} has {len(data) >> 20} MiB; split it into files of {_MAX_BYTES >> 20} MiB")
    if not data.strip():
        raise _Rejected("empty_file", f"{name} is empty")
    pages = _pdf_pages(data, name, found) if suffix == ".pdf" else {0: _READERS[suffix](_decoded(data, name, suffix))}
    title = next((one.text for blocks in pages.values() for one in blocks if one.level), Path(name).stem)
    passages = []
    for page, blocks in pages.items():
        for heading, start, end, text in _joined(blocks):
            place = DocumentPassage(name, heading=heading, page=page, start=start, end=end)
            passages.append(Source(domain=title, language=language_of(text), knowledge=text, document=place))
    if not passages:
        raise _Rejected("too_short", f"{name}: it has no section or page of {LEAST} characters")
    return passages


def _joined(blocks: Sequence[_Block]) -> Iterator[tuple[str, int, int, str]]:
    """Yield passages as (headings, start, end, text). What is too short at the end belongs to the passage before."""
    path: list[_Block] = []
    groups: list[tuple[str, list[_Block]]] = []
    size = 0
    for block in (part for one in blocks for part in _split(one)):
        if block.level:
            path = [*(one for one in path if one.level < block.level), block]
        full = size >= LEAST and (block.level or size + len(block.text) > MOST)
        if not groups or full:
            groups.append((" › ".join(one.text for one in path), []))
            size = 0
        groups[-1][1].append(block)
        size += len(block.text)
    if len(groups) > 1 and size < LEAST:
        groups[-2][1].extend(groups.pop()[1])
    for heading, group in groups:
        text = "\n\n".join(one.text for one in group)
        if len(text) >= LEAST:
            yield heading, group[0].start, group[-1].end, text


def _split(block: _Block) -> Iterator[_Block]:
    """Yield the parts of a paragraph that is longer than a passage, cut after a line or a sentence where one ends."""
    text, start = block.text, 0
    while len(text) - start > MOST:
        cuts = (text.rfind(mark, start + MOST // 2, start + MOST) for mark in ("\n", ". ", "。", " "))
        end = next((cut + 1 for cut in cuts if cut >= 0), start + MOST)
        yield _Block(text[start:end], block.start + start, min(block.start + end, block.end), block.level)
        start = end
    yield _Block(text[start:], min(block.start + start, block.end), block.end, block.level)


# ---------------------------------------------------------------------------------------------------------------------


def _decoded(data: bytes, name: str, suffix: str) -> str:
    """Return the text of a file: UTF-8, UTF-16 with a mark, or what HTML declares. Raises `_Rejected`."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if suffix in (".html", ".htm", ".xhtml") and (
        named := re.search(r"charset=[\"']?([\w-]{1,40})", data[:2_048].decode("latin-1"))
    ):
        encoding = named[1] if encoding == "utf-8-sig" and named[1].lower() != "utf-8" else encoding
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise _Rejected("not_text", f"{name}: {error}; save it as UTF-8") from None
    if "\0" in text:
        raise _Rejected("not_text", f"{name} has null characters; give the document as text")
    return text.replace("\r\n", "\n") if "\r\n" in text else text


def _text_blocks(text: str) -> list[_Block]:
    """Return the paragraphs of a text: what blank lines separate."""
    blocks, start, position = [], 0, 0
    lines: list[str] = []
    for line in [*text.splitlines(keepends=True), "\n"]:
        if line.strip():
            if not lines:
                start = position
            lines.append(line)
        elif lines:
            blocks.append(_block(lines, start))
            lines = []
        position += len(line)
    return blocks


def _block(lines: Sequence[str], start: int, level: int = 0) -> _Block:
    text = "".join(lines).rstrip()
    return _Block(text, start, start + len(text), level)


def _markdown_blocks(text: str) -> list[_Block]:
    """Return headings (`#` and underlined) and paragraphs; a fenced block of code is one paragraph (CommonMark)."""
    blocks: list[_Block] = []
    lines: list[str] = []
    start = position = 0
    fence = ""

    def flush() -> None:
        if lines:
            blocks.append(_block(lines, start))
            lines.clear()

    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if fence:
            lines.append(line)
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
                flush()
        elif bare.startswith(("```", "~~~")):
            flush()
            start, fence = position, bare[:3]
            lines.append(line)
        elif (marks := len(bare) - len(bare.lstrip("#"))) in range(1, 7) and bare[marks : marks + 1] in ("", " ", "\t"):
            flush()
            if title := bare.strip("#").strip():
                blocks.append(_Block(title, position, position + len(line.rstrip()), marks))
        elif len(lines) == 1 and bare and not bare.strip(bare[0]) and bare[0] in "=-":
            title = lines.pop().strip()
            blocks.append(_Block(title, start, position + len(line.rstrip()), 1 if bare[0] == "=" else 2))
        elif bare:
            if not lines:
                start = position
            lines.append(line)
        else:
            flush()
        position += len(line)
    flush()
    return blocks


class _HtmlBlocks(HTMLParser):
    """Reader of the text that a browser shows, without navigation."""

    _HIDDEN = frozenset(
        ("script", "style", "template", "noscript", "svg", "head", "nav", "footer", "aside", "form", "iframe")
    )
    _INLINE = frozenset(
        ("a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "mark", "q", "s")
        + ("samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "img", "br", "td", "th")
    )

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[_Block] = []
        self._hidden, self._level, self._pre = 0, 0, 0
        self._parts: list[str] = []
        self._start = self._end = 0
        self._lines = [0, *accumulate(len(line) for line in text.split("\n"))]
        self._lines = [offset + number for number, offset in enumerate(self._lines)]
        self.feed(text)
        self.close()
        self._flush()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self._HIDDEN:
            self._hidden += 1
        elif tag == "br":
            self._parts.append("\n")
        elif tag not in self._INLINE:
            self._flush()
            self._level = int(tag[1]) if re.fullmatch("h[1-6]", tag) else 0
            self._pre += tag == "pre"
            if tag == "li":
                self._parts.append("- ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        elif tag in ("td", "th"):
            self._parts.append(" | ")
        elif tag not in self._INLINE:
            self._flush()
            self._level = 0
            self._pre = max(0, self._pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._hidden or not data.strip():
            if self._parts and not self._hidden:
                self._parts.append(data if self._pre else " ")
            return
        line, column = self.getpos()
        start = self._lines[line - 1] + column
        if not any(part.strip() for part in self._parts if part != "- "):
            self._start = start
        self._end = start + len(data)
        self._parts.append(data if self._pre else re.sub(r"\s+", " ", data))

    def _flush(self) -> None:
        text = "".join(self._parts).strip().removesuffix("|").strip()
        self._parts = []
        if text and text != "-":
            self.blocks.append(_Block(text, self._start, self._end, self._level))


def _html_blocks(text: str) -> list[_Block]:
    return _HtmlBlocks(text).blocks


def _pdf_pages(data: bytes, name: str, found: Documents) -> dict[int, list[_Block]]:
    """Return the paragraphs of each page, from 1, that has text. Raises `_Rejected`."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what is wrong with the file is in the rejection
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise _Rejected("encrypted", f"{name} needs a password; store it without one")
        texts = [page.extract_text() for page in reader.pages]
    except _Rejected:
        raise
    except Exception as error:  # of a damaged file pypdf raises whatever its parts do
        raise _Rejected("unreadable_file", f"{name}: {type(error).__name__}: {error!s:.200}") from None
    bare = [number for number, text in enumerate(texts, start=1) if not text.strip()]
    if len(bare) == len(texts):
        raise _Rejected("no_text_layer", f"{name}: none of {len(texts)} pages has text (a scan?); run OCR on it first")
    pages = {number: _text_blocks(text) for number, text in enumerate(texts, start=1) if number not in set(bare)}
    for number in bare:
        found.reject("page_without_text", f"{name}, page {number}: it has no text (a scan or a picture)")
    for number, blocks in pages.items():
        if sum(len(one.text) for one in blocks) < LEAST:
            found.reject("page_too_short", f"{name}, page {number} has fewer than {LEAST} characters")
    return pages


_READERS: Mapping[str, Callable[[str], list[_Block]]] = {
    ".md": _markdown_blocks, ".markdown": _markdown_blocks, ".html": _html_blocks, ".htm": _html_blocks,
    ".xhtml": _html_blocks, ".txt": _text_blocks, ".text": _text_blocks, ".pdf": _text_blocks,
}  # fmt: skip
"""By suffix. A PDF's pages are read one by one."""


def place_text(place: DocumentPassage) -> str:
    """Write a place for people: `handbook/leave.md, Leave › Sick leave, characters 120 to 980`."""
    page = f"page {place.page}" if place.page else ""
    parts = (place.file, page, place.heading, f"characters {place.start:,} to {place.end:,}")
    return ", ".join(part for part in parts if part)
