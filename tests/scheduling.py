"""Hooks of pytest for complete runs: a worker that dies costs its own test, and tests that were not run are counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

_not_run = pytest.StashKey[tuple[int, int]]()
"""Number of tests that were not run, and of all that were collected."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return pytest-xdist's scheduler by file, or None for another `--dist`.

    Faults of pytest-xdist 3.8 that this avoids: the next worker receives the test at which the last one died, and dies
    too; the replacement of a worker waits forever for a second test when it receives one alone; a crash while another
    replacement starts ends the run, and so does a file that is sent to a worker whose death is not yet known.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            """Send a worker its next file. One that has just died takes none: `remove_node` queues the file again."""
            with contextlib.suppress(OSError):
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            """Give a worker more work, unless it still collects tests: a replacement does, at any time."""
            if node in self.registered_collections:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Queue a worker's remaining tests for other workers. Return the test at which it died, if any."""
            remaining = {
                file: {test: False for test, is_complete in tests.items() if not is_complete}
                for file, tests in self.assigned_work.pop(node).items()
            }
            died_at = next((test for tests in remaining.values() for test in tests), None)
            for tests in remaining.values():
                tests.pop(died_at, None)
            self.workqueue.update({file: tests for file, tests in remaining.items() if tests})
            for other in self.nodes:
                self._reschedule(other)
            return died_at

        def schedule(self) -> None:
            """Give each worker a file, and a second one or the order to stop: until then it keeps its last test."""
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Count the tests that were collected and have no report, after the summary. A run with such tests fails."""
    try:
        return (yield)
    finally:
        config = session.config
        if not hasattr(config, "workerinput") and not config.getoption("collectonly"):
            stats = config.pluginmanager.getplugin("terminalreporter").stats.values()
            run = {report.nodeid for reports in stats for report in reports if isinstance(report, pytest.TestReport)}
            missing = session.testscollected - len(run)
            if missing > 0:
                config.stash[_not_run] = (missing, session.testscollected)
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the number of tests that were not run as the last line."""
    if _not_run in config.stash:
        missing, collected = config.stash[_not_run]
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"{missing} of {collected} tests were not run", red=True)
