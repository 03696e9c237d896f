"""Compare final answers with math-verify.

    python aime.py SOCKET

Each answer is compared in a separate process with limits on processor time and memory. Model output can keep sympy busy
forever, in a multiplication of integers that no timer of Python interrupts. With a limit on processor time, the result
depends on the answer alone, not on how busy the machine is.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

import serving

_CPU_SECONDS = 5
"""Limit of math-verify; an ordinary answer takes a few hundredths."""
_MEMORY_BYTES = 4 << 30


def compare(text: str, answer: str) -> bool | None:
    """Return whether the text's last box, or its last formula if it has no box, equals the answer; None if it has
    neither.

    Plain words are not searched for numbers: the question asks for a box, and math-verify would evaluate a match as
    Python.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    # Without its own timers, which count the time of other processes too.
    found = parse(text, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    gold = parse(f"${answer}$", [LatexExtractionConfig()], parsing_timeout=None)
    return verify(gold, found, timeout_seconds=None) if found else None


def grade(text: str, answer: str) -> dict[str, Any]:
    """Compare in a process of its own.

    Args:
        text: a whole reply, without reasoning.
        answer: an integer.

    Returns:
        right: whether it is.
        problem: why there is nothing to compare; "" where there is.

    Raises:
        RuntimeError: the process ended of something else than the answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
            right = compare(text, answer)
            os.write(writer, b"?" if right is None else b"1" if right else b"0")
        except Exception:  # of what it was given: the same call has worked when the program started
            os.write(writer, b"!")
        finally:
            os._exit(0)
    os.close(writer)
    verdict = os.read(reader, 1)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if verdict in (b"0", b"1"):
        return {"right": verdict == b"1", "problem": ""}
    if verdict == b"?":
        return {"right": False, "problem": "there is no boxed answer, nor a formula"}
    if verdict == b"!":
        return {"right": False, "problem": "the answer cannot be compared"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGSEGV):
        return {"right": False, "problem": f"the answer could not be compared in {_CPU_SECONDS} s of processor time"}
    raise RuntimeError(f"the process that compares ended with status {status}")


if __name__ == "__main__":
    # Parsers are built at their first use: once here, not in every child.
    assert compare(r"so $x = 1$, and \boxed{\frac{10}{2}}", "5")
    serving.serve(sys.argv[1], lambda: {"grade": grade})
