"""Train a model with GRPO, with rollouts on vLLM servers or on the embedded engine.

    astra grpo --config=grpo:14b --workdir=DIR --weights=DIR --environments=DIR \
        --mesh=fsdp=8,context=2 --rollout_url=http://a:8000,http://b:8000 --rollout_key_file=FILE \
        --rollout_sync_key_file=FILE

    astra grpo --config=grpo:14b --workdir=DIR --weights=DIR --environments=DIR --vllm=2    # servers on this machine

Without --rollout_url and --vllm the trainer samples by itself. docs/vllm.md is about servers. Change settings with
--config.NAME=VALUE, for example --config.grpo.steps=40. Run the same command again after an interruption: it resumes
from its last checkpoint.

Exit codes: 0 after SIGTERM, with a checkpoint saved; with several hosts 75 on each. 1 if no batch of valid groups was
found; the last line suggests a fix. 2 if too many episodes were masked, with the reasons.

    --environments=my_module:my_name     environments of your own, or of servers: docs/own_environments.md
    --held_out=NAME,NAME                 environments to evaluate on, before and after training
    --difficulty=DIR                     solve rates of environments, as astra difficulty wrote them
    --config.grpo.dump_batches=true      write each training batch to WORKDIR/batches
    --replay=DIR/batches                 train on these batches again, bit for bit, without environments or servers
    --profile_steps=10:12                write a trace of these updates to WORKDIR/profile
    --write_serving_folder=DIR           write the folder that the run's servers start from, and stop

With several hosts run the same command on each, with --multihost on TPUs, or with --coordinator, --hosts and
--host_index. --workdir and --publish_dir must be folders that all hosts can read, or in a bucket: gs://BUCKET/FOLDER.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from astra_jax.base.settings import Count, Seconds
from astra_jax.base.terminal import say
from launch.flags import auto, cli, environments, metrics, models, sandboxes, shared, vllm_servers
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.grpo.config import GRPOConfig
    from astra_jax.grpo.replay import Replay
    from astra_jax.grpo.train import GRPOResult
    from astra_jax.models.model import Model, Params
    from astra_jax.rollout.sampler import TrainableSampler
    from astra_jax.rollout.vllm.sampler import VLLMConfig
    from astra_jax.rollout.vllm.sync import AnyPublisher, Way
    from astra_jax.run.hooks import Hook
    from astra_jax.run.model_card import TrainedOn
    from astra_jax.tokenizer import ChatTokenizer
    from configs.training import GRPORun
    from launch.flags.environments import GivenEnvironments
    from sandbox import Sandbox
    from synthesis.core.environment import AnyEnvironment

_ENVIRONMENTS = shared.environments(required=False)
_REPLAY = flags.DEFINE_string(
    "replay",
    None,
    "Train on recorded batches instead of environments: WORKDIR/batches of a run with dump_batches=true.",
)
flags.register_validator(
    _ENVIRONMENTS,
    lambda value: value is not None or _REPLAY.value is not None,
    "Flag --environments must have a value other than None.",  # as absl says it of flags that are always needed
)
_HELD_OUT = shared.held_out(
    "environments as in --environments, several separated by commas. Rewards are logged before the first update, after "
    "the last, and every eval_every updates."
)
_HELD_OUT_COUNT = number_flag(
    "held_out_count",
    100,
    Count,
    "Number of tasks of a verifiers taskset, or of seeds of an OpenEnv server, in --held_out. If --environments names "
    "the same taskset or server, these are the ones that follow.",
)
_DIFFICULTY = flags.DEFINE_string(
    "difficulty",
    None,
    "Folder of solve rates that astra difficulty wrote (--to), for environments that are not a dataset.",
)
_URLS = flags.DEFINE_list(
    "rollout_url",
    [],
    "vLLM servers, separated by commas. Or @FILE with their addresses, or dns+http://NAME:PORT, which are read "
    "repeatedly during the run. By default the embedded engine samples.",
)
_BACKEND = flags.DEFINE_string(
    "rollout_backend", None, "Your own rollout engine: my_module:MySampler; docs/extending.md."
)
_KEY_FILE = flags.DEFINE_string(
    "rollout_key_file", None, "File whose first line is the API key of the --rollout_url servers."
)
_SYNC_KEY_FILE = flags.DEFINE_string(
    "rollout_sync_key_file",
    None,
    "File whose first line is the key with which the --rollout_url servers accept new weights.",
)
_CA_FILE = flags.DEFINE_string(
    "rollout_ca_file",
    None,
    "PEM file of the authority that signed the certificates of --rollout_url; by default the system's authorities.",
)
_SYNC = flags.DEFINE_enum(
    "rollout_sync",
    "plugin",
    ["plugin", "direct", "reload"],
    "How servers get new weights: plugin reads files from shared storage, direct receives them over TCP from the "
    "trainer's memory (both need our vLLM plugin); reload is vLLM's own reload of a folder, on this machine.",
)
_MIN_SERVERS = number_flag(
    "rollout_min_servers",
    1,
    Count,
    "Servers that must be reachable at the start, and have new weights before sampling continues.",
)
_REQUEST_SECONDS = number_flag("rollout_timeout_seconds", 7200.0, Seconds, "Time limit of one completion, in seconds.")
_STALL_SECONDS = number_flag(
    "rollout_stall_seconds",
    300.0,
    Seconds,
    "Seconds without a sampled token after which a server with requests is taken out of service.",
)
_SYNC_SECONDS = number_flag(
    "rollout_sync_seconds", 1800.0, Seconds, "Time limit for one server to load new weights, in seconds."
)
_PATIENCE_SECONDS = number_flag(
    "rollout_patience_seconds",
    600.0,
    Seconds,
    "Seconds that a run waits while no server is available, before it fails.",
)
_PUBLISH = flags.DEFINE_string(
    "publish_dir",
    None,
    "Folder for published weights, at a path that the servers can read too; by default in --workdir.",
)
_PUBLISH_ADDRESS = flags.DEFINE_string(
    "publish_address",
    "",
    "HOST:PORT or :PORT of this host, from which servers get weights with --rollout_sync=direct. By default the "
    "address "
    "of the interface that reaches them, and a free port.",
)
_PUBLISH_DTYPE = flags.DEFINE_enum(
    "publish_dtype",
    "bfloat16",
    ["bfloat16", "float32"],
    "Dtype of the published weights, in which the servers compute.",
)
_SERVING = flags.DEFINE_string(
    "write_serving_folder",
    None,
    "Write the folder that vLLM servers of this run start from (configuration, generation configuration, tokenizer), "
    "and stop.",
)

_OF_SERVERS: tuple[flags.FlagHolder[Any], ...] = (
    _KEY_FILE, _SYNC_KEY_FILE, _CA_FILE, _SYNC, _MIN_SERVERS, _REQUEST_SECONDS, _STALL_SECONDS, _SYNC_SECONDS,
    _PATIENCE_SECONDS, _PUBLISH, _PUBLISH_ADDRESS,
)  # fmt: skip


def main() -> int:
    import jax

    from astra_jax.grpo.environments import check_rewards
    from astra_jax.run import compilation_cache
    from astra_jax.run.hosts import is_first
    from astra_jax.run.identity import run_id
    from astra_jax.run.record import write_run_record

    config = models.settings("grpo")
    profile = models.profiled_steps()
    _check_server_flags()
    if _SERVING.value:
        say(_write_serving_folder(config, cli.local_folder(_SERVING)))
        return 0
    own = _own_servers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(models.hosts())
        stack.enter_context(metrics.shown(first=models.is_first_host))
        if _URLS.value:
            _servers()
        sandbox = sandboxes.sandbox_from_flags()
        replay = _replayed()
        _check_sources(config, replay)
        given = None if replay is not None else environments.read(_ENVIRONMENTS.value or "")
        held_out = _held_out(given)
        for one in (given, *held_out):
            if one is not None and (known := one.known()) is not None:
                check_rewards(_selected(known, config.grpo) if one is given else known, config.grpo.episode)
        tokenizer, model = models.checked(config.model)
        config = dataclasses.replace(config, model=model, grpo=models.with_added_tokens(config.grpo, tokenizer))
        models.check_reference(config.grpo)
        workdir = models.workdir()
        published = cli.folder(_PUBLISH, written=True) if _PUBLISH.value else workdir / "policy"
        for folder in [workdir, *([published] if _PUBLISH.value else [])]:
            stack.enter_context(models.held(folder))
        if jax.process_count() > 1 and not (_URLS.value or _BACKEND.value) and replay is None:
            raise cli.UsageError("training on several hosts needs vLLM servers; give --rollout_url")
        mesh = models.mesh()
        if models.is_auto():
            engine = replay is None and not (_URLS.value or _BACKEND.value)
            config = auto.grpo_settings(
                config, partial(_known, given, held_out), tokenizer, workdir, mesh, engine=engine
            )
        stack.enter_context(_running(own, config, published))
        servers = _servers(run_id(workdir) if is_first() else None) if _URLS.value else None
        compilation_cache.keep_programs(workdir / compilation_cache.FOLDER)
        start = partial(models.load, config.grpo, config.model, mesh)
        if is_first():
            write_run_record(workdir, config)
            models.complete(tokenizer, workdir)
        result, trained_on = asyncio.run(
            _train(
                start,
                mesh,
                config=config,
                given=given,
                held_out=held_out,
                tokenizer=tokenizer,
                replay=replay,
                sandbox=sandbox if any(one is not None and one.records for one in (given, *held_out)) else None,
                servers=servers,
                workdir=workdir,
                published=published,
                profile=profile,
                hooks=models.hooks(),
            )
        )
        if not is_first():
            return models.ended(result.stopped)
        models.write_card(workdir, "GRPO", config, trained_on)
        last = result.history[-1] if result.history else {}
        reward = f", reward {last['rollout/reward']:.3f}" if "rollout/reward" in last else ""
        say(
            f"{workdir / 'checkpoints'}: {result.steps} steps{models.skipped(result.skipped)}, {result.stopped}"
            f"{reward}; {jax.default_backend()}"
        )
        for line in filter(None, (result.advice, result.held_out)):
            say(line)
        return models.ended(result.stopped)


def _check_server_flags() -> None:
    """Check that the flags of servers fit together. Raises `UsageError`."""
    if vllm_servers.COUNT.value is None:
        vllm_servers.refuse_without()
    else:
        others = (_URLS, _BACKEND, _REPLAY, _SERVING, _KEY_FILE, _SYNC_KEY_FILE, _CA_FILE, *models.OF_HOSTS)
        said = f"does not go with --{vllm_servers.COUNT.name}, which starts servers here; leave one of them out"
        cli.refuse_unused(others, said)
        if _SYNC.value == "reload":
            raise cli.UsageError(f"--rollout_sync=reload {said}")
        return
    if not (_URLS.value or _SERVING.value):  # what servers start from is written with the flags of the run
        cli.refuse_unused(_OF_SERVERS, "is for servers: give --rollout_url too")
    if _URLS.value and _SYNC.value == "reload":
        cli.local_folder(_PUBLISH if _PUBLISH.value else models.WORKDIR)
    if _PUBLISH_ADDRESS.value and _SYNC.value != "direct":
        raise cli.UsageError("--publish_address is for --rollout_sync=direct: give that too")
    if _PUBLISH.value and _URLS.value and _SYNC.value == "direct":
        raise cli.UsageError(
            "--publish_dir has no effect with --rollout_sync=direct, which writes no files; leave one out"
        )


def _check_sources(config: GRPORun, replay: Replay | None) -> None:
    """Check that the flags of the sampler and of the environments or batches fit together. Raises `UsageError`."""
    if _BACKEND.value is not None and (_URLS.value or replay is not None):
        other = "rollout_url" if _URLS.value else "replay"
        raise cli.UsageError(f"--rollout_backend={_BACKEND.value} samples instead of --{other}: leave one of them out")
    if replay is not None and _URLS.value:
        raise cli.UsageError("--replay samples nothing; leave out --rollout_url")
    if config.grpo.eval_every and replay is None and not _HELD_OUT.value:
        raise cli.UsageError(
            f"--config.grpo.eval_every={config.grpo.eval_every} is for held-out environments: give --held_out too"
        )
    if _DIFFICULTY.value is not None and config.grpo.solve_rates is None and config.grpo.order == "shuffled":
        raise cli.UsageError(
            f"--{_DIFFICULTY.name} is for --config.grpo.solve_rates and --config.grpo.order=easy_first; give one "
            "of them"
        )


def _replayed() -> Replay | None:
    """Return the batches of --replay, or None.

    Raises:
        UsageError: --replay is not a folder, or a flag of sampling is given too.
        DatasetError: there are no batches.
    """
    from astra_jax.grpo.replay import Replay

    if _REPLAY.value is None:
        return None
    for flag in (_ENVIRONMENTS, _HELD_OUT, _DIFFICULTY):
        if flag.value is not None:
            raise cli.UsageError(f"--replay samples nothing from --{flag.name}; give one of the two")
    return Replay(cli.folder(_REPLAY))


def _held_out(given: GivenEnvironments | None) -> list[GivenEnvironments]:
    """Return the environments of --held_out. Raises as `GivenEnvironments`, and `UsageError` for flags that have no
    effect."""
    names = [name for name in map(str.strip, (_HELD_OUT.value or "").split(",")) if name]
    if _HELD_OUT.present and not names:
        raise cli.UsageError("--held_out= is empty; give environments as in --environments")
    if twice := [name for name in names if names.count(name) > 1]:
        raise cli.UsageError(f"--held_out={_HELD_OUT.value} names {twice[0]} twice")
    found = [
        environments.GivenEnvironments(name, _HELD_OUT.name, count=_HELD_OUT_COUNT.value, after=given) for name in names
    ]
    if _HELD_OUT_COUNT.present and not any(one.is_counted for one in found):
        raise cli.UsageError(f"--{_HELD_OUT_COUNT.name} is for verifiers:ID and openenv:URL in --held_out")
    return found


def _known(given: GivenEnvironments | None, held_out: Sequence[GivenEnvironments]) -> list[AnyEnvironment] | None:
    """Return all environments of a run; None if some are known only once servers are running, or batches are
    replayed."""
    every = [] if given is None else [one.known() for one in (given, *held_out)]
    found = [environment for one in every if one is not None for environment in one]
    return found if found and None not in every else None


def _selected(found: Sequence[AnyEnvironment], config: GRPOConfig) -> Sequence[AnyEnvironment]:
    """Return the environments that `config` selects, with the solve rates of --difficulty. Raises as those."""
    from astra_jax.grpo.environments import select_environments

    return select_environments(_rated(found), config)


def _rated(found: Sequence[AnyEnvironment]) -> Sequence[AnyEnvironment]:
    """Return the environments with the solve rates of --difficulty, if given. Raises as `rated`."""
    from astra_jax.evaluation.solve_rates import rated

    return found if _DIFFICULTY.value is None else rated(found, cli.folder(_DIFFICULTY))


def _own_servers() -> vllm_servers.LocalServers | None:
    """Return the servers of --vllm, or None, and use them as if --rollout_url named them. Raises as `LocalServers`."""
    if vllm_servers.COUNT.value is None:
        return None
    own = vllm_servers.LocalServers(cli.local_folder(models.WORKDIR))
    given: tuple[tuple[flags.FlagHolder[Any], Any], ...] = (
        (_URLS, own.urls),
        (_KEY_FILE, str(own.key_file)),
        (_SYNC_KEY_FILE, str(own.sync_key_file)),
    )
    for flag, value in given:
        flags.FLAGS[flag.name].value = value
    return own


@contextlib.contextmanager
def _running(own: vllm_servers.LocalServers | None, config: GRPORun, published: epath.Path) -> Iterator[None]:
    """Run the servers of --vllm, if there are any, during the body. Raises as `LocalServers.running`."""
    if own is None:
        yield
        return
    shutil.rmtree(own.serving_folder, ignore_errors=True)  # of another start
    _write_serving_folder(config, own.serving_folder)
    with own.running(published=str(published), dtype=_PUBLISH_DTYPE.value, max_length=_longest(config)):
        yield


def _longest(config: GRPORun) -> int:
    """Return the maximum tokens of an episode's sequence."""
    episode = config.grpo.episode
    return episode.max_prompt_tokens + episode.max_response_tokens


