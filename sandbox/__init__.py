"""Sandbox for tool code written by a language model: isolated in layers, deterministic, a few milliseconds per call.

Start at `sandbox.pool`. The threat model, the layers and the outcomes are described in `docs/sandbox.md`. This package
imports `astra_jax.base` and the standard library. Only `service` (the pool over HTTP) and `remote` (its client) import
other packages.
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
