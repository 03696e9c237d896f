"""Text of `--help`: what a program does, and every flag of its own, the most used first.

A flag is in the first section of `_SECTIONS` whose pattern matches its whole name, or else among the most used or the
other flags.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

from absl import flags

MOST_USED = (
    *("config", "profile", "weights", "data", "environments", "suites", "from", "to", "workdir", "held_out"),
    *("topology", "from_hf", "from_orbax", "from_gguf", "from_peft", "to_hf", "to_orbax", "to_peft", "repository"),
    *("model_url", "teacher_url", "teacher_model", "rollout_url", "vllm", "tokens", "mesh", "preview", "search"),
    *("price_per_chip_hour", "port", "host", "key_file", "param_dtype", "step", "base", "rehearsal", "terminal"),
    *("seed", "label", "slots", "max_length", "limit", "model", "replay", "difficulty"),
)
"""Flags by use in documented commands, required ones apart: `--help` lists the first ten of a program before others."""
MOST = 10
_SECTIONS = (
    ("rollout servers", "rollout_.*|vllm_.*|publish_.*|write_serving_folder"),
    ("teacher model", "teacher|teacher_.*|roles|judge_own_text|prompts"),
    ("sandbox", "sandbox|sandbox_.*"),
    ("several hosts", "multihost|coordinator|hosts|host_.*|rendezvous_deadline|executor|ray_.*"),
    (
        "server hardening",
        "tls_.*|(drain|header|body|idle|stall)_seconds|max_(connections|headers|header_bytes|pending_bytes|waiting)"
        "|address_share|metrics_.*",
    ),
    ("help", "help_config|version"),
)
"""(heading, pattern of names) of flags that most commands do not need."""
_OURS = ("launch", "benchmarks", "docs")
"""Packages whose flags are listed; absl knows the running program by its file."""
_WIDTH = 100


def help_text() -> str:
    """Return the help of the running program: its docstring, and its flags in sections."""
    flags.FLAGS.mark_as_parsed()  # validators read other flags
    about = inspect.cleandoc(sys.modules["__main__"].__doc__ or "").rstrip()
    more = [f"{title}:\n" + "\n".join(map(_entry, found)) for title, found in sections()]
    return "\n\n".join([about, *more])


def sections() -> Iterator[tuple[str, list[flags.Flag]]]:
    """Yield (heading, flags) of each section of the program's help that has flags."""
    by_name = own_flags()
    section_of = {
        name: next((title for title, pattern in _SECTIONS if re.fullmatch(pattern, name)), "") for name in by_name
    }
    usual = [name for name in MOST_USED if name in by_name]
    needed = [name for name in usual if is_required(name)]
    needed += sorted(name for name in by_name if is_required(name) and name not in needed)
    first = [*needed, *(name for name in usual if name not in needed)][: max(MOST, len(needed))]
    rest = sorted(name for name, section in section_of.items() if not section and name not in first)
    if len(first) + len(rest) <= MOST:
        first, rest = [*first, *rest], []
    listed = [("most used flags" if rest else "flags", first), ("other flags", rest)]
    listed += [
        (title, sorted(name for name, section in section_of.items() if section == title and name not in first))
        for title, _ in _SECTIONS
    ]
    for title, names in listed:
        if names:
            yield title, [by_name[name] for name in names]


def own_flags() -> dict[str, flags.Flag]:
    """Return the program's flags by name, without those of libraries."""
    return {
        flag.name: flag
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if module.endswith(".py") or module.partition(".")[0] in _OURS
        for flag in defined
    }


def is_required(name: str) -> bool:
    """Return whether the program refuses to start without a flag."""
    return any(not validator.checker(None) for validator in flags.FLAGS[name].validators)


def _entry(flag: flags.Flag) -> str:
    shown = f"--{'[no]' * bool(flag.boolean)}{flag.name}{' (required)' * is_required(flag.name)}: {flag.help}"
    value = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
    default = "" if value in (None, False, "") else f"default: {value}"
    more = "; ".join(filter(None, [flag.parser.syntactic_help, default]))
    return textwrap.fill(
        shown + (f" [{more}]" if more else ""),
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )
