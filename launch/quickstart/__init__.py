"""The quickstart: `python -m launch.quickstart`. `stages` runs it, `ledger` stores results, `summary` and `report` show
them."""
