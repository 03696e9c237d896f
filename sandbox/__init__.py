"""Runs tool code that a language model wrote: isolated in layers, deterministic, a few milliseconds a call.

Start at `sandbox.pool`. The threat model, the layers and the outcomes are described in `docs/sandbox.md`. This package
imports nothing of the rest of the project, and nothing beyond the standard library but in `service` (the pool behind
HTTP) and `remote` (its client).
"""

from __future__ import annotations

from sandbox.episode import SandboxEpisode
from sandbox.interface import Sandbox
from sandbox.limits import Limits
from sandbox.outcomes import INFRASTRUCTURE, CallResult, Outcome, SandboxError
from sandbox.pool import PoolStats, SandboxConfig, SandboxPool
from sandbox.request import PastCall
from sandbox.validation import Finding, Reason, Validation, validate, validate_call

__all__ = [
    "INFRASTRUCTURE",
    "CallResult",
    "SandboxEpisode",
    "Finding",
    "Limits",
    "Outcome",
    "PastCall",
    "PoolStats",
    "Reason",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxPool",
    "Validation",
    "validate",
    "validate_call",
]
