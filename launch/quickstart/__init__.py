"""The main job: `python -m launch.quickstart`. `stages` runs it, `ledger` remembers, `summary` and `report` tell."""
