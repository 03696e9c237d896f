"""Errors that end a program with one line, which the user can act on. Any other exception is a bug, with a traceback.

An error of another library, or a bare `ValueError`, never counts as one: a bug would look like a mistake of the user's
("max() arg is an empty sequence").
"""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """A request cannot be carried out; the message names it, and the fix. Programs exit with 2."""

    away: ClassVar[bool] = False
    """True if the missing thing may come back by itself: a server, a host, a bucket. The same command may succeed
    later. Programs exit with 69, so that a supervisor that restarts them can tell."""


class InputError(UserError, ValueError):
    """Invalid input: a setting, a record, a file, or two that do not fit each other."""
