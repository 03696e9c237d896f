"""Runner of a tool that notes what the tool accesses. Never imported: `sandbox.validation` sends it with the tool.

The notes are for honest code, which does not look for the observer. The sandbox's layers are for code that hides.
"""

from __future__ import annotations

import builtins
import random
import sys
import time
import types

SOURCE = ""  # the tool's source; set again at the end of the text that is sent

_WHOLE = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
_WITHOUT_A_MOMENT = {"gmtime": 0, "localtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}


def observe(function: str, arguments: dict) -> dict:
    """Load the tool, call its function, and return the result and the notes."""
    clock, network, imports = set(), set(), set()

    def noting(name, original, most_arguments=None):
        def noted(*given, **named):
            if most_arguments is None or len(given) <= most_arguments:
                clock.add(name)
            return original(*given, **named)

        return noted

    for name in [*_WHOLE, *(f"{name}_ns" for name in _WHOLE)]:
        if hasattr(time, name):
            setattr(time, name, noting(name, getattr(time, name)))
    for name, most_arguments in _WITHOUT_A_MOMENT.items():
        setattr(time, name, noting(name, getattr(time, name), most_arguments))

    def import_module(name, globals=None, locals=None, fromlist=(), level=0):
        imports.add(name if level == 0 else "." * level + name)
        return __import__(name, globals, locals, fromlist, level)

    def heard(event, given):
        if event.startswith("socket."):
            network.add(event)

    sys.addaudithook(heard)
    # The tool's small objects get the gaps that half of these leave, its large ones lie after these: other places than
    # in a plain call. So an answer that contains an address, or depends on the order of addresses, differs. Eight of
    # each large size: glibc keeps up to seven freed blocks, and reuses those first.
    gaps = [make() for make in (object, list, dict, set, lambda: (SOURCE,)) for _ in range(200)]
    gaps += [bytes(size) for size in range(0, 480, 16) for _ in range(20)]
    random.Random(0).shuffle(gaps)
    del gaps[::2]
    gaps += [bytes(size) for size in range(480, 2048, 16) for _ in range(8)]
    tool = types.ModuleType("tool")
    tool.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_module}
    tool.__dict__["__to_json__"] = globals()["__to_json__"]  # as in a plain call
    tool.__file__ = "<tool>"
    sys.modules["tool"] = tool
    sys.modules["another"] = types.ModuleType("another")  # tools may not see which modules are loaded
    found = {"value": None, "error": ""}
    try:
        exec(compile(SOURCE, "<tool>", "exec", dont_inherit=True), tool.__dict__)
        found["value"] = tool.__dict__[function](**arguments)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, "clock": sorted(clock), "network": sorted(network), "imports": sorted(imports)}
