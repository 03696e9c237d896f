"""The quickstart: `astra quickstart`. `stages` runs it, `ledger` stores results, `summary` and `report` show
them."""
