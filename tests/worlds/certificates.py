"""Certificates for services on this machine, made with OpenSSL's program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "service", *, password: str = "") -> tuple[str, str]:
    """A certificate of 127.0.0.1 and localhost that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    locked = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *locked, "-days", "2"]
        + [
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-out",
            cert,
            "-keyout",
            key,
        ],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)
