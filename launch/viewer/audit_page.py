"""Page of an audit: one HTML file."""

from __future__ import annotations

from pathlib import Path

from astra_jax.base.files import write_text
from launch.viewer.service import rendered
from synthesis.audit.report import AuditReport


def write_audit(path: Path, report: AuditReport) -> None:
    """Write the page of an audit, atomically."""
    write_text(path, rendered("audit.html.jinja", report=report))
