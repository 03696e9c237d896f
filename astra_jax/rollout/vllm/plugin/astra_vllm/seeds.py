"""Fix for seeded requests on CPUs whose prompts are prefilled in parts.

In each step vLLM also samples a token for requests with an unfinished prompt, and discards it by rewinding the
request's generator. CPU generators cannot be rewound, which crashes the engine (vLLM 0.32: "CPU Generator does not use
offset"). Here the generator's earlier state is restored instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STATES = "_astra_generator_states"


def mend(runner: type[Any]) -> None:
    """Patch a class of model runners to restore generator states; it may be called more than once.

    Args:
        runner: vLLM's `CPUModelRunner`.
    """
    if hasattr(runner, _STATES):
        return
    bookkeeping = runner._bookkeeping_sync
    setattr(runner, _STATES, {})

    def mended(self: Any, *args: Any, **options: Any) -> Any:
        if _STATES not in vars(self):
            setattr(self, _STATES, {})
        states, batch = vars(self)[_STATES], self.input_batch
        for request in states.keys() - self.requests.keys():  # preempted requests remain for some time
            del states[request]
        thrown_away = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        aside = {i: batch.generators.pop(i) for i in thrown_away if i in batch.generators}
        for i, generator in aside.items():
            before = states.get(batch.req_ids[i])
            if before is None:  # none of its tokens was sampled yet
                generator.manual_seed(generator.initial_seed())
            else:
                generator.set_state(before)
        for i, generator in batch.generators.items():
            states[batch.req_ids[i]] = generator.get_state()
        try:
            return bookkeeping(self, *args, **options)
        finally:
            batch.generators.update(aside)

    runner._bookkeeping_sync = mended