def _write_serving_folder(config: GRPORun, target: Path) -> str:
    """Write the folder that servers start from. Return a line about it. Raises `UsageError` if it is not empty, and as
    `models.checked`."""
    from astra_jax.models import hf_checkpoint
    from synthesis.core.workdir import locked_target

    tokenizer, model = models.checked(config.model)
    if models.is_auto():
        given = None if _ENVIRONMENTS.value is None else environments.read(_ENVIRONMENTS.value)
        known = _known(given, _held_out(given))
        config, _ = auto.episode_settings(config, known, tokenizer, models.context_size())
    served = dataclasses.replace(model, param_dtype=_PUBLISH_DTYPE.value)
    with locked_target(target):
        if target.exists() and any(target.iterdir()):
            raise cli.UsageError(f"--write_serving_folder={target} is not empty; give a new folder")
        files = hf_checkpoint.write_serving_folder(served, models.tokenizer_folder(), tokenizer.changed_files, target)
    return (
        f"{target}: {files} files; vllm serve {target} --load-format=dummy --dtype={_PUBLISH_DTYPE.value} "
        f"--max-model-len={_longest(config)} with the other options in docs/vllm.md"
    )


def _servers(run: str | None = None) -> VLLMConfig:
    """Return the rollout servers of the flags, for the run with this id. Raises `UserError` and `SettingError`."""
    from astra_jax.rollout.vllm.addresses import Addresses
    from astra_jax.rollout.vllm.sampler import VLLMConfig

    config = VLLMConfig(
        urls=tuple(_URLS.value),
        api_key=cli.token_of(_KEY_FILE),
        sync_key=cli.token_of(_SYNC_KEY_FILE),
        ca_file=cli.certificates_of(_CA_FILE),
        sync=cast("Way", _SYNC.value),
        min_servers=_MIN_SERVERS.value,
        request_seconds=_REQUEST_SECONDS.value,
        stall_seconds=_STALL_SECONDS.value,
        sync_seconds=_SYNC_SECONDS.value,
        patience_seconds=_PATIENCE_SECONDS.value,
    )
    Addresses(config.urls, config.sync).of_files()
    return config if run is None else dataclasses.replace(config, run_id=run)


