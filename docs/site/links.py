"""Check of a site's links: every target of a link, script, style or image must exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

_ATTRIBUTES = ("href", "src")


@dataclass
class _Page(HTMLParser):
    """Links and anchors of an HTML page."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in _ATTRIBUTES and value and not (tag == "link" and name == "href" and "canonical" in str(attrs)):
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """`PAGE: LINK` of each link within a folder of HTML that leads nowhere in it, or out of it by anything but https.

    Links to other hosts are not followed: CI has no business with them, and may have no network.
    """
    pages: dict[Path, _Page] = {}
    for file in sorted(one for one in site.rglob("*.html") if one.is_file()):
        pages[file] = page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
    found = []
    for file, page in pages.items():
        if file.name != "404.html":  # which has links from the site's own root
            found += [
                f"{file.relative_to(site)}: {link}"
                for link in dict.fromkeys(page.links)
                if not _leads_somewhere(link, file, site, pages)
            ]
    return found


def _leads_somewhere(link: str, file: Path, site: Path, pages: dict[Path, _Page]) -> bool:
    address = urlsplit(link)
    if address.scheme or address.netloc:
        return address.scheme in ("https", "mailto", "data") or address.hostname in ("127.0.0.1", "localhost")
    path, anchor = urldefrag(address._replace(query="").geturl())
    target = (file.parent / unquote(path)).resolve() if path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file() or not target.is_relative_to(site.resolve()):
        return False
    return not anchor or target.suffix != ".html" or unquote(anchor) in pages[target].anchors
