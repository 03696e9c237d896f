"""Seeds of requests on CPUs, where a prompt is read in parts.

vLLM draws a token for each request of a step, also for those whose prompt is not read to its end, and throws that one
away: it sets the request's generator back by the numbers that it took. A generator of a CPU cannot be set back so, and
the engine dies of it (vLLM 0.32: "CPU Generator does not use offset"). Here it gets the state that it had before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STATES = "_astra_generator_states"


def mend(runner: type[Any]) -> None:
    """Have a class of model runners set generators back by their state; it may be called again.

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
        for request in states.keys() - self.requests.keys():  # those that were preempted go on some time
            del states[request]
        thrown_away = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        aside = {i: batch.generators.pop(i) for i in thrown_away if i in batch.generators}
        for i, generator in aside.items():
            before = states.get(batch.req_ids[i])
            if before is None:  # none of its tokens was drawn yet
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
