"""Run BFCL's multi-turn categories in the harness's own environment: entries, simulators and checker of `bfcl_eval`.

    python bfcl.py SOCKET VERSION CPU_SECONDS CATEGORY...

The harness executes a call by `eval` of its text, protected only by a short list of forbidden words. So an item's
process is locked (`confined.py`) before it sees any call. Its text gets only names of the entry's own tools, with
arguments that are identifiers. Values are written by `repr`.

The harness keeps simulators in module globals, by model name and entry. Here each item has its own process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import keyword
import os
import sys
import tempfile
from typing import Any

from confined import Confined, Died, require_confinement
from serving import Methods, serve

_DISTRIBUTION = "bfcl-eval"
_MODEL = "policy"
_REFUSED = "no_such_function()"
"""Replacement for a blocked call: the harness counts it as an unknown function."""


class BfclItem:
    """An entry that a model works on.

    Args:
        entry: the entry as `bfcl_eval` loads it.
        truth: its reference calls, by turn.
    """

    def __init__(self, entry: dict[str, Any], truth: list[list[str]]) -> None:
        self._entry = entry
        self._truth = truth
        self._long = "long_context" in entry["id"]
        self._decoded: list[list[list[str]]] = []
        held_out = entry.get("missed_function", {})
        self._names = {tool["name"] for tool in [*entry["function"], *(t for late in held_out.values() for t in late)]}

    def begin(self) -> dict[str, Any]:
        """Return the model's input: messages of each user turn, and its tools where they change."""
        from bfcl_eval.constants import default_prompts

        held_out = self._entry.get("missed_function", {})
        functions = list(self._entry["function"])
        turns = []
        for turn, messages in enumerate(self._entry["question"]):
            late = held_out.get(str(turn), [])
            functions += late
            if late:
                assert not messages, f"{self._entry['id']}: turn {turn} adds functions and has a message of its own"
                messages = [{"role": "user", "content": default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}]
            turns.append({"messages": messages, "tools": _compile(functions) if late or turn == 0 else None})
        # The harness counts a step, then quits where the count is above its limit: one more is carried out.
        return {"turns": turns, "steps": default_prompts.MAXIMUM_STEP_LIMIT + 1}

    def act(self, turn: int, calls: list[tuple[str, Any]]) -> dict[str, Any]:
        """Execute the calls of a step.

        Args:
            turn: number of the user turn, from 0.
            calls: name and arguments of each, as the endpoint gave them.

        Returns:
            An output for each call, and the number of blocked calls. Or the reason why the step cannot be decoded; the
            harness treats it as a step without calls.
        """
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
        from bfcl_eval.model_handler.utils import convert_to_function_call

        try:
            texts = [convert_to_function_call([{name: arguments}])[0] for name, arguments in calls]
            parsed = [json.loads(arguments) if isinstance(arguments, str) else arguments for _, arguments in calls]
        except Exception as error:
            return {"undecodable": f"{type(error).__name__}: {error}"}
        refusals = [self._refusal(name, arguments) for (name, _), arguments in zip(calls, parsed, strict=True)]
        step = [_REFUSED if refusal else text for refusal, text in zip(refusals, texts, strict=True)]
        self._turn(turn).append(step)
        outputs, _ = execute_multi_turn_func_call(
            step, self._entry["initial_config"], self._entry["involved_classes"], _MODEL, self._entry["id"], self._long
        )
        return {
            "outputs": [refusal or output for refusal, output in zip(refusals, outputs, strict=True)],
            "refused": sum(refusal is not None for refusal in refusals),
        }

    def score(self, turns: int) -> dict[str, Any]:
        """Return the harness's verdict, and for each turn whether something was called and whether it can be fulfilled.

        Args:
            turns: number of user turns that the model has worked on; fewer than all if it was stopped.
        """
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

        for turn in range(turns):
            self._turn(turn)
        told = {"called": list(map(bool, self._decoded)), "able": list(map(bool, self._truth[:turns]))}
        if turns != len(self._truth):
            return {
                "valid": False,
                "error_type": "multi_turn:force_terminated",
                "error_message": f"in turn {turns - 1}",
                **told,
            }
        category = self._entry["id"].rsplit("_", 1)[0]
        verdict = checker.multi_turn_checker(self._decoded, self._truth, self._entry, category, _MODEL)
        verdict = {name: verdict.get(name) for name in ("valid", "error_type", "error_message")} | told
        if not all(self._truth):
            quiet = checker.multi_turn_irrelevance_checker(self._decoded, self._truth)
            verdict["abstained"] = quiet["valid"]
        return verdict

    def _turn(self, turn: int) -> list[list[str]]:
        while len(self._decoded) <= turn:
            self._decoded.append([])
        return self._decoded[turn]

    def _refusal(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Return the error text for a blocked call, in the harness's words; None for an allowed call."""
        if name not in self._names:
            return f"Error during execution: name {name.split('.')[0]!r} is not defined"
        for argument in arguments:
            if not argument.isidentifier() or keyword.iskeyword(argument):
                return f"Error during execution: {name}() got an unexpected keyword argument {argument!r}"
        return None


def _compile(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format, by the handler's own function."""
    from bfcl_eval.constants.enums import ModelStyle
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.model_handler.utils import convert_to_tool

    tools: list[dict[str, Any]] = convert_to_tool(functions, GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
    return tools


class ItemConnection:
    """Methods of one connection: an item in a locked process."""

    def __init__(self, entries: dict[str, dict[str, tuple[dict[str, Any], Any]]], cpu_seconds: int) -> None:
        self._entries, self._cpu_seconds = entries, cpu_seconds
        self._confined: Confined | None = None

    def methods(self) -> Methods:
        """Return the methods by name."""
        return {"ids": self.ids, "begin": self.begin, "act": self._act, "score": self._score}

    def ids(self, category: str) -> list[str]:
        """Return the entries of a category, in the order of its file."""
        return list(self._entries[category])

    def begin(self, category: str, entry: str) -> Any:
        """Lock a process for an entry. Return the model's input."""
        item = BfclItem(*self._entries[category][entry])
        self._confined = Confined(
            lambda: {"begin": item.begin, "act": item.act, "score": item.score}, cpu_seconds=self._cpu_seconds
        )
        return self._confined.call("begin")

    def _act(self, **params: Any) -> Any:
        return self._pass_on("act", params)

    def _score(self, **params: Any) -> Any:
        return self._pass_on("score", params)

    def _pass_on(self, method: str, params: dict[str, Any]) -> Any:
        assert self._confined is not None, "begin comes first"
        try:
            return self._confined.call(method, **params)
        except Died as died:
            return {"died": str(died)}


def load(categories: list[str]) -> dict[str, dict[str, tuple[dict[str, Any], Any]]]:
    """Return entries with their reference, by category and id. Imports everything that a locked process will need."""
    # The harness makes folders for its results where it is imported, and locks files that it reads.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BFCL_PROJECT_ROOT"] = folder
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker  # noqa: F401
        from bfcl_eval.model_handler import utils as handler_utils  # noqa: F401
        from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

        loaded = {}
        for category in categories:
            entries, truths = load_dataset_entry(category), load_ground_truth_entry(category)
            pairs = zip(entries, truths, strict=True)
            loaded[category] = {entry["id"]: (entry, truth["ground_truth"]) for entry, truth in pairs}
            for name in {name for entry in entries for name in entry["involved_classes"]}:
                importlib.import_module(CLASS_FILE_PATH_MAPPING[name])
    return loaded


def main() -> None:
    """Serve until standard input ends."""
    path, version, cpu_seconds, *categories = sys.argv[1:]
    if (found := importlib.metadata.version(_DISTRIBUTION)) != version:
        sys.exit(f"{_DISTRIBUTION} is {found}, not the pinned {version}; remove this environment to have it made anew")
    with contextlib.redirect_stdout(sys.stderr):
        entries = load(categories)
    require_confinement()
    serve(path, lambda: ItemConnection(entries, int(cpu_seconds)).methods())


if __name__ == "__main__":
    main()
