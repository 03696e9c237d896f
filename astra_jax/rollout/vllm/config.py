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
        urls: address of each server, without a path. Or a source that is read repeatedly during a run: `@FILE` with one
            address in each line, or `dns+http://NAME:PORT`, where each address of the name is a server (Kubernetes: a
            headless service).
        api_key: key of the servers' API (`--api-key` of vLLM). None: they have none.
        sync_key: key with which servers accept new weights (`ASTRA_SYNC_KEY_FILE` on the server). Must differ from
            `api_key`. None: for servers that listen on loopback only and have none.
        ca_file: PEM file of the authority that signed the servers' certificates. None: the system's authorities.
        sync: how servers get new weights. `plugin`: our plugin reads Orbax checkpoints from shared storage. `direct`:
            our plugin receives them over TCP from the memory of the trainer's hosts; needs a `sync_key`. `reload`:
            vLLM's development endpoints read Hugging Face folders, for servers on this machine without the plugin.
        requests_per_server: maximum requests in flight at one server; more wait in the trainer.
        cache_tokens: KV cache size of a server, in tokens, if its `/metrics` do not report one. Requests that do not
            fit wait in the trainer. Ours: 524,288, which is 86 GB with Qwen3-14B.
        slack: how much fuller than the least loaded server a server may be, as a share of its cache, and still get a
            request whose prefix it has cached. Ours: an eighth, more than a group of episodes holds.
        min_servers: servers that must be reachable at the start, and must have new weights before sampling continues.
            With fewer servers than this, all of them.
        request_seconds: time limit of one completion, in seconds. A stalled server is found earlier, by
            `stall_seconds`.
        stall_seconds: how long a server with requests in flight may sample no token, in seconds, if its `/metrics`
            report them. After that its requests move to another server.
        sync_seconds: time limit for one server to load new weights, in seconds.
        grace_seconds: how long a sync waits for slower servers, in seconds, once `min_servers` have the new weights.
        patience_seconds: how long a request, or a sync, waits in seconds while no server is available, before the run
            fails.
        check_seconds: seconds between two health checks of a server.
        answer_seconds: time limit of one health check, in seconds.
        run_id: id of the run that the servers serve: `identity.run_id` of its workdir. Default: a new one.
        lease_seconds: how long after the last health check a server stays reserved for this run, in seconds. It refuses
            other runs meanwhile.
        max_off_policy_steps: maximum age, in steps, of the weights that sampled a part of a completion, if the servers
            were updated during it. 0 discards all such completions. GRPO's, with `async_rollouts`.
        attempts: how often one request is sent before it fails. The limit exists because the request itself may crash
            the servers.
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
    max_off_policy_steps: CountOrZero = 0
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
