"""Prompts of requests: files of this package, which a user's own files may replace.

A prompt is `prompts/<language>/<snake_case name of the answer type>.jinja`. A language without its own file uses the
English one, which names the language to write in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.meta
import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.compat import FORMER_KEYS
from synthesis.core.records import Language
from synthesis.pipeline.languages import NAMES, named
from synthesis.pipeline.structured_output import prompt_name

PROMPTS = _PACKAGED = Path(__file__).parents[1] / "prompts"
_ALWAYS: Final = frozenset({"language"})
"""Variables that any prompt is given."""


class _Environment(jinja2.Environment):
    """Gives records to prompts under today's and former names: a prompt's text is in the fingerprints of stages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(obj, FORMER_KEYS.get(type(obj).__name__, {}).get(attribute, attribute))


class Prompts:
    """The prompts of one run; it can be pickled.

    Args:
        own: contents by name (`en/chain_task.jinja`) that stand for those of the package.
    """

    def __init__(self, own: Mapping[str, str] | None = None) -> None:
        self.own = dict(own or {})
        self._environment = _Environment(
            loader=jinja2.ChoiceLoader([jinja2.DictLoader(self.own), jinja2.FileSystemLoader([PROMPTS, _PACKAGED])]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,  # it would look at the file for each request
        )
        # Records appear in prompts as JSON; msgspec knows how to write them, jinja's own filter does not.
        self._environment.filters["json"] = lambda value: msgspec.json.encode(value).decode()

    def __reduce__(self) -> tuple[type[Prompts], tuple[Mapping[str, str]]]:
        return Prompts, (self.own,)

    def render(self, answer: type[msgspec.Struct], variables: Mapping[str, Any], language: Language) -> str:
        """Return the prompt of a request in its language, or in English, with the language's name, if there is no such
        file.

        Raises:
            jinja2.TemplateNotFound: there is no prompt for this answer.
            jinja2.UndefinedError: the template needs a variable that is not given.
        """
        variables = {"language": named(language), **variables}
        template = self.template(prompt_name(answer), language)
        text = template.render(variables)
        if (template.name or "").startswith(f"{language}/"):
            return text
        note = self.template("_language", language).render(variables)
        return text if note in text else f"{text.rstrip()}\n\n{note}"

    def template(self, name: str, language: Language) -> jinja2.Template:
        """Return a template in its language, or in English."""
        return self._environment.select_template([f"{language}/{name}.jinja", f"en/{name}.jinja"])

    @cached_property
    def digest(self) -> str:
        """Return a digest of all prompts, by name and content."""
        digest = hashlib.sha256()
        for name in self._environment.list_templates():
            digest.update(f"{name}\0{self._source(name)}\0".encode())
        return digest.hexdigest()[:16]

    def variables(self, name: str) -> frozenset[str]:
        """Return the variables of a file and of the files that it includes. Raises `jinja2.TemplateError`."""
        tree = self._environment.parse(self._source(name), name)
        found = set(jinja2.meta.find_undeclared_variables(tree))
        for included in jinja2.meta.find_referenced_templates(tree):
            found |= self.variables(included) if included else set()
        return frozenset(found)

    def _source(self, name: str) -> str:
        assert self._environment.loader is not None
        return self._environment.loader.get_source(self._environment, name)[0]


@cache
def packaged() -> Prompts:
    """Return the prompts of the package alone."""
    return Prompts()


def render_prompt(answer: type[msgspec.Struct], variables: Mapping[str, Any], language: Language) -> str:
    """Return a prompt of the package; see `Prompts.render`."""
    return packaged().render(answer, variables, language)


def prompts_digest() -> str:
    """Return the digest of the package's prompts; see `Prompts.digest`."""
    return packaged().digest


def read_prompts(folder: Path) -> Prompts:
    """Return a user's own prompts, completed with the package's.

    A file replaces the package's file of the same name and must use the same variables. An additional one would have no
    value. Without one of them, a request would lack its subject, or the fault of the previous answer, and be paid for
    in vain.

    Raises:
        InputError: the folder has no prompts, a prompt of an unknown name or language, one with other variables, or one
            that is not a template; the message names it.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder} holds no prompts; give files such as en/chain_task.jinja in it")
    own = {path.relative_to(folder).as_posix(): path for path in files}
    prompts, theirs = Prompts({name: _text(path) for name, path in own.items()}), packaged()
    for name, path in own.items():
        language, _, file = name.partition("/")
        meant = next((one for one in (name, f"en/{file}") if (_PACKAGED / one).is_file()), None)
        if language not in NAMES or meant is None:
            raise InputError(
                f"{path}: there is no prompt {name!r}; write LANGUAGE/NAME.jinja, with a name of {_PACKAGED / 'en'}"
            )
        try:
            found, wanted = prompts.variables(name), theirs.variables(meant)
        except jinja2.TemplateError as error:
            raise InputError(f"{path} is not a template of jinja: {error}") from None
        if extra := sorted(found - wanted - _ALWAYS):
            raise InputError(
                f"{path} asks for {', '.join(extra)}, which it is not given; there are {', '.join(sorted(wanted))}"
            )
        if missing := sorted(wanted - found - _ALWAYS):
            raise InputError(f"{path} leaves out {', '.join(missing)}, which {meant} has; say it too")
    return prompts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error})") from None
