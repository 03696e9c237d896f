"""What CI asks of what users install and of what is committed: `python tests/audit.py`. With findings it exits with 1.

Licences: of every package that `pip install .` brings, one that lets anybody use it, as its own metadata says.
Advisories: none that PyPI knows of the versions installed (pip-audit). Where it tells none, it is said.
Secrets: nothing that looks like a key or a password in a tracked file (detect-secrets).

What is found and all right has a line below, with its reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from detect_secrets import SecretsCollection
from detect_secrets.settings import transient_settings
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "astra-jax"
_MOST_SECONDS = 180  # of waiting for advisories
PERMISSIVE = {
    *("0bsd", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "hpnd", "isc", "mit", "mit-0", "mit-cmu"),
    *("psf-2.0", "python-2.0", "unlicense", "zlib"),
    # As older metadata has it.
    *("3-clause bsd license", "apache 2.0", "apache license", "apache software license", "bsd", "bsd license"),
    *("isc license (iscl)", "mit license", "public domain", "python software foundation license"),
}
OTHER_LICENCES = {
    "certifi": "MPL-2.0 binds whoever changes its files; it is used as it comes",
    "tqdm": "MPL-2.0 AND MIT: as certifi",
}
"""By package: why a licence that is not in `PERMISSIVE` is all right."""
ACCEPTED_ADVISORIES: dict[str, str] = {}
"""By an advisory's id: why it does not concern us."""
NOT_SECRETS = {
    "sesame": "a browser's password in a test of the viewer",
    "the secret of another episode, 7f3a9c51": "what a test looks for in another call's memory",
    "none": "as the last, where there is none",
    "wrong": "a teacher's key in a test of endpoints",
    "revoked": "as the last",
    "poor": "as the last",
    "right": "as the last",
    "of-the-agent": "as the last, of a role",
    "key_file": "the name of a flag",
    "astra-keys": "the name of a Kubernetes secret in the recipes",
}
PLUGINS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector", "CloudantDetector"),
    *("DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector", "IbmCloudIamDetector"),
    *("IbmCosHmacDetector", "JwtTokenDetector", "KeywordDetector", "MailchimpDetector", "NpmDetector"),
    *("OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector", "SendGridDetector", "SlackDetector"),
    *("SoftlayerDetector", "SquareOAuthDetector", "StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
"""Not that for hexadecimal strings, which takes each digest that pins a download for a key, nor that for addresses."""
BASE64 = {"name": "Base64HighEntropyString", "limit": 4.5}


def installed(project: str = PROJECT) -> dict[str, importlib.metadata.Distribution]:
    """What an installed project needs to run, and what that needs, by name; markers are asked for this machine.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    left = [(Requirement(text), frozenset[str]()) for text in importlib.metadata.requires(project) or ()]
    while left:
        wanted, extras = left.pop()
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        name, chosen = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, chosen) not in asked:
            asked.add((name, chosen))
            found[name] = importlib.metadata.distribution(wanted.name)
            left += [(Requirement(text), chosen) for text in found[name].requires or ()]
    return found


def licence_of(metadata: Any) -> str:
    """A package's licence, by the newest of the fields that it may be in; empty if in none."""
    if expression := metadata.get("License-Expression"):
        return expression
    kinds = [one.rpartition(" :: ")[2] for one in metadata.get_all("Classifier") or () if one.startswith("License :: ")]
    if named := [kind for kind in kinds if kind != "OSI Approved"]:
        return " AND ".join(named)  # or OR: it does not say
    text = (metadata.get("License") or "").strip()
    return text.splitlines()[0].strip() if text else ""


def is_permissive(licence: str) -> bool:
    """Whether an expression leaves a choice of licences that are all of `PERMISSIVE`. With brackets: no, list it."""
    choices = [choice.split(" AND ") for choice in licence.split(" OR ")]
    return any(all(name.strip().lower() in PERMISSIVE for name in names) for names in choices)


def licence_findings(metadata: Mapping[str, Any], listed: Mapping[str, str]) -> list[str]:
    """Packages, by name, whose licence is neither permissive nor listed; lines of the list that nothing needs."""
    others = {name: licence_of(one) for name, one in metadata.items() if not is_permissive(licence_of(one))}
    found = [f"{name}: its licence is {it or 'unknown'!r}" for name, it in others.items() if name not in listed]
    return found + [f"{name} needs no line in OTHER_LICENCES" for name in listed if name not in others]


def ask_for_advisories(versions: Mapping[str, str]) -> str | None:
    """pip-audit's answer, as JSON, for packages of these names and versions; None, having said why, if there is none.

    Raises:
        subprocess.CalledProcessError: pip-audit itself cannot run.
    """
    program = [sys.executable, "-m", "pip_audit"]
    subprocess.run([*program, "--version"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in versions.items()))
        file.flush()
        options = ["--requirement", file.name, "--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
        command = [*program, *options, "--timeout=10"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no advisory database could be reached: no answer after {_MOST_SECONDS} s")
            return None
    if not done.stdout:
        print(f"no advisory database could be reached: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout or None


def advisory_findings(answer: str, accepted: Mapping[str, str]) -> list[str]:
    """Known vulnerabilities in pip-audit's answer; what it knows nothing of is printed."""
    packages = json.loads(answer)["dependencies"]
    if unknown := [one["name"] for one in packages if "skip_reason" in one]:
        what = "no advisory database could be reached" if len(unknown) == len(packages) else "without advisories"
        print(f"{what}: {len(unknown)} of {len(packages)} packages, {', '.join(unknown[:5])} ...")
    found = []
    for one in packages:
        for advisory in one.get("vulns", ()):
            if not {advisory["id"], *advisory["aliases"]} & set(accepted):
                fixed = ", ".join(advisory["fix_versions"]) or "no version"
                found.append(f"{one['name']} {one['version']}: {advisory['id']}, fixed in {fixed}")
    return found


def secret_findings(paths: Iterable[Path], allowed: Mapping[str, str] = NOT_SECRETS) -> list[str]:
    """Places in these files that look like a key or a password."""
    found = SecretsCollection()
    with transient_settings({"plugins_used": [*({"name": name} for name in PLUGINS), BASE64]}):
        for path in paths:
            found.scan_file(str(path))
    return [f"{path}:{one.line_number}: {one.type}" for path, one in found if one.secret_value not in allowed]


def tracked() -> list[Path]:
    """Files that are committed, or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def main() -> int:
    packages = installed()
    found = licence_findings({name: one.metadata for name, one in packages.items()}, OTHER_LICENCES)
    with ThreadPoolExecutor(1) as beside:  # it mostly waits
        asked = beside.submit(ask_for_advisories, {name: one.version for name, one in packages.items()})
        found += secret_findings(tracked())
    if (answer := asked.result()) is not None:
        found += advisory_findings(answer, ACCEPTED_ADVISORIES)
    for one in found:
        print(f"audit: {one}")
    print(f"audit: {len(packages)} packages, {len(tracked())} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
