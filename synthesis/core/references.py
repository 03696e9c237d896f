"""Things of one's own that a flag or a setting names: `my_module:my_name`, or `FOLDER/FILE.py:my_name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line

OWN_FOLDER: Final = "ASTRA_OWN_FOLDER"
"""The environment variable with the folder that the run was started in, for processes that start elsewhere."""
_MOST_NAMES: Final = 20
_loaded: list[str] = []
FORM: Final = "my_module:my_name or FILE.py:my_name"


def is_reference(text: str) -> bool:
    """Return whether a text has the form of a reference, whatever it names."""
    module, _, name = text.rpartition(":")
    in_file = module.endswith(".py") and "://" not in module
    return name.isidentifier() and (in_file or all(part.isidentifier() for part in module.split(".")))


def referred(text: str) -> Any:
    """Return the object that a reference names. Its module is imported, and so executed: it is the operator's own.

    Raises:
        InputError: there is no such module or name, or the module fails; names it, and the reason.
    """
    if not is_reference(text):
        raise InputError(f"{text!r:.200} names nothing; write {FORM}")
    place, _, name = text.rpartition(":")
    try:
        module = load_file(str(Path(place).resolve())) if place.endswith(".py") else importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module of one's own raises, SystemExit among it
        problem = f"{text}: {place} cannot be imported ({type(error).__name__}: {first_line(error)})"
        if isinstance(error, ModuleNotFoundError) and error.name == place.split(".")[0]:
            file = f"{error.name}.py"
            problem += f". Start the program in the folder of {file}, or write the path: FOLDER/{file}:{name}"
        raise InputError(problem) from error
    if not hasattr(module, name):
        file = getattr(module, "__file__", None) or "built into Python"
        raise InputError(f"{text}: {place} has no {name}; it has {_public(module)} (module read: {file})")
    return getattr(module, name)


@cache
def load_file(path: str) -> ModuleType:
    """Return the module of a file; it is loaded once.

    Args:
        path: absolute.

    Raises:
        FileNotFoundError: there is no such file.
        BaseException: whatever the module raises.
    """
    name = f"_own_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    _loaded.append(path)
    sys.modules[name] = module  # as for any module: annotations are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        _loaded.remove(path)
        del sys.modules[name]
        raise
    return module


def loaded_files() -> list[str]:
    """Return the files that `load_file` has loaded, in that order: another process needs them for what is in them."""
    return list(_loaded)


def _public(module: ModuleType) -> str:
    """Return the names in a module for a message. Of many names, its own definitions come first."""
    found = {k: v for k, v in vars(module).items() if not (k.startswith("_") or isinstance(v, ModuleType))}
    if len(found) <= _MOST_NAMES:
        return ", ".join(found) or "nothing public"
    names = sorted(found, key=lambda name: getattr(found[name], "__module__", module.__name__) != module.__name__)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
