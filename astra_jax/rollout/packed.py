"""Binary form of episodes and turns for journals, checkpoints and datasets; JSON of thousands of numbers is slow and
long."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from astra_jax.base.typed import convert_to
from astra_jax.rollout.episode import Episode, FinishedTurn


class Packed(msgspec.Struct, array_like=True):
    """An episode or a turn as bytes. Other fields are JSON, which supports integers of any length and lone surrogates
    in arguments, unlike msgpack."""

    token_ids: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    text: bytes


def packed(episode: Episode) -> Packed:
    """Pack an episode, see `Packed`."""
    rest = msgspec.structs.replace(episode, token_ids=[], loss_mask=[], logprobs=[], versions=[])
    ids, mask, logprobs = _ints(episode.token_ids), bytes(episode.loss_mask), _floats(episode.logprobs)
    return Packed(ids, mask, logprobs, _ints(episode.versions), _text(rest))


def unpacked(content: Packed) -> Episode:
    """Return the episode that was `packed`."""
    values = {
        "token_ids": np.frombuffer(content.token_ids, np.int32).tolist(),
        "loss_mask": list(content.mask),
        "logprobs": np.frombuffer(content.logprobs, np.float64).tolist(),
        "versions": np.frombuffer(content.versions, np.int32).tolist(),
    }
    return convert_to(json.loads(content.text) | values, Episode)


class CompactEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode in its most compact form for training: 2 or 4 bytes a token, plus 4 for each sampled one.

    Attributes:
        tokens: number of tokens, T.
        token_ids: [T] little-endian unsigned integers of 2 or 4 bytes.
        spans: [S, 2] little-endian int32, one per run of tokens of a kind: its length, and the version that sampled it,
            or -1 if not sampled.
        logprobs: little-endian float32 of the sampled tokens only; training computes in this dtype.
        text: the rest of the episode as JSON, as in `Packed`.
    """

    tokens: int
    token_ids: bytes
    spans: bytes
    logprobs: bytes
    text: bytes


def compact(episode: Episode) -> CompactEpisode:
    """Compact an episode, see `CompactEpisode`."""
    rest = msgspec.structs.replace(episode, token_ids=[], loss_mask=[], logprobs=[], versions=[])
    ids, sampled = np.asarray(episode.token_ids, np.int64), np.asarray(episode.loss_mask, bool)
    kinds = np.where(sampled, np.asarray(episode.versions, np.int64), -1)
    begins = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]) if len(kinds) else [])
    counts = np.diff(np.append(begins, len(kinds)))
    return CompactEpisode(
        tokens=len(ids),
        token_ids=ids.astype("<u2" if ids.max(initial=0) < 1 << 16 else "<u4").tobytes(),
        spans=np.stack([counts, kinds[begins]], axis=1).astype("<i4").tobytes(),
        logprobs=np.asarray(episode.logprobs, "<f4")[sampled].tobytes(),
        text=_text(rest),
    )


def expanded(content: CompactEpisode) -> Episode:
    """Return the episode that was `compact`, its logprobs rounded to float32.

    Raises:
        ValueError: its parts are invalid or inconsistent.
    """
    width = len(content.token_ids) // max(1, content.tokens)
    ids = np.frombuffer(content.token_ids, "<u2" if width == 2 else "<u4")
    counts, kinds = np.frombuffer(content.spans, "<i4").reshape(-1, 2).T
    if len(ids) != content.tokens or counts.min(initial=1) < 1 or counts.sum() != content.tokens:
        raise ValueError(f"{len(ids)} token ids in {counts.sum()} places of {content.tokens}")
    versions = np.repeat(kinds, counts)
    sampled = versions >= 0
    logprobs = np.zeros(content.tokens, np.float32)
    logprobs[sampled] = np.frombuffer(content.logprobs, "<f4")
    values = {
        "token_ids": ids.tolist(),
        "loss_mask": sampled.astype(int).tolist(),
        "logprobs": logprobs.tolist(),
        "versions": np.where(sampled, versions, 0).tolist(),
    }
    return convert_to(json.loads(content.text) | values, Episode)


def packed_turn(turn: FinishedTurn) -> Packed:
    """Pack a turn, see `Packed`."""
    ids, logprobs = _ints([*turn.token_ids, *turn.observation]), _floats(turn.logprobs)
    rest = msgspec.structs.replace(turn, token_ids=[], observation=[], logprobs=[], versions=[])
    return Packed(ids, b"", logprobs, _ints(turn.versions), _text(rest))


def unpacked_turn(content: Packed) -> FinishedTurn:
    """Return the turn that was `packed_turn`."""
    logprobs = np.frombuffer(content.logprobs, np.float64).tolist()
    ids = np.frombuffer(content.token_ids, np.int32).tolist()
    versions = np.frombuffer(content.versions, np.int32).tolist()
    values = {"token_ids": ids[: len(logprobs)], "observation": ids[len(logprobs) :]}
    values |= {"logprobs": logprobs, "versions": versions}
    return convert_to(json.loads(content.text) | values, FinishedTurn)


def _ints(values: list[int]) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def _floats(values: list[float]) -> bytes:
    return np.asarray(values, np.float64).tobytes()


def _text(value: Episode | FinishedTurn) -> bytes:
    return json.dumps(msgspec.to_builtins(value)).encode()
