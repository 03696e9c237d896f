"""Episodes and turns as bytes, for journals and checkpoints: of thousands of numbers JSON would be slow and long."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from astra_jax.rollout.episode import Episode, FinishedTurn


class Packed(msgspec.Struct, array_like=True):
    """An episode or a turn as bytes. What is not numbers is JSON, which holds whatever a policy can say: arguments with
    integers of any length and lone surrogates, of which msgpack takes neither."""

    token_ids: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    text: bytes


def packed(episode: Episode) -> Packed:
    """See `Packed`."""
    rest = msgspec.structs.replace(episode, token_ids=[], loss_mask=[], logprobs=[], versions=[])
    ids, mask, logprobs = _ints(episode.token_ids), bytes(episode.loss_mask), _floats(episode.logprobs)
    return Packed(ids, mask, logprobs, _ints(episode.versions), _text(rest))


def unpacked(content: Packed) -> Episode:
    """The episode that was `packed`."""
    values = {
        "token_ids": np.frombuffer(content.token_ids, np.int32).tolist(),
        "loss_mask": list(content.mask),
        "logprobs": np.frombuffer(content.logprobs, np.float64).tolist(),
        "versions": np.frombuffer(content.versions, np.int32).tolist(),
    }
    return msgspec.convert(json.loads(content.text) | values, Episode)


def packed_turn(turn: FinishedTurn) -> Packed:
    """See `Packed`."""
    ids, logprobs = _ints([*turn.token_ids, *turn.observation]), _floats(turn.logprobs)
    rest = msgspec.structs.replace(turn, token_ids=[], observation=[], logprobs=[], versions=[])
    return Packed(ids, b"", logprobs, _ints(turn.versions), _text(rest))


def unpacked_turn(content: Packed) -> FinishedTurn:
    """The turn that was `packed_turn`."""
    logprobs = np.frombuffer(content.logprobs, np.float64).tolist()
    ids = np.frombuffer(content.token_ids, np.int32).tolist()
    versions = np.frombuffer(content.versions, np.int32).tolist()
    values = {"token_ids": ids[: len(logprobs)], "observation": ids[len(logprobs) :]}
    values |= {"logprobs": logprobs, "versions": versions}
    return msgspec.convert(json.loads(content.text) | values, FinishedTurn)


def _ints(values: list[int]) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def _floats(values: list[float]) -> bytes:
    return np.asarray(values, np.float64).tobytes()


def _text(value: Episode | FinishedTurn) -> bytes:
    return json.dumps(msgspec.to_builtins(value)).encode()
