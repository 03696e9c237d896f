"""The documentation as a site: `python -m docs.site --to=DIR`."""
