"""What ends a program with one line: what whoever runs it can mend. Any other exception is a bug, and is shown whole.

An error of another library, or a bare `ValueError`, is never taken for one: a bug would look like a mistake of the
user's ("max() arg is an empty sequence").
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """Something that is asked for cannot be done; the message names what, and the remedy. Programs exit with 2."""

    away: ClassVar[bool] = False
    """Whether what is missing may come back without anybody's doing: a server, a host, a bucket. The same command may
    succeed then, and programs exit with 69, so that whatever starts them again can tell."""


class InputError(Refusal, ValueError):
    """What was given does not work: a setting, a record, a file, or two that do not fit each other."""
