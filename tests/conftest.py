"""For all tests: the CPU, also where libtpu is installed to compile for TPUs that are not there."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
