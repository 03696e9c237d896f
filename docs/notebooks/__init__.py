"""Notebooks that are pages of the documentation, and what runs them without Jupyter."""
