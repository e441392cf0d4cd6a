"""A real server that is attacked; see attacks.py, small_requests.py."""

import pytest

from benchmarks import attacks, small_requests

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


@pytest.mark.fault("compiling-server", "growing-room")
@pytest.mark.slow
def test_small_requests_are_answered_while_a_server_compiles():
  """The benchmark compares times: here none is refused, and none is lost."""
  rows = small_requests.main(["--only=compiling", "--seconds=1"])
  assert [row["compiling"] for row in rows] == [
    "nothing", "after the start", "slots grow",
  ]  # fmt: skip
  assert all({*row["small requests"]} == {200} for row in rows)


@pytest.mark.fault("large-answer", "many-pixels")
@pytest.mark.slow
def test_small_requests_are_answered_under_attack():
  """The benchmark asserts no time here: this machine may be busy."""
  names = ("20,000 classes, the largest top", "100,000 labels",
           "32 interlaced PNGs")  # fmt: skip
  only = [f"--only={name}" for name in names]
  rows = small_requests.main([*only, "--seconds=3"])
  assert [row["attack"] for row in rows] == list(names)
  top, labels, pixels = (row["attackers"] for row in rows)
  assert set(top) == {422}
  assert set(labels) <= {413, 504}
  assert set(pixels) <= {200, 504}
  for row in rows:
    assert row["small requests"][200] > 0