def _publisher(servers: VLLMConfig, model: Model, published: epath.Path) -> AnyPublisher:
    """Return the publisher of weights for the servers. Raises `UserError` and `SettingError`: this host cannot serve
    them."""
    from astra_jax.rollout.vllm.addresses import Addresses
    from astra_jax.rollout.vllm.direct import DirectPublisher, listening_address
    from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher

    dtype = _PUBLISH_DTYPE.value
    if servers.sync == "direct":
        assert servers.sync_key is not None
        looked_up = [one for one in servers.urls if one.startswith("dns+")]
        sources = [*Addresses(servers.urls, servers.sync).of_files(), *looked_up]
        host, port = listening_address(sources, _PUBLISH_ADDRESS.value)
        return DirectPublisher(model, key=servers.sync_key, run=servers.run_id, host=host, port=port, dtype=dtype)
    return (FolderPublisher if servers.sync == "reload" else Publisher)(published, model, dtype=dtype)


async def _train(
    start: Callable[[], Params],
    mesh: Mesh | None,
    *,
    config: GRPORun,
    given: GivenEnvironments | None,
    held_out: Sequence[GivenEnvironments],
    replay: Replay | None,
    tokenizer: ChatTokenizer,
    sandbox: AbstractAsyncContextManager[Sandbox] | None,
    servers: VLLMConfig | None,
    workdir: epath.Path,
    published: epath.Path,
    profile: tuple[int, int] | None,
    hooks: Sequence[Hook],
) -> tuple[GRPOResult, list[TrainedOn]]:
    from astra_jax.grpo import train as grpo
    from astra_jax.rollout.vllm.sampler import VLLMSampler
    from astra_jax.run.model_card import trained_on
    from synthesis.core.references import referred

    async with contextlib.AsyncExitStack() as stack:
        opened = None if sandbox is None else await stack.enter_async_context(sandbox)
        found = () if given is None else _rated(await stack.enter_async_context(given.open()))
        unseen = [(one, await stack.enter_async_context(one.open())) for one in held_out]
        policy: TrainableSampler | None = None
        if _BACKEND.value is not None:
            policy = referred(_BACKEND.value)(config=config.grpo, model=config.model, tokenizer=tokenizer)
            stack.push_async_callback(policy.close)
        if servers is not None:
            publisher = _publisher(servers, config.model, published)
            stack.callback(publisher.close)
            policy = await stack.enter_async_context(
                VLLMSampler(
                    dataclasses.replace(servers, max_off_policy_steps=config.grpo.steps_ahead),
                    publisher,
                    vocabulary=tokenizer.vocabulary_digest,
                    max_length=_longest(config),
                )
            )
        arguments = (config.grpo, config.model, start, found, tokenizer, opened, workdir)
        result = await grpo.train(
            *arguments,
            policy=policy,
            replay=replay,
            held_out=[environment for _, those in unseen for environment in those],
            origin=models.origin(config.grpo, config.model),
            mesh=mesh,
            profile=profile,
            hooks=hooks,
        )
        if replay is not None:
            return result, [trained_on("batches", replay.folder)]
        assert given is not None
        return result, [given.used("environments", found), *(one.used("held out", those) for one, those in unseen)]


if __name__ == "__main__":
    flags.set_default(models.CONFIG, "grpo:auto")
    cli.with_cpu_environment("launch.grpo", large=True)
    cli.run(
        main, again="it goes on from its last checkpoint", settings=lambda: models.config("grpo", example="grpo:0.6b")
    )
