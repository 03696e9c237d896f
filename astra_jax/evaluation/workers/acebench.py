"""Run ACEBench's own dialogue, execution and scoring from a clone of its repository. Standard library only.

    python acebench.py SOCKET CLONE

Its modules are imported unchanged. Stand-ins replace their unneeded imports: progress bars, `.env` files and tables. A
stand-in of the `openai` client requests completions from the other side of the connection, so an item's process needs
no network. The harness calls `eval` on model output. So an item runs in a process that is locked before it starts. It
is scored outside of it, from states and messages alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import serving
from confined import Confined, Died, require_confinement

_POLICY, _USER = "gpt-policy", "gpt-user"
"""Names of models: the harness looks for "gpt" in them, among others, to choose a client."""
_UNDEFINED = "an_argument_must_be_a_value"
"""A name that is not defined anywhere."""


class RemoteCompletions:
    """Stand-in for the `openai` client: a completion comes from the other side of the connection."""

    def __init__(self, **_: Any) -> None:
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: Sequence[Mapping[str, Any]], model: str, **_: Any) -> SimpleNamespace:
        """Return a completion. The harness's temperature and token limit are ignored: the other side decides how to
        sample."""
        text = serving.ask("complete", role="user" if model == _USER else "policy", messages=messages)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


class NoProgress:
    """Stand-in for `tqdm`, whose thread a locked process could not start."""

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: int) -> None: ...


def stand_in(name: str, **attributes: Any) -> None:
    """Put a module in place of one that is not installed."""
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def import_harness(clone: str) -> None:
    """Import everything that `play` and `score` use: a locked process can open no file."""
    sys.path.insert(0, clone)
    stand_in("openai", OpenAI=RemoteCompletions)
    stand_in("tqdm", tqdm=NoProgress)
    stand_in("dotenv", load_dotenv=lambda: False)
    stand_in("wcwidth", wcswidth=len)
    stand_in("pandas")
    stand_in("openpyxl", Workbook=None)
    stand_in("openpyxl.styles", Alignment=None)
    import _strptime  # noqa: F401  # `datetime.strptime` imports it at its first use
    from importlib import import_module

    import_module("eval_main")
    inference = import_module("model_inference.apimodel_inference")
    for kind in ("turn", "step"):
        utilities = import_module(f"model_inference.multi_{kind}.multi_{kind}_utils")
        for language in ("ZH", "EN"):
            for module in getattr(utilities, f"CLASS_FILE_PATH_MAPPING_{language}").values():
                import_module(module)
    assert inference.SAVED_CLASS


class Unsafe(ValueError):
    """An argument that is code; the harness treats a text with one as no call."""


def check_operators(node: ast.AST) -> None:
    """Refuse an argument whose evaluation is more than arithmetic on numbers or joining of texts.

    The harness evaluates operators while it decodes a call, before it knows whether it will execute it.
    """
    inner = list(ast.walk(node))
    texts = any(isinstance(part, ast.Constant) and isinstance(part.value, str | bytes) for part in inner)
    operators = (ast.Add,) if texts else (ast.Add, ast.Sub, ast.Mult, ast.Div)  # "a" * 10**9 is memory, 9**9**9 time
    allowed = (ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, ast.Constant, *operators)
    if not all(isinstance(part, allowed) for part in inner):
        raise Unsafe(f"{ast.unparse(node)} is more than arithmetic")


def as_evaluated(call: str, namespace: Collection[str]) -> str:
    """Return the text that may be evaluated in place of a call that the harness has prepared.

    It is the call if that is a method of a simulator with literals as arguments. Otherwise it is the name that Python
    would look up first. It ends as the call would have, in the harness's report that it is not defined.

    Args:
        namespace: names that are defined at the evaluation.
    """
    try:
        node: ast.AST = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return call  # cannot be evaluated either
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        strange = [value for value in [*node.args, *(word.value for word in node.keywords)] if not _is_literal(value)]
        if not strange:
            return call
        node = strange[0]
    name = next((part.id for part in ast.walk(node) if isinstance(part, ast.Name)), _UNDEFINED)
    return _UNDEFINED if name in namespace or hasattr(builtins, name) else name


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


class Play:
    """Dialogue of one item, led by its harness."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.history: list[dict[str, Any]] = []
        self.calls = 0
        self._allowed = frozenset(allowed)

    def guard(self) -> None:
        """Install checks between the harness's decoder and its `eval`: only listed names and only values. Its files for
        readers are dropped.

        The harness treats a blocked call as text without a call, or as an unknown API.
        """
        from model_inference.multi_step import multi_step_utils
        from model_inference.multi_step.execution_role_step import EXECUTION_STEP
        from model_inference.multi_step.multi_step_scene import Mulit_Step_Scene
        from model_inference.multi_turn import multi_turn_utils
        from model_inference.multi_turn.APIModel_agent import APIAgent_turn
        from model_inference.multi_turn.execution_role import EXECUTION
        from model_inference.multi_turn.multi_turn_scene import Scene

        for role in (APIAgent_turn, EXECUTION, EXECUTION_STEP):
            role.resolve_ast_by_type = _checked(role.resolve_ast_by_type)
        for utilities in (multi_turn_utils, multi_step_utils):
            utilities._process_method_calls = self._only_listed(utilities._process_method_calls, vars(utilities))
        for scene in (Scene, Mulit_Step_Scene):
            scene.write_message_history = lambda *_: None
            scene.add_dialogue = self._recorded(scene.add_dialogue)

    def _recorded(self, original: Callable[..., None]) -> Callable[..., None]:
        def add(scene: Any, message: dict[str, Any]) -> None:
            original(scene, message)
            self.history = scene.dialogue_history

        return add

    def _only_listed(self, original: Callable[..., list[str]], namespace: Collection[str]) -> Callable[..., list[str]]:
        def process(call: str, methods: Mapping[str, list[str]]) -> list[str]:
            self.calls += 1
            known = {name: objects for name, objects in methods.items() if name in self._allowed}
            return [as_evaluated(ready, namespace) for ready in original(call, known)]

        return process


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(role: Any, value: ast.AST) -> Any:
        if isinstance(value, ast.BinOp | ast.Lambda):
            check_operators(value)
        return original(role, value)

    return resolve


