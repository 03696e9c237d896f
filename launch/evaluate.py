"""Evaluate a checkpoint, or a model behind any OpenAI-compatible endpoint, on the paper's benchmarks.

    astra evaluate --workdir=DIR --weights=runs/grpo/checkpoints --suites=bfcl_v3_mt
    astra evaluate --workdir=DIR --model_url=http://HOST:8000/v1 --suites=own:my_module:my_environments --reward=score
    astra evaluate --workdir=DIR --weights=... --suites=tau2,aime --sources=tau2=FOLDER,aime=FOLDER \\
        --user_url=https://.../v1 --user_model=NAME --user_key_file=FILE --judge_url=...

With --weights the program serves the model itself, as `astra serve` does, once the benchmarks' own programs are there;
its log is DIR/logs/server.log. With --model_url it asks an endpoint that is running. Each benchmark's own code scores.
Each suite runs at a pinned version in its own Python environment, which is created when it is first needed. Suites that
no package registry has are named with --sources; without it the program prints how to get them (docs/evaluation.md).
Prints the table, and writes DIR/results (a record for each item), table.md, table.json and table.html. `astra compare`
compares several runs.

Run the same command again after an interruption, or after a failure of the infrastructure: finished items are not run
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.settings import Count, Length, Seconds, Slots, Temperature
from astra_jax.base.terminal import say
from launch.flags import checkpoint_server, cli, environments, policies, sandboxes, shared
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for them
    from collections.abc import Mapping

    from astra_jax.evaluation.run import RunConfig
    from astra_jax.evaluation.suite import ModelEndpoint, Role, Suite
    from launch.flags.environments import GivenEnvironments

_WORKDIR = shared.workdir()
_ENDPOINT = flags.DEFINE_string(
    "model_url", None, "OpenAI-compatible endpoint of the model, ending in /v1; or give --weights."
)
_MODEL = flags.DEFINE_string(
    "model", None, "Name of the served model; by default the only one that --model_url serves."
)
_KEY_FILE = flags.DEFINE_string("model_key_file", None, "File whose first line is the API key of --model_url.")
_LABEL = flags.DEFINE_string("label", None, "Name of the model in the table; by default its served name.")
_SUITES = flags.DEFINE_list(
    "suites",
    "bfcl_v3_mt",
    "Names of suites (docs/evaluation.md), separated by commas; or environments: own:my_module:my_name, mcp:FILE, "
    "verifiers:ID or openenv:URL.",
)
_REWARD = shared.reward()
_SOURCES = flags.DEFINE_list(
    "sources",
    [],
    "Files of suites that no package registry has: SUITE=FOLDER, separated by commas (docs/evaluation.md).",
)
_HARNESSES = flags.DEFINE_string(
    "harnesses",
    None,
    "Folder for the harnesses' Python environments; by default astra-jax/harnesses in the user's cache.",
)
_USER = flags.DEFINE_string("user_url", None, "Endpoint of the model that plays the user, for suites that have one.")
_USER_MODEL = flags.DEFINE_string("user_model", None, "Name of the model at --user_url.")
_USER_KEY_FILE = flags.DEFINE_string("user_key_file", None, "File whose first line is the API key of --user_url.")
_JUDGE = flags.DEFINE_string("judge_url", None, "Endpoint of the judge, for suites that have one.")
_JUDGE_MODEL = flags.DEFINE_string("judge_model", None, "Name of the model at --judge_url.")
_JUDGE_KEY_FILE = flags.DEFINE_string("judge_key_file", None, "File whose first line is the API key of --judge_url.")
_LIMIT = number_flag("limit", None, Count, "Maximum items of each category, for a trial run; by default all.")
_TRIALS = number_flag("trials", None, Count, "Samples of each item; by default the suite's number.")
_TEMPERATURE = number_flag("temperature", None, Temperature, "Sampling temperature; by default the paper's.")
_MAX_TOKENS = number_flag(
    "max_tokens", None, Length, "Maximum tokens of one completion; by default the limit of the suite or the endpoint."
)
_EXTRA = flags.DEFINE_string(
    "extra_body",
    None,
    'Additional fields of the requests, as JSON: {"chat_template_kwargs": {"enable_thinking": false}}.',
)
_CONCURRENCY = number_flag("concurrency", 32, Slots, "Concurrency: maximum items that run at the same time.")
_TIMEOUT = number_flag("timeout_seconds", 1800.0, Seconds, "Time limit of one completion, in seconds.")
_SEED = shared.seed()
_OWN = "own"
"""Prefix of your own environments in --suites."""


def main() -> None:
    say(asyncio.run(_evaluate()))


async def _evaluate() -> str:
    from astra_jax.evaluation.run import RunConfig
    from synthesis.core.workdir import locked

    workdir = cli.local_folder(_WORKDIR)
    if twice := [name for name in _SUITES.value if _SUITES.value.count(name) > 1]:
        raise cli.UsageError(f"--suites={','.join(_SUITES.value)} names {twice[0]} twice")
    config = RunConfig(
        seed=_SEED.value,
        limit=_LIMIT.value,
        trials=_TRIALS.value,
        temperature=_TEMPERATURE.value,
        max_tokens=_MAX_TOKENS.value,
        extra=_extra(),
        concurrency=_CONCURRENCY.value,
    )
    sources = _sources()
    _check_wanted()
    _check_model()
    given = {name: _environments(name) for name in _SUITES.value if _is_environments(name)}
    if environments.COUNT.present and not any(one.is_counted for one in given.values()):
        raise cli.UsageError(f"--{environments.COUNT.name} is for verifiers:ID and openenv:URL in --suites")
    with locked(workdir):
        return await _run(workdir, config, sources, given)


async def _run(
    workdir: Path, config: RunConfig, sources: Mapping[str, Path], given: Mapping[str, GivenEnvironments]
) -> str:
    """Evaluate in a locked workdir. Return the table."""
    import msgspec

    from astra_jax.base.files import user_cache, write_text
    from astra_jax.evaluation import preflight
    from astra_jax.evaluation.endpoint_agent import endpoint_of
    from astra_jax.evaluation.grids import as_json, markdown
    from astra_jax.evaluation.run import run_suites
    from astra_jax.evaluation.saved import Evaluation, SuiteRun, save_evaluation
    from astra_jax.evaluation.suite import SuiteContext
    from astra_jax.evaluation.suites import make
    from astra_jax.evaluation.suites.held_out import OpenedEnvironments
    from astra_jax.evaluation.table import tabulate
    from launch.viewer.evaluation_page import write_evaluation
    from synthesis.core.stages import Journal

    server = checkpoint_server.CheckpointServer(workdir / "logs" / "server.log") if policies.WEIGHTS.value else None
    if server is not None:
        policy = server.endpoint
    else:
        policy = await preflight.check(_served(_ENDPOINT, _MODEL, _KEY_FILE), _ENDPOINT.name)
    models: dict[Role, ModelEndpoint] = {}
    if _USER.value:
        models["user"] = await preflight.check(_served(_USER, _USER_MODEL, _USER_KEY_FILE), _USER.name)
    if _JUDGE.value:
        models["judge"] = await preflight.check(_served(_JUDGE, _JUDGE_MODEL, _JUDGE_KEY_FILE), _JUDGE.name)
    endpoint = endpoint_of(policy, concurrency=_CONCURRENCY.value, timeout_seconds=_TIMEOUT.value)
    suites: list[Suite] = []
    runs_tools = "environments" in _SUITES.value
    async with sandboxes.sandbox_from_flags() if runs_tools else contextlib.nullcontext() as sandbox:
        context = SuiteContext(
            policy=policy,
            endpoint=endpoint,
            models=models,
            harnesses=_expanded(_HARNESSES.value) if _HARNESSES.value else user_cache("harnesses"),
            sources=sources,
            logs=workdir / "logs",
            sandbox=sandbox,
            reward=_REWARD.value,
            timeout_seconds=_TIMEOUT.value,
        )
        try:
            for name in _SUITES.value:
                opened = given.get(name)
                suites.append(make(name, context) if opened is None else OpenedEnvironments(name, opened.open, context))
                config.decodings(suites[-1].info)  # a bad --extra_body is said before anything is installed
            for suite in suites:
                await suite.prepare()
            weights = None if server is None else server.weights
            with Journal(workdir / "journals" / f"{_identity(policy, config, weights)}.sqlite") as journal:
                running = run_suites(suites, journal=journal, config=config, models=models)
                if server is None:
                    results = await running
                else:
                    results = await server.serving(running)
            evaluation = Evaluation(
                model=_LABEL.value or policy.model,
                suites={one.info.name: SuiteRun.of(one, config.decodings(one.info)) for one in suites},
                results=tuple(results),
                roles={role: served.model for role, served in models.items()},
                config=msgspec.to_builtins(config),
                weights=weights,
            )
        finally:
            for suite in suites:
                await suite.close()
            await endpoint.close()
    save_evaluation(workdir, evaluation)
    table = tabulate(evaluation)
    text = markdown(table)
    write_text(workdir / "table.md", text)
    write_text(workdir / "table.json", as_json(table))
    write_evaluation(workdir / "table.html", table)
    return text


def _served(
    url: flags.FlagHolder[str | None], model: flags.FlagHolder[str | None], key_file: flags.FlagHolder[str | None]
) -> ModelEndpoint:
    from astra_jax.base.access import keyless
    from astra_jax.evaluation.suite import ModelEndpoint

    assert url.value
    if not url.value.startswith(("http://", "https://")):
        raise cli.UsageError(f"--{url.name}={url.value}: write http://HOST:PORT/v1")
    return ModelEndpoint(
        keyless(url.value.rstrip("/"), f"--{url.name}"), model.value or "", cli.token_of(key_file) or "EMPTY"
    )


def _is_environments(suite: str) -> bool:
    """Return whether a suite is a name of environments."""
    return ":" in suite


def _environments(suite: str) -> GivenEnvironments:
    """Return the environments that a suite names. Raises `UsageError`, and as `GivenEnvironments`."""
    kind, _, name = suite.partition(":")
    if kind not in (_OWN, *environments.SERVED):
        raise cli.UsageError(
            f"--suites={suite}: write own:my_module:my_name for environments of your own; or mcp:FILE, verifiers:ID or "
            "openenv:URL"
        )
    found = environments.GivenEnvironments(
        name if kind == _OWN else suite, _SUITES.name, count=environments.COUNT.value
    )
    if found.records is not None:
        raise cli.UsageError(
            f"--suites={suite}: {name} is a dataset; use --suites=environments --sources=environments={name}"
        )
    return found


def _expanded(folder: str) -> Path:
    return Path(os.path.expanduser(folder)).absolute()  # `Path.expanduser` fails without a home directory


def _sources() -> dict[str, Path]:
    from astra_jax.evaluation.suites import sources_of

    named = [name for name in _SUITES.value if not _is_environments(name)]
    sources: dict[str, Path] = {}
    for entry in _SOURCES.value:
        name, equals, folder = entry.partition("=")
        if not equals or not _expanded(folder).is_dir():
            raise cli.UsageError(f"--sources={entry}: write SUITE=FOLDER, a folder that is there")
        if name in sources:
            raise cli.UsageError(f"--sources={','.join(_SOURCES.value)} names {name} twice")
        sources[name] = _expanded(folder)
    if unwanted := sorted(sources.keys() - sources_of(named)):
        raise cli.UsageError(
            f"--sources={unwanted[0]}=...: no suite in --suites={','.join(_SUITES.value)} needs it; they need "
            f"{', '.join(sorted(sources_of(named))) or 'none'}"
        )
    return sources


def _check_model() -> None:
    """Check that one model is given. Raises `UsageError`."""
    own = checkpoint_server.is_given()
    if own and _ENDPOINT.value:
        raise cli.UsageError(
            f"--weights={policies.WEIGHTS.value} and --model_url={_ENDPOINT.value} both name the model: leave out "
            "--model_url to serve the weights here, or --weights to ask the endpoint"
        )
    if own:
        cli.refuse_unused((_MODEL, _KEY_FILE), "is for --model_url; leave it out with --weights")
    elif not _ENDPOINT.value:
        raise cli.UsageError(
            "--weights or --model_url is missing: give --weights=FOLDER of a checkpoint, which is served here, or the "
            "address of a running endpoint; see --help"
        )


def _check_wanted() -> None:
    """Refuse flags that have no effect. Raises `cli.UsageError`."""
    for url, *others in ((_USER, _USER_MODEL, _USER_KEY_FILE), (_JUDGE, _JUDGE_MODEL, _JUDGE_KEY_FILE)):
        for flag in others:
            if flag.value and not url.value:
                raise cli.UsageError(f"--{flag.name} needs the endpoint --{url.name}; give it too")
    if "environments" not in _SUITES.value and (given := sandboxes.given()):
        raise cli.UsageError(
            f"--{given[0]} is for tools of the suite environments, which is not in --suites={','.join(_SUITES.value)}; "
            "name it there, or leave the flag out"
        )

    if _REWARD.value is not None and not any(
        name == "environments" or _is_environments(name) for name in _SUITES.value
    ):
        raise cli.UsageError(
            f"--{_REWARD.name} is for environments, and --suites={','.join(_SUITES.value)} names none; leave it out"
        )


def _extra() -> dict[str, Any]:
    from synthesis.core.chat_format import parse_json

    try:
        extra = parse_json(_EXTRA.value or "{}")
    except (ValueError, RecursionError) as error:  # NaN is none either: it would make the requests invalid
        raise cli.UsageError(f"--extra_body={_EXTRA.value} is not JSON ({error})") from None
    if not isinstance(extra, dict):
        raise cli.UsageError(f"--extra_body={_EXTRA.value} must be a JSON object, of fields of the request")
    return extra


def _identity(policy: ModelEndpoint, config: RunConfig, weights: Mapping[str, Any] | None) -> str:
    """Return the name of the journal: everything that results depend on, except for the suites.

    Each suite is a separate stage of the journal, with the models that it calls. The number of items and of retries
    does not count, so that a run can be extended.
    """
    import dataclasses
    import hashlib

    import msgspec

    same = dataclasses.replace(config, limit=None, trials=None, concurrency=1, retries=type(config).retries)
    asked: list[Any] = [policy.url, policy.model, {}]  # from when roles were in it, none of which were given
    if weights is not None:
        asked = [weights, {flag.name: flag.value for flag in checkpoint_server.CHANGES_RESULTS}]
    encoded = msgspec.json.encode([asked, dataclasses.asdict(same)], order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:12]


if __name__ == "__main__":
    cli.run(main, again="finished items are not run again")
