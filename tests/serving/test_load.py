"""A real server under load, while its tasks change; see benchmarks/serve.py."""

import pytest

from benchmarks import serve


@pytest.mark.fault("changing-tasks")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_no_request_is_lost_and_no_answer_mixed(backbone_file, mixed):
  """Each answer is compared with `mv.forward` of the set that it names."""
  result = serve.main(
    [f"--backbone={backbone_file}", "--seconds=12", "--clients=4", "--tasks=2",
     *["--mixed"] * mixed]
  )  # fmt: skip
  assert result["requests"] >= 20
  assert result["checked"] >= result["images"]
  assert result["worst_difference"] <= 1e-5
  assert result["equal_to_the_bit"] > 0
  assert result["changes"] >= 5
  assert result["sets_seen"] >= 3
  if mixed:  # a set of heads alone, or without any, is another program
    return
  assert result["compilations"] == 0
  before, after = result["rss_mib"]
  assert after < 1.3 * before
