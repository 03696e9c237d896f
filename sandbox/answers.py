"""What a client of HTTP takes of an answer: no more than it has room for. Whom it asked, it asked alone: it follows no
redirect, which could lead a key, or a machine behind a firewall, anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_BYTES = 64 << 20
"""Of an answer, decompressed; a completion of 50,000 tokens with logprobs takes 5 MB."""


HIDDEN = "[key]"
"""What stands where an answer repeats the key that it was asked with."""
_SHORTEST_KEY = 8  # shorter ones are no secrets, and words ("EMPTY")


class AnswerTooLarge(ValueError):
    """The answer is longer than the client takes."""


async def read_answer(response: Any, most_bytes: int = MOST_BYTES) -> bytes:
    """The body of an aiohttp response, without the keys that were sent for it.

    Services repeat a wrong key when they refuse it; what they say goes into errors, logs and journals.

    Raises:
        AnswerTooLarge: it is longer.
    """
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            response.close()
            raise AnswerTooLarge(f"the answer is longer than {most_bytes} bytes")
    return without_keys(bytes(body), response.request_info.headers)


def without_keys(said: bytes, sent: Mapping[str, str]) -> bytes:
    """What was said, with `HIDDEN` for each key among the headers sent."""
    for name, value in sent.items():
        if name.lower() == "authorization" or name.lower().endswith(("-key", "-token")):
            key = value.rpartition(" ")[2]
            if len(key) >= _SHORTEST_KEY:
                said = said.replace(key.encode(), HIDDEN.encode())
    return said
