"""Programs: `python -m launch.NAME --help`. Each parses its flags before it imports anything heavy."""

import os
import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module of `python -m launch.NAME`
    # It puts the current folder first, in which a `configs/` or `sandbox/` of the user's would be taken for ours.
    _root, _here = str(Path(__file__).resolve().parent.parent), os.getcwd()
    sys.path[:] = [_root, *(one for one in sys.path if one not in ("", _here, _root)), _here]
