"""What a rollout server answers is checked before it is trained on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from astra_jax.rollout.vllm.server import CompletionsRoute, PolicyError


@pytest.mark.parametrize("bad", [math.nan, -math.inf, None, "-1.0"])
def test_a_logprob_that_is_no_finite_number_counts_for_nothing(bad) -> None:
    """The request is sent again; a NaN among the logprobs would cost a whole training step."""
    answer: dict[str, Any] = {"choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, bad]}}]}
    with pytest.raises(PolicyError, match="a logprob that is not a finite number"):
        CompletionsRoute().draw(answer)
    answer["choices"][0]["logprobs"]["token_logprobs"][1] = -1
    assert CompletionsRoute().draw(answer).logprobs == [-0.5, -1.0]
