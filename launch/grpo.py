"""GRPO of a Qwen3 against vLLM servers, or against the embedded engine.

    python -m launch.grpo --config=grpo:14b --workdir=DIR --weights=DIR --environments=DIR \\
        --mesh=fsdp=8,context=2 --rollout_urls=http://a:8000,http://b:8000 --rollout_key_file=FILE \\
        --rollout_sync_key_file=FILE

Without --rollout_urls the trainer samples by itself. Settings are changed with --config.NAME=VALUE, for example
--config.grpo.steps=40. Run the same command again after an interruption: it goes on from its last checkpoint.
SIGTERM saves and ends with 0. A run to which no batch of valid groups comes any more says why, and ends with 1. How the
servers are started is in docs/vllm.md.

    --profile_steps=10:12    write a trace of these updates to WORKDIR/profile

On several hosts run the same command on each, with --multihost on TPUs, or with --coordinator, --hosts and --host;
--workdir and --publish_dir are folders that all of them see, or in a bucket: gs://BUCKET/FOLDER.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, models, sandboxes
from synthesis.core.terminal import say

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.grpo.train import GRPOResult
    from astra_jax.models.model import Params
    from astra_jax.rollout.vllm.policy import VLLMConfig
    from astra_jax.tokenizer import ChatTokenizer
    from configs.training import GRPORun
    from sandbox import Sandbox
    from synthesis.core.records import ToolEnvironment

flags.adopt_module_key_flags(models)
flags.adopt_module_key_flags(sandboxes)

_ENVIRONMENTS = flags.DEFINE_string("environments", None, "Dataset of tool environments to train on.", required=True)
_URLS = flags.DEFINE_list("rollout_urls", [], "vLLM servers; by default the embedded engine.")
_KEY_FILE = flags.DEFINE_string("rollout_key_file", None, "File whose first line is the servers' API key.")
_SYNC_KEY_FILE = flags.DEFINE_string(
    "rollout_sync_key_file", None, "File whose first line is the key that the servers take new weights for."
)
_CA_FILE = flags.DEFINE_string(
    "rollout_ca_file",
    None,
    "PEM file of whoever signed the servers' certificates; by default the system's authorities.",
)
_SYNC = flags.DEFINE_enum(
    "rollout_sync", "plugin", ["plugin", "reload"], "How weights get there: our plugin, or vLLM's reload of a folder."
)
_PUBLISH = flags.DEFINE_string(
    "publish_dir", None, "Where weights are published, under a path that the servers have too; by default in --workdir."
)


def main() -> int:
    import jax

    from astra_jax.grpo.environments import select_environments
    from astra_jax.models.hf_checkpoint import copy_tokenizer
    from astra_jax.run import compilation_cache
    from astra_jax.run.hosts import is_first
    from astra_jax.run.record import write_run_record
    from synthesis.core.datasets import read_dataset
    from synthesis.core.records import ToolEnvironment

    config = cli.overridden(models.config("grpo"))
    profile = models.profiled_steps()
    for flag in (_KEY_FILE, _SYNC_KEY_FILE, _CA_FILE):
        if flag.value and not _URLS.value:
            raise cli.UsageError(f"--{flag.name} is for servers: give --rollout_urls too")
    if _URLS.value and _SYNC.value == "reload":
        cli.local_folder(_PUBLISH if _PUBLISH.value else models.WORKDIR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(models.hosts())
        servers = _servers() if _URLS.value else None
        sandbox = sandboxes.sandbox_from_flags()
        environments = read_dataset(_ENVIRONMENTS.value, ToolEnvironment)
        select_environments(environments, config.grpo)
        tokenizer = models.checked(config.model)
        workdir = models.workdir()
        published = cli.folder(_PUBLISH, written=True) if _PUBLISH.value else workdir / "policy"
        for folder in [workdir, *([published] if _PUBLISH.value else [])]:
            stack.enter_context(models.held(folder))
        if jax.process_count() > 1 and not _URLS.value:
            raise cli.UsageError("several hosts want --rollout_urls")
        mesh = models.mesh()
        compilation_cache.keep_programs(workdir / compilation_cache.FOLDER)
        start = partial(models.load, config.model, mesh)
        if is_first():
            write_run_record(workdir, config)
            copy_tokenizer(models.tokenizer_folder(), workdir / "checkpoints")
        result = asyncio.run(
            _train(
                start,
                mesh,
                config=config,
                environments=environments,
                tokenizer=tokenizer,
                sandbox=sandbox,
                servers=servers,
                workdir=workdir,
                published=published,
                profile=profile,
            )
        )
        if not is_first():
            return 0
        last = result.history[-1] if result.history else {}
        reward = f", reward {last['rollout/reward']:.3f}" if "rollout/reward" in last else ""
        say(f"{workdir / 'checkpoints'}: {result.steps} steps, {result.stopped}{reward}; {jax.default_backend()}")
        return int(result.stopped == "exhausted")


def _servers() -> VLLMConfig:
    """The rollout servers of the flags. Raises `UsageError` and `SettingError`."""
    from astra_jax.rollout.vllm.policy import VLLMConfig
    from astra_jax.rollout.vllm.sync import Way

    way: Way = "reload" if _SYNC.value == "reload" else "plugin"
    return VLLMConfig(
        urls=tuple(_URLS.value),
        api_key=cli.token_of(_KEY_FILE),
        sync_key=cli.token_of(_SYNC_KEY_FILE),
        ca_file=cli.certificates_of(_CA_FILE),
        sync=way,
    )


async def _train(
    start: Callable[[], Params],
    mesh: Mesh | None,
    *,
    config: GRPORun,
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: AbstractAsyncContextManager[Sandbox],
    servers: VLLMConfig | None,
    workdir: epath.Path,
    published: epath.Path,
    profile: tuple[int, int] | None,
) -> GRPOResult:
    from astra_jax.grpo import train as grpo
    from astra_jax.rollout.vllm.policy import VLLMPolicy
    from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher

    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(sandbox)
        policy = None
        if servers is not None:
            publishes = FolderPublisher if servers.sync == "reload" else Publisher
            publisher = publishes(published, config.model)
            stack.callback(publisher.close)
            episode = config.grpo.episode
            longest = episode.max_prompt_tokens + episode.max_response_tokens
            policy = await stack.enter_async_context(
                VLLMPolicy(servers, publisher, vocabulary=tokenizer.vocabulary_digest, max_length=longest)
            )
        arguments = (config.grpo, config.model, start, environments, tokenizer, opened, workdir)
        return await grpo.train(*arguments, policy=policy, mesh=mesh, profile=profile)


if __name__ == "__main__":
    cli.run(
        main, again="it goes on from its last checkpoint", settings=lambda: models.config("grpo", example="grpo:0.6b")
    )
