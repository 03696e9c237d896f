"""Llama and what is made like it: `presets` are sizes, and read and write `config.json`; `names` is the table."""
