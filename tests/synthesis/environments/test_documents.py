"""Documents as sources of questions: passages and their places, and what is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.decompose import question_seeds
from synthesis.environments.documents import LEAST, MOST, Documents, place_text, read_documents
from synthesis.environments.sources import SourceError

TEXT = "The gate of the yard opens at seven in the morning and is locked at nine in the evening, all days of a year. "
LONG = TEXT * 3


def read(folder: Path, **files: str | bytes) -> Documents:
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_documents([str(folder)])


def headings(documents: Documents) -> list[str]:
    return [one.document.heading for one in documents.passages if one.document]


def test_markdown_is_cut_at_headings_and_paragraphs(tmp_path: Path) -> None:
    source = (
        f"# Yard\n\n{LONG}\n\n## Gate\n\n{LONG}\n\n```sh\n# no heading\n```\n\nPaths\n-----\n\n{LONG}\n\n### Width\n\n"
        f"Short.\n\n## Trees\n\n" + "\n\n".join([TEXT * 10] * 5) + "\n\nThe end.\n"
    )
    documents = read(tmp_path, yard_md=source.replace("\n", "\r\n"))
    found = headings(documents)
    assert found[:4] == ["Yard", "Yard › Gate", "Yard › Paths", "Yard › Paths › Width"]
    assert len(found) > 5 and set(found[4:]) == {"Yard › Trees"}
    assert {one.domain for one in documents.passages} == {"Yard"}
    assert all(LEAST <= len(one.knowledge) <= MOST + LEAST for one in documents.passages)
    assert "# no heading" in documents.passages[1].knowledge
    places = [one.document for one in documents.passages if one.document]
    # The ranges are in order, do not overlap, and lack only blank lines.
    assert all(first.end <= second.start for first, second in zip(places, places[1:], strict=False))
    assert all(not source[one.end : two.start].strip() for one, two in zip(places, places[1:], strict=False))
    assert (places[0].start, places[-1].end) == (0, len(source.rstrip()))
    assert place_text(places[1]) == f"{tmp_path}/yard.md, Yard › Gate, characters {places[1].start} to {places[1].end}"


def test_html_is_read_as_a_browser_shows_it(tmp_path: Path) -> None:
    source = (
        "<!doctype html><html><head><title>T</title><style>p {}</style></head><body><nav>Menu</nav>"
        f"<h1>Locks &amp; keys</h1><p>{LONG}<b>bold</b>ly</p><script>var x = 1;</script>"
        f"<h2>Table</h2><table><tr><td>P1</td><td>12 mm</td></tr></table><ul><li>one</li></ul><p>{LONG}"
    )
    documents = read(tmp_path, page_html=source)
    assert headings(documents) == ["Locks & keys", "Locks & keys › Table"]
    first, second = documents.passages
    assert "boldly" in first.knowledge and "P1 | 12 mm" in second.knowledge and "- one" in second.knowledge
    assert not any(word in first.knowledge + second.knowledge for word in ("Menu", "var x", "p {}"))
    assert second.document and source[second.document.start :].startswith("Table</h2>")


def test_what_cannot_be_read_is_named_with_its_reason(tmp_path: Path) -> None:
    documents = read(
        tmp_path, good_txt=LONG, empty_txt=" \n", latin_md=f"caf\xe9 {LONG}".encode("latin-1"), word_docx=b"PK",
        bad_pdf=b"%PDF-1.4 cut", short_md="# Title\n\nOne line.", utf16_txt=LONG.encode("utf-16"),
    )  # fmt: skip
    reasons = ("empty_file", "not_text", "unknown_format", "unreadable_file", "too_short")
    assert documents.rejected == Counter(reasons)
    assert [Path(name).name for name in documents.files] == ["good.txt", "utf16.txt"]
    assert all(str(tmp_path) in detail for detail in documents.details.values())
    unusable = {"no/*.md": "'no/\\*.md' matches no file", str(tmp_path / "empty.txt"): "1 empty_file"}
    for entry, said in unusable.items():
        with pytest.raises(SourceError, match=said):
            read_documents([entry])
    assert len(read_documents([f"{tmp_path}/*.txt", f"{tmp_path}/good.txt"]).passages) == 2  # each file once


def test_each_question_keeps_the_place_of_its_passage(tmp_path: Path) -> None:
    documents = read(tmp_path, a_md=f"# A\n\n{LONG}", b_md=f"# B\n\n{LONG} Also.")
    config = EnvironmentsConfig(count=6, documents=(str(tmp_path),)).asked_of(by_rules=False)
    seeds = question_seeds(config, 0, passages=documents.passages)
    assert Counter(one.document for one in seeds) == dict.fromkeys((one.document for one in documents.passages), 3)
    assert all(one.knowledge and one.domain in "AB" for one in seeds)
    assert (config.fact_distractors, config.split_by) == (False, "source")
