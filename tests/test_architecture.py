"""Layers: launch > configs > astra_jax > synthesis > sandbox > astra_jax/base. A layer imports only those below it.

A layer is made of packages: its folders, and the files at its top. The common ones are for all packages of their layer.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("launch", "configs", "astra_jax", "synthesis", "sandbox")
BASE = "astra_jax/base"
"""The layer below all others."""
FILES = sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
LONGEST = 80
"""Lines of a function, its docstring included."""
COMMON = {
    "astra_jax": (
        "base",
        "axes",
        "mesh",
        "cpu",
        "attention",
        "chat_files",
        "tokenizer",
        "models",
        "head",
        "pages",
        "run",
        "rollout",
    ),
    "synthesis": ("core", "pipeline"),
}
"""Packages that every package of their layer may use; of each other, those that stand before them."""
ALSO = {
    "astra_jax/grpo": ("evaluation",),  # held-out environments are evaluated as everywhere
    "astra_jax/planner": ("sft", "grpo"),  # the plan is the program: it compiles their steps
    "synthesis/pipeline": ("offline",),  # its module `demo` alone: see `test_the_demo_is_loaded_on_demand`
    "synthesis/trajectories": ("servers", "audit"),  # its agents call the first; rules of the second come before judges
    "synthesis/astra_format": ("environments",),  # an original's record is proven as one of ours is
    "synthesis/offline": ("trajectories", "environments"),  # it answers what both ask
}
FROM_SYNTHESIS = {
    # A solve rate stands beside the difficulty that the environment was made with.
    "astra_jax.evaluation.solve_rates": {"synthesis.environments.dependency_graph"},
}
"""What `astra_jax` imports of `synthesis` beside its common package `core`."""
PRIVATE = {
    # JAX shows nobody its coordination service, through which hosts learn of each other's end.
    "astra_jax/run/hosts.py": "jax._src.distributed",
}
"""A library's private module that a file needs."""


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """Its folder; of a file at the top of a layer, itself."""
    folder = MODULES[module].parent
    return ".".join(folder.parts) if len(folder.parts) > 1 else module


def layer_of(module: str) -> str:
    return BASE if top_package_of(module) == BASE else module.split(".")[0]


def top_package_of(module: str) -> str:
    """For example `synthesis/core`."""
    return "/".join(module.split(".")[:2])


Imports = tuple[ast.Import | ast.ImportFrom, ...]


@functools.cache
def statements(path: Path) -> Imports:
    """The imports of a file anywhere, also inside functions and for types alone. No expression holds one."""
    found: list[ast.Import | ast.ImportFrom] = []
    left: list[ast.AST] = [ast.parse((ROOT / path).read_text(encoding="utf-8"))]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.append(node)
            elif not isinstance(node, ast.expr):
                left.append(node)
    return tuple(found)


