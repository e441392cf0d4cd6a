"""A real server that is attacked; see benchmarks/attacks.py."""

import pytest

from benchmarks import attacks

pytestmark = pytest.mark.processes
SMALL = ("scans of a JPEG", "comments of a GIF")


@pytest.mark.fault("many-pixels")
@pytest.mark.slow
def test_ordinary_requests_are_answered_under_attack(backbone_file):
  """A short one: the benchmark has more attacks, and takes a minute."""
  only = [f"--only={name}" for name in SMALL]
  options = ["--seconds=7", "--settle=1", f"--backbone={backbone_file}"]
  rows = attacks.main([*only, *options])
  assert [row["attack"] for row in rows] == list(SMALL)
  for row in rows:
    assert row["requests"] > 0
    assert set(row["answered"]) == {"422"}
    assert row["ordinary"] >= 2
    assert row["of status 200"] == row["ordinary"]
    assert row["slowest s"] < 5
  lines = attacks.table(rows).splitlines()
  assert len(lines) == 2 + len(SMALL)
  assert len({line.count("|") for line in lines}) == 1
