"""Examples on a terminal: colours are ours, the text is a stranger's."""

from __future__ import annotations

import io

import msgspec
import pytest
from sft_world import make_dataset, make_tokenizer, trajectories

from astra_jax.sft.data import DataConfig
from astra_jax.sft.preview import show
from synthesis.core.records import Message

HOSTILE = "\x1b]0;owned\x07\x1b[8mhidden\u202e\x9b2J\r"


@pytest.mark.parametrize("colour", [True, False])
def test_what_a_conversation_says_moves_no_terminal(tmp_path, monkeypatch, colour) -> None:
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    record = trajectories(1)[0]
    messages = [Message("user", HOSTILE), *record.messages[1:-1], Message("assistant", HOSTILE)]
    data = make_dataset(tmp_path / "data", [msgspec.structs.replace(record, id=HOSTILE, messages=messages)])
    out = io.StringIO()
    show(data, make_tokenizer(tmp_path / "tokenizer"), DataConfig(seq_len=4096, split_at_user_turns=False), 1, out)
    said = out.getvalue()
    for ours in ("\x1b[32m", "\x1b[90m", "\x1b[1m", "\x1b[0m"):
        said = said.replace(ours, "")
    assert not any(sign in said for sign in "\x1b\x07\u202e\x9b\r")
    assert said.count(r"\x1b]0;owned\x07\x1b[8mhidden\u202e\x9b2J\r") == 3  # the id, the question and the answer