def imports(path: Path) -> set[str]:
    """Our modules that a file imports."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else node.module for name in names)
    return found & MODULES.keys()


@pytest.fixture(scope="module")
def imports_of() -> dict[str, set[str]]:
    """By module, the others of ours that it imports: read by the worker that runs these tests, not as they are
    collected."""
    return {module: imports(path) - {module} for module, path in MODULES.items()}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    names: set[str] = set()
    for node in statements(path.relative_to(ROOT)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        else:
            assert node.level == 0, f"{path}: write imports absolutely"
            names.add((node.module or "").split(".")[0])
    return names


def test_a_layer_imports_only_layers_below(imports_of) -> None:
    layers = (*LAYERS, BASE)
    wrong = {
        module: above
        for module, others in imports_of.items()
        if (above := {one for one in others if layers.index(layer_of(one)) < layers.index(layer_of(module))})
    }
    assert not wrong, "these import a layer above their own"


def check_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_modules_do_not_import_each_other_in_circles(imports_of) -> None:
    check_no_circle(imports_of)


def test_packages_do_not_import_each_other_in_circles(imports_of) -> None:
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module, others in imports_of.items():
        package = package_of(module)
        graph[package] |= {package_of(other) for other in others} - {package}
    check_no_circle(graph)


@pytest.mark.parametrize("layer", COMMON)
def test_a_package_imports_only_itself_and_common_packages(imports_of, layer: str) -> None:
    """So `trajectories` and `environments` do not import each other, nor do `sft` and `grpo`."""
    common = COMMON[layer]
    for module, others in imports_of.items():
        here = top_package_of(module)
        name = here.partition("/")[2]
        if module == layer or not here.startswith(f"{layer}/"):
            continue
        allowed = {name, "", *(common[: common.index(name)] if name in common else common), *ALSO.get(here, ())}
        for other in others:
            beside, _, package = top_package_of(other).partition("/")
            assert beside != layer or package in allowed, f"{module} imports {other}: {here} may use {sorted(allowed)}"


def test_training_imports_only_the_core_of_synthesis(imports_of) -> None:
    for module, others in imports_of.items():
        if module.startswith("astra_jax"):
            beside = {one for one in others if one.startswith("synthesis") and top_package_of(one) != "synthesis/core"}
            assert beside == FROM_SYNTHESIS.get(module, set()), module


DEMO = "synthesis.offline"
LOADS_DEMO = {"synthesis/pipeline/demo.py", "launch/flags/teachers.py", "launch/quickstart/stages.py"}
"""Files outside the demo that import it, in functions."""


def test_the_demo_is_loaded_on_demand(imports_of) -> None:
    """Facts and the offline teacher's rules are loaded where somebody asks for them."""
    outside = {module: others for module, others in imports_of.items() if not module.startswith(DEMO)}
    loading = {MODULES[one].as_posix() for one, others in outside.items() if any(o.startswith(DEMO) for o in others)}
    assert loading == LOADS_DEMO
    code = (
        "import sys, synthesis.trajectories.pipeline, synthesis.environments.pipeline, launch.trajectories\n"
        f"print(*(name for name in sys.modules if name.startswith({DEMO!r})))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == []


def test_the_top_of_launch_is_programs() -> None:
    """A newcomer lists it and sees what can be started; what programs share is in folders."""
    for path in (ROOT / "launch").iterdir():
        if path.is_file() and path.name not in ("__init__.py", "vllm_cpu.sh"):
            assert '__name__ == "__main__"' in path.read_text(encoding="utf-8"), f"{path.name} is no program"


def test_sft_loads_no_sandbox() -> None:
    code = "import sys, astra_jax.sft.train\nprint(*(name for name in sys.modules if name.startswith('sandbox')))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == []


@pytest.mark.parametrize("layer", ["synthesis", "sandbox", BASE])
def test_data_workers_need_no_jax(layer: str) -> None:
    forbidden = {"jax", "flax", "optax", "orbax", "torch", "transformers"}
    for path in (ROOT / layer).rglob("*.py"):
        assert not imported(path) & forbidden, f"{path} imports a training library; synthesis runs without one"


def test_the_sandbox_needs_nothing_but_the_standard_library() -> None:
    """Its HTTP service and client apart, which nothing else of it imports. That holds for what it uses of the base."""
    over_http = {
        "service.py": {"aiohttp", "prometheus_client"},
        "remote.py": {"aiohttp"},
        "fleet.py": set(),
    }
    for path in (ROOT / "sandbox").rglob("*.py"):
        outside = imported(path) - set(sys.stdlib_module_names) - {"sandbox", "astra_jax"}
        assert not outside - over_http.get(path.name, set()), f"{path} imports {outside}"
        if path.name not in over_http:
            text = path.read_text(encoding="utf-8")
            for module in (f"sandbox.{name.removesuffix('.py')}" for name in over_http):
                assert f"import {module}" not in text and f"from {module}" not in text
            for module in imports(path.relative_to(ROOT)):
                if module.startswith("astra_jax"):
                    used = imported(ROOT / MODULES[module]) - {"astra_jax"}
                    assert used <= set(sys.stdlib_module_names), f"{path} imports {module}, which imports {used}"


def test_no_library_is_used_behind_its_back() -> None:
    """Their private modules change without notice; the standard library's own, which slots need, are Python's."""
    for path in FILES:
        for node in statements(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                first, *inner = module.split(".")
                private = first not in sys.stdlib_module_names and any(one.startswith("_") for one in inner)
                assert not private or module == PRIVATE.get(path.as_posix()), f"{path} imports {module}"


def test_functions_stay_short() -> None:
    """A file may be as long as its subject asks for; a function that is longer than a page does several things."""
    longer = {
        f"{path}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in longer.items() if lines > LONGEST} == {}


def test_families_of_models_are_known_to_models_and_configs_alone() -> None:
    families = sorted(path.parent.name for path in (ROOT / "astra_jax" / "models").glob("*/presets.py"))
    assert families == ["llama", "qwen2", "qwen3"]
    for path in FILES:
        if path.parts[:2] != ("astra_jax", "models") and path.parts[0] != "configs":
            text = (ROOT / path).read_text(encoding="utf-8")
            found = [name for name in families if f"astra_jax.models.{name}" in text]
            assert not found, f"{path} knows the family {found[0]}; hold a `Model` instead"


def test_what_families_share_knows_none_of_them_and_they_not_each_other() -> None:
    models = ROOT / "astra_jax" / "models"
    families = sorted(path.parent.name for path in models.glob("*/presets.py"))
    for path in [*models.glob("*.py"), *models.glob("*/*.py")]:
        others = [name for name in families if name != path.parent.name]
        text = path.read_text(encoding="utf-8")
        found = [name for name in others if re.search(rf"import\b.*\b{name}\b|from astra_jax.models.{name}\b", text)]
        assert not found, f"{path} imports {found[0]}"


def test_no_test_imports_a_program() -> None:
    """Two programs with a flag of one name meet where two tests share a process; `benchmark_world.program` may."""
    flags = re.compile(r"^_[A-Z_]+ = (flags\.DEFINE_|number_flag\()", re.MULTILINE)
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "launch").glob("*.py")]
    programs = {f"{path.parent.name}.{path.stem}" for path in files if flags.search(path.read_text(encoding="utf-8"))}
    faults = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in statements(path.relative_to(ROOT)):
            if isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                names = {alias.name for alias in node.names}
            faults += [f"{path.name}: {name}" for name in names & programs]
    assert len(programs) > 30 and not faults, "import them by benchmark_world.program"


def test_importing_the_package_imports_no_jax() -> None:
    code = (
        "import sys, astra_jax.models.families, launch.flags.cli; assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
