"""A program's command line over and over in one process, as far as its `main`: `PROGRAM JSON`, a list of values to be
given to its flags that are numbers. Prints what was seen, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from typing import Any

from absl import flags

from launch.flags import cli
from launch.flags.numbers import NumberParser
from launch.flags.shared import RENAMED


def _main() -> None:
    program, values = sys.argv[1], json.loads(sys.argv[2])
    seen: dict[str, Any] = {}
    real = cli.run
    libraries = {module for module in flags.FLAGS.flags_by_module_dict() if not module.startswith("launch.")}

    def run(*given: Any, **options: Any) -> None:
        def once(*arguments):
            sys.argv = [program, *arguments]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    real(*given, **options)
                except SystemExit as ended:
                    return [ended.code, out.getvalue(), err.getvalue()]
            return [None, out.getvalue(), err.getvalue()]

        seen["help"], seen["version"], seen["unknown"] = once("--help"), once("--version"), once("--nonsens=1")
        seen["stray"] = once("--config.no_such_setting=1") if "settings" not in options else None
        numeric = [name for name in flags.FLAGS if isinstance(flags.FLAGS[name].parser, NumberParser)]
        seen["unbounded"] = sorted(
            flag.name
            for module, known in flags.FLAGS.flags_by_module_dict().items()
            if module not in libraries
            for flag in known
            if type(flag.parser).__name__ in ("IntegerParser", "FloatParser")
        )
        own = [
            flag
            for module, known in flags.FLAGS.flags_by_module_dict().items()
            if module not in libraries
            for flag in known
            if flag.name not in ("version", "help_config")
        ]
        seen["meant"] = {
            flag.name: [type(flag.parser).__name__, flag.parser.syntactic_help, re.split("[.;:]", flag.help)[0]]
            for flag in own
        }
        seen["enums"] = {
            flag.name: [list(flag.parser.enum_values), once(f"--{flag.name}=nothing")]
            for flag in own
            if isinstance(flag.parser, flags.EnumParser)
        }
        old = sorted(set(RENAMED) - {flag.name for flag in own})
        seen["old"] = {name: once(f"--{name}=1") for name in old if RENAMED[name] in flags.FLAGS}
        seen["numeric"] = {}
        for name in sorted(numeric):
            parser = flags.FLAGS[name].parser
            taken = {}
            for text in values:
                try:
                    parser.parse(text)
                    taken[text] = True
                except ValueError:
                    taken[text] = False
            seen["numeric"][name] = [taken, once(f"--{name}=nan"), once(f"--{name}={2**70}")]

    cli.run = run
    module = program + (".__main__" if program == "launch.quickstart" else "")
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    print(json.dumps(seen))


if __name__ == "__main__":
    _main()
