"""For all tests: the CPU, also where libtpu is installed to compile for TPUs that are not there; programs are kept.
With JAX_PLATFORMS=cuda,cpu those that can be run on a GPU are, compiled as users have it (CONTRIBUTING.md).

Most of a short run's time is XLA's, and many tests, and the processes that they start, compile the same.
"""

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import scheduling
from selection import BUDGET, NIGHTLY, QUICK, SECONDS, is_quick, unlisted

# Its deadline of 200 ms for an example is by the clock: a busy machine would fail it.
hypothesis.settings.register_profile("day", deadline=None, max_examples=40)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no chip that two processes could want

_OLDER = [*map(int, version("jaxlib").split(".")[:3])] < [0, 11, 1]
"""Later ones have one kind of emitters, and end at a flag that they do not know."""
COMPILED_FAST = " ".join(
    [
        *(["--xla_cpu_use_fusion_emitters=false"] if _OLDER else []),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_prefer_vector_width=256",
    ]
)
"""XLA's older emitters where there are such, and none of LLVM's passes. Tests run a program once or twice, and most of
their time was the compiler's: an update of GRPO over a mesh took 24 processor seconds, now 9. As users have them
compiled, `tests/launch/test_quickstart.py` goes through all stages. And XLA's own width of vectors, which programs
change as they start: what one process compiled would be of no use to another."""

_compiled = pytest.StashKey[str]()
_errors = pytest.StashKey[int]()
_TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="Only the tests that tests/selection.py names.")
    parser.addoption("--nightly", action="store_true", help="Also the files in NIGHTLY and tests marked nightly.")


def pytest_configure(config: pytest.Config) -> None:
    """A folder for this run's processes, named before anything imports jax, which reads the names then.

    xdist's workers have it from the process that starts them. JAX reads again, and compiles, what is half written.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background, and all programs under test
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("nightly" if config.getoption("--nightly") else "day")
    config.stash[_errors] = os.dup(2)  # before tests' output is captured
    config.pluginmanager.register(scheduling, "scheduling")
    if not hasattr(config, "workerinput"):
        config.stash[_compiled] = tempfile.mkdtemp(prefix="astra-compiled-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[_compiled]
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        if "cuda" not in os.environ["JAX_PLATFORMS"].split(","):
            os.environ["XLA_FLAGS"] = f"{COMPILED_FAST} {os.environ.get('XLA_FLAGS', '')}".strip()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What kills the process is said where it is seen: absl's programs, which tests run here, have it said to what is
    standard error then, which is captured, and lost with the process."""
    faulthandler.enable(file=item.config.stash[_errors])


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """What JAX has compiled for a file is given up with it: no other one runs the same, and two workers held 11 GB."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of 7,000 tests is garbage yet, and looking for it took a worker 8 of 29 processor seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """All that is imported stays to the end, so no garbage collection need look through it; what JAX traces is many
    objects that stay for a while, and looking at them as often as Python does took 8 % of the processors."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which nothing is run: with `--quick` those outside `QUICK`, without `--nightly` those in
    `NIGHTLY`. A file that the command names is run."""
    if not collection_path.name.startswith("test_"):
        return None
    if config.getoption("--quick"):
        return True if _name(collection_path) not in QUICK else None
    return True if _name(collection_path) in NIGHTLY and not config.getoption("--nightly") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of `--quick`, or leave out those marked `nightly` whose file is not named. Start the longest
    files first, so that all workers finish together."""
    nightly = {item for item in items if item.get_closest_marker("nightly")}
    chosen = items
    if config.getoption("--quick"):
        slow = {item for item in items if item.get_closest_marker("slow")}
        by_day = [item for item in items if item not in nightly]
        chosen = [item for item in by_day if is_quick(f"{_name(item.path)}::{item.name}", item in slow)]
    elif not config.getoption("--nightly"):
        named = {(config.invocation_params.dir / one.partition("::")[0]).resolve() for one in config.args}
        chosen = [item for item in items if item not in nightly or item.path in named]
    if left_out := {*items} - {*chosen}:
        config.hook.pytest_deselected(items=[*left_out])
    items[:] = sorted(chosen, key=lambda item: -SECONDS.get(_name(item.path), 0.0))


def _name(path: Path) -> str:
    return path.relative_to(_TESTS).as_posix()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print which files were left out, and, for a run with several workers, what `SECONDS` lacks."""
    seconds: Counter[str] = Counter()
    for report in [one for reports in terminalreporter.stats.values() for one in reports if hasattr(one, "duration")]:
        seconds[_name(config.rootpath / report.nodeid.partition("::")[0])] += report.duration
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not config.getoption("--nightly") and not config.getoption("--quick"):
        left_out = f"{len(NIGHTLY)} files, and the tests marked nightly, were left out"
        terminalreporter.write_line(f"{left_out}; --nightly runs them, too")
        terminalreporter.write_line(
            f"the tests took {seconds.total():.0f} s of all workers, of {BUDGET:.0f} s that a day has"
        )
    if config.getoption("numprocesses", None) and (lines := unlisted(seconds)):
        terminalreporter.write_line(f"tests/selection.py: unless more ran here, SECONDS wants {', '.join(lines)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _compiled in config.stash:
        shutil.rmtree(config.stash[_compiled], ignore_errors=True)
