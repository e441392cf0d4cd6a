"""Tests of studies have the environment and the fixtures of all tests."""

# tests/conftest.py, whose folder is in the `pythonpath` of pyproject.toml.
from conftest import *  # noqa: F403
