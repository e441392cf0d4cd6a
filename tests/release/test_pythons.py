"""A release is tried with the Pythons that are found, and with one at least."""

from pathlib import Path

import pytest

from release import __main__ as command
from release.errors import ReleaseError

FOUND = {"3.11": Path("a"), "3.13": Path("b")}


def test_one_that_is_missing_is_refused():
  with pytest.raises(ReleaseError, match=r"Python 3\.12 is not here"):
    command._found(["3.11", "3.12"], FOUND, allow_missing=False)


def test_one_that_may_be_missing_is_named(capsys):
  wanted = ["3.11", "3.12", "3.13"]
  assert command._found(wanted, FOUND, allow_missing=True) == FOUND
  assert capsys.readouterr().out == "not here, and not tried: Python 3.12\n"


@pytest.mark.parametrize("allow_missing", [False, True])
def test_a_release_that_nothing_has_tried_is_none(allow_missing):
  with pytest.raises(ReleaseError, match=r"Python 3\.12"):
    command._found(["3.12"], FOUND, allow_missing=allow_missing)


def test_all_are_tried():
  assert command._found(["3.13"], FOUND, allow_missing=False) == {
    "3.13": Path("b")
  }
