"""Running MCP servers as people already write them down: `{"mcpServers": …}` files, and the official registry's
`server.json`.

What is written there stands in records, so a secret must not: values of environment variables and headers name a
variable of the environment, `${NAME}`, which is filled in when the server is started. A package of the registry is
started by the runner of its kind (`npx`, `uvx`), at the version that its document names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.files import read_unpacked
from astra_jax.base.typed import decode_any_json
from synthesis.core.mirror import fetched
from synthesis.core.records import HttpExecution, McpExecution, StdioExecution
from synthesis.core.tool_schemas import brief
from synthesis.pipeline.languages import language_of
from synthesis.servers.collect import ServerSource

_DOMAIN: Final = "other"
_NAMED: Final = re.compile(r"\$\{\w{1,200}\}")
_RUNNERS: Final[Mapping[str, str]] = {"npm": "npx", "pypi": "uvx"}
"""Command that starts a package, by its registry."""
_HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")


def read_sources(paths: Iterable[Path | str]) -> list[ServerSource]:
    """Return the servers of all files, in their order; one that is disabled is left out.

    Raises:
        InputError: a file is of neither form, or a server of it cannot be started as it is written; names both.
    """
    found: list[ServerSource] = []
    for path in map(fetched, paths):
        try:
            value = decode_any_json(read_unpacked(path))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not JSON ({error})") from None
        found += _of_file(value, path)
    ids = [one.id for one in found]
    if repeated := [one for one in ids if ids.count(one) > 1]:
        raise InputError(f"two servers have the id {repeated[0]!r}; leave one of them out, or rename it")
    return found


def is_configuration(value: Any) -> bool:
    """Return whether the content of a file says how MCP servers are started, and not what their tools are."""
    if isinstance(value, Mapping) and not value.keys() & {"openapi", "swagger", "tools"}:
        if _named(value) is not None:
            return True
        value = value.get("servers", value)
    return bool(found := _documents(value)) and all(
        isinstance(one, Mapping) and "name" in one and one.keys() & {"packages", "remotes"} for one in found
    )


def _named(value: Any) -> Mapping[str, Any] | None:
    """Return the servers by name: `mcpServers` as most clients have it, `servers` as Visual Studio Code does."""
    found = (value.get(key) for key in ("mcpServers", "servers")) if isinstance(value, Mapping) else ()
    return next((one for one in found if isinstance(one, Mapping)), None)


def _documents(value: Any) -> list[Any]:
    """Return the registry's documents, one or a list; what its interface gives has each in a wrapper."""
    listed = value if isinstance(value, list) else [value]
    return [one.get("server", one) if isinstance(one, Mapping) else one for one in listed]


def _of_file(value: Any, path: Path) -> list[ServerSource]:
    if (named := _named(value)) is not None:
        return [
            source_of(str(name), str(name), "", _configured(one, f"{path}: {name}"))
            for name, one in named.items()
            if not (isinstance(one, Mapping) and one.get("disabled") is True)
        ]
    documents = _documents(value.get("servers", value) if isinstance(value, Mapping) else value)
    if not documents or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in documents):
        raise InputError(
            f'{path} is neither {{"mcpServers": {{…}}}} nor a server.json of the registry (an object with '
            "`name` and `packages` or `remotes`)"
        )
    return [
        source_of(
            one["name"], str(one.get("title") or one["name"]), str(one.get("description") or ""), _listed(one, path)
        )
        for one in documents
    ]


def source_of(name: str, title: str, description: str, execution: McpExecution) -> ServerSource:
    id = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "server"
    return ServerSource(id, title, description, _DOMAIN, language_of(description or title, ("en",)), execution)


