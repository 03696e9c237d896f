"""The quickstart's model and GRPO, as a run of its own: `--config=launch/recipes/local/config.py`."""

from configs.quickstart import PROFILES
from configs.training import GRPORun

_quick = PROFILES["quick"]()
CONFIG = GRPORun(_quick.model, _quick.grpo)
