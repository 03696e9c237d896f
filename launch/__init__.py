"""Programs: `python -m launch.NAME --help`. Each parses its flags before it imports anything heavy."""
