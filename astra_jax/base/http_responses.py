"""Reading of HTTP answers by a client, with a size limit.

Clients follow no redirects: a redirect could send a key to another host, or reach a machine behind a firewall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_BYTES = 64 << 20
"""Largest decompressed answer, in bytes; a completion of 50,000 tokens with logprobs takes 5 MB."""


HIDDEN = "[key]"
"""Replacement for a key that an answer repeats."""
_SHORTEST_KEY = 8  # shorter values are no secrets but words ("EMPTY")


class AnswerTooLarge(ValueError):
    """Error for an answer larger than the client accepts."""


async def read_answer(response: Any, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the body of an aiohttp response, without the keys that were sent.

    Services may repeat a wrong key in a refusal, and the answer goes into errors, logs and journals.

    Raises:
        AnswerTooLarge: the body is longer than `most_bytes`.
    """
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            response.close()
            raise AnswerTooLarge(f"the answer is longer than {most_bytes} bytes")
    return without_keys(bytes(body), response.request_info.headers)


def without_keys(said: bytes, sent: Mapping[str, str]) -> bytes:
    """Return the answer with `HIDDEN` in place of each key among the headers sent."""
    for name, value in sent.items():
        if name.lower() == "authorization" or name.lower().endswith(("-key", "-token")):
            key = value.rpartition(" ")[2]
            if len(key) >= _SHORTEST_KEY:
                said = said.replace(key.encode(), HIDDEN.encode())
    return said