def play(case: Mapping[str, Any], language: str, allowed: Sequence[str]) -> dict[str, Any]:
    """Run an item; asks `complete(role, messages)` for each completion.

    Args:
        case: the item in its file.
        language: `en` or `zh`.
        allowed: names of APIs that may be called.

    Returns:
        result: final states of the classes, as the harness would write them. process: the model's messages to the
        execution. history: {sender, recipient, message} of all messages. calls: decoded calls. failed: the harness's
        exception on the model's text, which would have ended its whole run; "" if none.
    """
    from model_inference.apimodel_inference import APIModelInference

    played = Play(allowed)
    played.guard()
    inference = APIModelInference(_POLICY, user_model=_USER, language=language)
    done: dict[str, Any] = {"result": [], "process": [], "failed": ""}
    try:
        result, process = inference.inference(case["question"], case["function"], "", "", case, case["id"])
        done["result"], done["process"] = json.loads(json.dumps([result, process]))  # as the harness keeps them
    except Exception as error:
        done["failed"] = f"{type(error).__name__}: {error}"
    return {**done, "history": played.history, "calls": played.calls}


def run(
    case: Mapping[str, Any], answer: Mapping[str, Any], category: str, language: str, allowed: Sequence[str]
) -> dict[str, Any]:
    """Play an item in a locked process and score it with the harness's `agent_eval`.

    Args:
        case, answer: the item and its gold as their files have them.
        category: the harness's own name, such as `agent_multi_step`.
        language, allowed: as in `play`.

    Returns:
        What `play` returns, but for `result` and `process`, and
        scores: `end_to_end` and `process` accuracy.
        errors: what the harness's checker reports.
    """
    confined = Confined(lambda: {"play": play})
    try:
        played = confined.call("play", case=case, language=language, allowed=allowed)
    except Died as died:
        played = {"result": [], "process": [], "history": [], "calls": 0, "failed": str(died)}
    else:
        confined.close()
    result, process = played.pop("result"), played.pop("process")
    if played["failed"]:
        return {**played, "scores": {"end_to_end": 0.0, "process": 0.0}, "errors": []}
    item = {"id": case["id"], "result": result, "process": process}
    return {**played, **_score(item, case, answer, category, language)}


def _score(
    item: Mapping[str, Any], case: Mapping[str, Any], answer: Mapping[str, Any], category: str, language: str
) -> dict[str, Any]:
    import eval_main

    # It writes its scores to files below the working directory.
    with tempfile.TemporaryDirectory(prefix="acebench-") as folder, contextlib.chdir(folder):
        eval_main.language = language
        eval_main.OUTPUT_PATH = f"./score_all/score_{language}/"
        scores = Path(eval_main.OUTPUT_PATH, _POLICY)
        scores.mkdir(parents=True)
        end_to_end, process = eval_main.agent_eval([item], [case], [answer], category, _POLICY)
        report = (scores / f"data_{category}_score.json").read_text(encoding="utf-8")
    wrong = [json.loads(line) for line in report.splitlines()[1:]]
    errors = [str(error) for entry in wrong for error in (entry["error"] or [entry["error_type"]])]
    return {"scores": {"end_to_end": end_to_end, "process": process}, "errors": errors}


if __name__ == "__main__":
    import_harness(sys.argv[2])
    require_confinement()
    serving.serve(sys.argv[1], lambda: {"run": run})
