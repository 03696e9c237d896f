"""Setup of the plugin. Its version is read from the trainer, with which it is released."""

from pathlib import Path

from setuptools import setup

TRAINER = Path(__file__).resolve().parents[3] / "__init__.py"

setup(version=TRAINER.read_text().partition('\n__version__ = "')[2].partition('"')[0])
