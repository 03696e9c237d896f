"""What a client of HTTP takes of an answer: no more than it has room for. Whom it asked, it asked alone: it follows no
redirect, which could lead a key, or a machine behind a firewall, anywhere."""

from __future__ import annotations

from typing import Any

MOST_BYTES = 64 << 20
"""Of an answer, decompressed; a completion of 50,000 tokens with logprobs takes 5 MB."""


class AnswerTooLarge(ValueError):
    """The answer is longer than the client takes."""


async def read_answer(response: Any, most_bytes: int = MOST_BYTES) -> bytes:
    """The body of an aiohttp response.

    Raises:
        AnswerTooLarge: it is longer.
    """
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            response.close()
            raise AnswerTooLarge(f"the answer is longer than {most_bytes} bytes")
    return bytes(body)
