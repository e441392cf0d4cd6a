"""Marks that several files of tests share."""

import pytest

# For a case that repeats what others show: in `make nightly` alone.
NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
