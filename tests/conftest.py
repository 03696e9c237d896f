"""For all tests: the CPU, also where libtpu is installed to compile for TPUs that are not there; programs are kept.

Most of a short run's time is XLA's, and many tests, and the processes that they start, compile the same.
"""

import os
import shutil
import tempfile

import hypothesis
import pytest

# Its deadline of 200 ms for an example is by the clock: a busy machine would fail it.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no chip that two processes could want

_compiled = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """A folder for this process and those it starts, named before anything imports jax, which reads the names then."""
    config.stash[_compiled] = tempfile.mkdtemp(prefix="astra-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[_compiled]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_compiled], ignore_errors=True)
