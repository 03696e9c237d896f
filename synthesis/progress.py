"""What a running stage shows: a bar with inputs done and rejected, and the traffic with model endpoints."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tqdm import tqdm


@dataclass
class Traffic:
    """What this process asked of model endpoints.

    Attributes:
        requests: that were sent, failed ones too.
        tokens: of prompts and completions, as the answers say.
    """

    requests: int = 0
    tokens: int = 0


TRAFFIC = Traffic()
"""Of all endpoints of this process; counted, never read back, so that nothing depends on it but what a person sees."""


class Progress:
    """A progress bar; `ticking` renews its figures, so that counting costs an addition."""

    SECONDS = 1.0

    def __init__(self, label: str, total: int | None, done: int) -> None:
        self._bar = tqdm(total=total, initial=done, desc=label, leave=True)
        self._rejected = 0
        self._seen = (time.monotonic(), TRAFFIC.requests, TRAFFIC.tokens)
        self._first = TRAFFIC.requests

    def count(self, *, rejected: bool) -> None:
        self._rejected += rejected
        self._bar.update()

    def close(self) -> None:
        self._renew()
        self._bar.close()

    async def ticking(self) -> None:
        """Renew the figures until cancelled."""
        while True:
            await asyncio.sleep(self.SECONDS)
            self._renew()

    def _renew(self) -> None:
        shown = {"rejected": str(self._rejected)} if self._rejected else {}
        if requests := TRAFFIC.requests - self._first:
            then, _, tokens = self._seen
            now = time.monotonic()
            shown["requests"] = str(requests)
            shown["tokens/s"] = f"{(TRAFFIC.tokens - tokens) / max(now - then, 1e-9):.0f}"
            self._seen = (now, TRAFFIC.requests, TRAFFIC.tokens)
        if shown:
            self._bar.set_postfix(shown)
