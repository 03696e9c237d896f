"""Programs of `benchmarks/` as modules: each has flags of its own, of the names that others have too."""

from __future__ import annotations

import importlib
from types import ModuleType

from absl import flags


def program(name: str) -> ModuleType:
    """The module, whatever other programs this process has imported; the values of their flags can be read no more."""
    for module, theirs in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("benchmarks."):
            for flag in [*theirs]:  # which shrinks
                delattr(flags.FLAGS, flag.name)
    return importlib.import_module(name)
