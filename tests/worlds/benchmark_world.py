"""Programs of `benchmarks/` as modules: each has flags of its own, with names that other programs have too."""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any
from unittest import mock

from absl import flags


def program(name: str) -> ModuleType:
    """The module, whatever programs this process has imported or will import. Its flags are not registered, so their
    values cannot be read."""
    register: Any = flags.FlagValues.__setitem__

    def register_if_free(values: flags.FlagValues, flag_name: str, flag: flags.Flag[Any]) -> None:
        with contextlib.suppress(flags.DuplicateFlagError):
            register(values, flag_name, flag)

    with mock.patch.object(flags.FlagValues, "__setitem__", register_if_free):
        module = importlib.import_module(name)
    for defined_in, theirs in flags.FLAGS.flags_by_module_dict().items():
        if defined_in.startswith("benchmarks."):
            for flag in [*theirs]:  # which shrinks
                if flag.name in flags.FLAGS and flags.FLAGS[flag.name] is flag:
                    delattr(flags.FLAGS, flag.name)
    return module
