"""Sides of a comparison: processes that work when a line on stdin says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import rows


class Side:
    """One process group. Each line that it is sent it answers with a line of JSON on stdout."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, pauses: bool = False) -> None:
        """Starts it, and waits for its answer to `ready`, whose `seconds` are `first`.

        Args:
            pauses: stop its processes while another side has its turn; for those that wait busily.
        """
        self._pauses = pauses
        self.process = subprocess.Popen(
            command,
            cwd=rows.ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.first: float = self.ask("ready")["seconds"]

    def ask(self, line: str) -> dict[str, Any]:
        """Let it run until it has answered.

        Raises:
            RuntimeError: it has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a side ended with {self.process.wait()}; see its output above")
        if self._pauses:
            os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(answer)

    def kill(self) -> None:
        """All of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
