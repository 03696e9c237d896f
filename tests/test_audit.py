"""The audit of CI finds what it is for; and that of this machine's packages and of the tree finds nothing."""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path

import pytest

from tests import audit


def metadata(*fields: tuple[str, str]) -> Message:
    message = Message()
    for name, value in fields:
        message[name] = value
    return message


@pytest.mark.parametrize(
    ("fields", "permissive"),
    [
        ([("License-Expression", "Apache-2.0 AND MIT")], True),
        ([("License-Expression", "GPL-3.0-only OR BSD-3-Clause")], True),  # a choice
        ([("License-Expression", "MIT AND LGPL-2.1-only")], False),
        ([("License-Expression", "AGPL-3.0-or-later"), ("License", "MIT")], False),  # the newest field counts
        ([("License-Expression", "MIT AND (GPL-2.0-only OR BSD-3-Clause)")], False),  # brackets are for people
        ([("Classifier", "License :: OSI Approved :: MIT License")], True),
        ([("Classifier", "License :: OSI Approved :: MIT License"), ("Classifier", "License :: Other")], False),
        ([("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)")], False),
        ([("Classifier", "License :: OSI Approved"), ("License", "MIT License\n\nCopyright (c) 2024")], True),
        ([("Classifier", "Programming Language :: Python :: 3"), ("License", "GPL")], False),
        ([("License", "Proprietary: all rights reserved")], False),
        ([], False),
    ],
)
def test_a_licence_is_permissive_or_a_finding(fields: list[tuple[str, str]], permissive: bool) -> None:
    found = audit.licence_findings({"one": metadata(*fields)}, {})
    assert (found == []) is permissive
    assert audit.licence_findings({"one": metadata(*fields)}, {"one": "a reason"}) == (
        ["one needs no line in OTHER_LICENCES"] if permissive else []
    )


def test_what_is_installed_here_may_be_used_by_anybody() -> None:
    packages = audit.installed()
    assert {"jax", "aiohttp", "numpy", "markupsafe"} <= set(packages), "with what its requirements require"
    assert "pytest" not in packages
    assert audit.licence_findings({name: one.metadata for name, one in packages.items()}, audit.OTHER_LICENCES) == []


ANSWER = {
    "dependencies": [
        {"name": "jinja2", "version": "2.0", "vulns": [
            {"id": "PYSEC-1", "aliases": ["CVE-2030-1"], "fix_versions": ["2.1", "3.0"], "description": "a hole"},
            {"id": "PYSEC-2", "aliases": [], "fix_versions": [], "description": "another"},
        ]},
        {"name": "numpy", "version": "2.4", "vulns": []},
        {"name": "ours", "skip_reason": "not found on PyPI"},
    ]
}  # fmt: skip


def test_a_known_vulnerability_is_a_finding_unless_it_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(ANSWER)
    first, second = "jinja2 2.0: PYSEC-1, fixed in 2.1, 3.0", "jinja2 2.0: PYSEC-2, fixed in no version"
    assert audit.advisory_findings(text, {}) == [first, second]
    assert audit.advisory_findings(text, {"CVE-2030-1": "a reason"}) == [second]
    assert audit.advisory_findings(text, {"PYSEC-1": "a reason", "PYSEC-2": "a reason"}) == []
    assert "without advisories: 1 of 3 packages, ours" in capsys.readouterr().out


def test_where_no_advisories_are_to_be_had_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that knows no advisories; and no network at all."""
    nothing = {"dependencies": [{"name": "numpy", "skip_reason": "Dependency not found on PyPI"}]}
    assert audit.advisory_findings(json.dumps(nothing), {}) == []
    assert "no advisory database could be reached: 1 of 1" in capsys.readouterr().out
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    assert audit.ask_for_advisories({"numpy": "0.0.1"}) is None
    assert "no advisory database could be reached: " in capsys.readouterr().out


def test_a_planted_key_is_found(tmp_path: Path) -> None:
    """Put together here, or the audit would find this file."""
    planted = {
        "cloud.py": f"key = 'AKIA{'QYLPMN5HHHFPZAM2'}'\n",
        "hub.txt": f"clone with ghp{'_'}{'wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0p' + 'INUx'}\n",
        "server.pem": f"-----BEGIN RSA {'PRIVATE'} KEY-----\nMIIEow\n",
        "settings.json": json.dumps({"pass" + "word": "hunter2-and-more"}) + "\n",
        "client.py": f"url = 'https://admin:{'swordfish'}@example.org'\n",
    }
    for name, text in planted.items():
        (tmp_path / name).write_text(f"first line\n{text}")
    (tmp_path / "digest.py").write_text(f"SHA256 = {'0123456789abcdef' * 4!r}\ntoken = None\n")
    found = audit.secret_findings(sorted(tmp_path.iterdir()))
    assert {Path(one.split(":")[0]).name for one in found} == set(planted)
    assert all(one.split(":")[1] == "2" for one in found)
    assert audit.secret_findings([tmp_path / "settings.json"], {"hunter2-and-more": "a reason"}) == []


def test_every_word_that_is_no_secret_is_still_there() -> None:
    """So that the list stays short."""
    read = [path for path in audit.tracked() if path.suffix in (".py", ".yaml")]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in read]
    for word in audit.NOT_SECRETS:
        quoted = sum(
            text.count(form) for text in texts for form in (f'"{word}"', f":{word}@", f": {word}\n", f": {word}}}")
        )
        assert quoted > 1, word  # one is the list's own


def test_each_threat_names_what_stops_it_and_where_that_is_tested() -> None:
    page = (audit.ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    assert rows[0] == ["who", "tries to", "stopped by", "tested in"]
    threats = rows[2:]
    assert len(threats) >= 20
    for row in threats:
        stopped, tested = ([name for name in cell.split("`")[1::2] if "/" in name] for cell in row[-2:])
        assert stopped and tested, row
        assert all((audit.ROOT / name).is_file() for name in stopped + tested), row
        assert all(name.startswith("tests/") for name in tested), row
