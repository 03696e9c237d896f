"""Settings for reaching rollout servers, with their timeouts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Annotated

from astra_jax.base.access import trusting
from astra_jax.base.settings import Bound, Count, CountOrZero, Seconds, SettingError, Settings, Share, Total
from astra_jax.rollout.vllm.addresses import check_source
from astra_jax.rollout.vllm.sync import Way


@dataclass(frozen=True)
class VLLMConfig(Settings):
    """Connection settings of the rollout servers.

    Attributes:
        urls: one for each server, without a path. Or a source that is read repeatedly during a run: `@FILE`, with one
            address in each line, and `dns+http://NAME:PORT`, of which each address that the name has is a server
            (Kubernetes: a headless service).
        api_key: what they were started with (`--api-key`).
        sync_key: what they take new weights for (`ASTRA_SYNC_KEY_FILE` there), another than `api_key`; None where they
            listen on loopback alone and have none.
        ca_file: PEM file of the authority that signed their certificates; by default the system's authorities.
        sync: how weights get there: `plugin` (ours, from Orbax checkpoints), `direct` (ours, over TCP from the memory
            of the trainer's hosts; wants a `sync_key`), or `reload` (vLLM's development endpoints, from Hugging Face
            folders), for servers on this machine without the plugin.
        requests_per_server: in flight at once; more wait here.
        cache_tokens: of the KV cache of a server that does not say it in its `/metrics`; requests wait here that it has
            no room for. Ours: 524,288, 86 GB of Qwen3-14B.
        slack: how much fuller than the least loaded server, in shares of its cache, one may be that has a request's
            prefix cached, and is still asked for it. Ours: an eighth, more than a group of episodes holds.
        min_servers: so many must be there at the start, and have an update's weights before the run continues; of fewer
            servers all.
        request_seconds: for one completion. A server that hangs is found sooner, by `stall_seconds`.
        stall_seconds: how long a server with requests in flight may sample no token, where its `/metrics` say so.
        sync_seconds: for one server to take new weights over.
        grace_seconds: how long an update waits for slower servers once `min_servers` have its weights.
        patience_seconds: how long a request waits for any server to be there again, and an update for any server to
            take it over.
        check_seconds: between two looks at a server.
        answer_seconds: for its answer to a look.
        run_id: of the run whose weights they get: `identity.run_id` of its workdir; a new one, if none is given.
        lease_seconds: for how long after the last look a server is still this run's; another is refused there.
        most_age: most updates by which weights may be old if an update of the servers fell into a completion; 0
            discards all such completions. GRPO's `async_steps`.
        attempts: how often one request is sent before it is given up: it may be what the servers die of.
    """

    urls: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    sync_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    sync: Way = "plugin"
    requests_per_server: Count = 256
    cache_tokens: Total = 524_288
    slack: Share = 0.125
    min_servers: Count = 1
    request_seconds: Seconds = 7200.0
    stall_seconds: Seconds = 300.0
    sync_seconds: Seconds = 1800.0
    grace_seconds: Seconds = 60.0
    patience_seconds: Seconds = 600.0
    check_seconds: Seconds = 2.0
    answer_seconds: Seconds = 20.0
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    lease_seconds: Annotated[float, Bound(above=0, most=3600)] = 60.0
    most_age: CountOrZero = 0
    attempts: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls:
            raise SettingError("VLLMConfig.urls is empty; give at least one server, such as http://localhost:8000")
        if len({url.rstrip("/") for url in self.urls}) != len(self.urls):
            raise SettingError(f"VLLMConfig.urls names a server twice: {', '.join(self.urls)}")
        if not 0 < len(self.run_id) <= 64 or not self.run_id.isascii() or not self.run_id.isalnum():
            raise SettingError(f"VLLMConfig.run_id is {self.run_id!r}; use up to 64 letters and digits")
        if self.lease_seconds < 3 * self.check_seconds:
            raise SettingError(
                f"VLLMConfig.lease_seconds is {self.lease_seconds:g}, check_seconds {self.check_seconds:g}: a lease is "
                "renewed by looks, and lasts for three of them at least"
            )
        for source in self.urls:
            check_source(source, self.sync)
        trusting(self.ca_file)
        if self.sync_key is not None and self.sync_key == self.api_key:
            raise SettingError(
                "VLLMConfig.sync_key is the api_key too: whoever may sample could replace the weights; give the "
                "servers a key of its own for syncs"
            )
        if self.sync == "direct" and self.sync_key is None:
            raise SettingError(
                "VLLMConfig.sync='direct' without sync_key, by which trainer and servers know each other before "
                "weights are sent: give --rollout_sync_key_file, and the servers the same as ASTRA_SYNC_KEY_FILE"
            )
        if self.sync == "reload" and self.sync_key is not None:
            raise SettingError(
                "VLLMConfig.sync_key with sync='reload', whose endpoints ask for no key: leave it out, or use "
                "sync='plugin'"
            )