def _configured(server: Any, where: str) -> McpExecution:
    """Return the execution of an entry of `mcpServers`."""
    if not isinstance(server, Mapping):
        raise InputError(f"{where} is {brief(server):.80}; write an object with `command` or `url`")
    kind = server.get("type") or server.get("transport")
    if isinstance(server.get("url"), str):
        if kind not in (None, *_HTTP):
            raise InputError(f"{where}: the transport {brief(kind):.40} is not spoken; give its streamable HTTP url")
        return HttpExecution(server["url"], _variables(server.get("headers"), f"{where}: headers"))
    if not isinstance(server.get("command"), str):
        raise InputError(f"{where} has neither `command` nor `url`")
    arguments = [str(one) for one in _list(server.get("args"))]
    return StdioExecution([server["command"], *arguments], _variables(server.get("env"), f"{where}: env"))


def _listed(server: Mapping[str, Any], path: Path) -> McpExecution:
    """Return the execution of a `server.json`: the first package that can be started, else the first reachable
    remote."""
    where = f"{path}: {server['name']}"
    packages = [one for one in _list(server.get("packages")) if isinstance(one, Mapping)]
    for package in packages:
        registry = package.get("registryType") or package.get("registry_type") or package.get("registry_name")
        transport = package.get("transport")
        kind = transport.get("type", "stdio") if isinstance(transport, Mapping) else "stdio"
        if registry in _RUNNERS and kind == "stdio" and isinstance(package.get("identifier"), str):
            return _package(package, str(registry), where)
    for remote in (one for one in _list(server.get("remotes")) if isinstance(one, Mapping)):
        if remote.get("type") in _HTTP and isinstance(remote.get("url"), str):
            headers = [one for one in _list(remote.get("headers")) if isinstance(one, Mapping)]
            return HttpExecution(remote["url"], _required(headers, where))
    kinds = ", ".join(str(one.get("registryType") or one.get("registry_type")) for one in packages) or "no package"
    raise InputError(f"{where} has {kinds}; packages of npm and PyPI over stdio, or streamable HTTP, are started")


def _package(package: Mapping[str, Any], registry: str, where: str) -> StdioExecution:
    version = package.get("version")
    named = package["identifier"] + (f"@{version}" if version and version != "latest" else "")
    before = [*(["-y"] if registry == "npm" else []), *_arguments(package.get("runtimeArguments"), where)]
    after = _arguments(package.get("packageArguments"), where)
    variables = [one for one in _list(package.get("environmentVariables")) if isinstance(one, Mapping)]
    return StdioExecution([_RUNNERS[registry], *before, named, *after], _required(variables, where))


def _arguments(given: Any, where: str) -> list[str]:
    """Return the arguments that have a value. Raises `InputError`: a required one has none."""
    found: list[str] = []
    for one in (one for one in _list(given) if isinstance(one, Mapping)):
        value = one.get("value", one.get("default"))
        if value is None and one.get("isRequired"):
            name = one.get("name") or one.get("valueHint")
            raise InputError(f'{where} needs a value of its argument {name!r}; start it from {{"mcpServers": …}}')
        if one.get("type") == "named" and (value is not None or one.get("isRequired")):
            found.append(str(one.get("name")))
        found += [] if value is None else [str(value)]
    return found


def _required(given: Iterable[Mapping[str, Any]], where: str) -> dict[str, str]:
    """Return required variables or headers, taken from the environment under their names."""
    found: dict[str, str] = {}
    for one in given:
        name = str(one.get("name"))
        if one.get("isSecret") or one.get("value") is None:
            if one.get("isRequired"):
                found[name] = "${" + re.sub(r"\W", "_", name) + "}"
        else:
            found[name] = str(one["value"])
    return found


def _variables(given: Any, where: str) -> dict[str, str]:
    """Raises `InputError`: one has a value of its own, which would be stored with every record."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{where} is {brief(given):.80}; write an object of names and values")
    for name, value in given.items():
        if not (isinstance(value, str) and _NAMED.search(value)):
            raise InputError(
                f"{where}.{name} is written out, and would be stored in the records: write ${{{name}}}, and "
                "set it in the environment"
            )
    return dict(given)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
