"""Original outputs stay bitwise identical with the default flags of XLA.

The other tests switch off optimization in XLA; these start processes without
any flags.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from families import FAMILIES
from marks import NIGHTLY

COUNTS = [0, 1, 4, 16, 64]
# A batch that is no multiple of the width of vector units, and one that is.
ODD = {"width": 36, "depth": 2, "mlp_dim": 52, "num_heads": 3, "patch_size": 4,
       "image_size": 12}  # fmt: skip
EVEN = {"width": 128, "depth": 2, "mlp_dim": 256, "num_heads": 2,
        "patch_size": 4, "image_size": 16}  # fmt: skip


def assert_same(*settings):
  """Start a process with default flags, and read what it found."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  done = subprocess.run(
    [sys.executable, str(ROOT / "tests" / "same_bits.py"),
     json.dumps(settings)],
    cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  for (differ, compared), setting in zip(found, settings, strict=True):
    assert differ == [], setting
    assert compared >= 1 + 2 * len(setting["counts"]) - 1


@pytest.mark.processes
def test_tiny_backbones_give_the_same_bits():
  assert_same(
    {"shape": ODD, "dtype": "float32", "batch": 3, "counts": [0, 4],
     "jits": [4]},
    {"shape": EVEN, "dtype": "bfloat16", "batch": 1, "counts": [0, 4],
     "jits": []},
  )  # fmt: skip


@pytest.mark.processes
def test_every_family_gives_the_same_bits():
  """With and without tasks, and in one jit with all of them."""
  shape = {**ODD, "width": 24, "num_heads": 2}  # rope wants heads of 4, 8, ...
  assert_same(
    *(
      {"shape": shape, "family": family, "dtype": dtype, "batch": 3,
       "counts": [0, 1, count], "jits": [count] * (dtype == "float32")}
      for dtype, count in (("float32", 8), ("bfloat16", 16))
      for family in FAMILIES.values()
    )
  )  # fmt: skip


@pytest.mark.parametrize(
  ("shape", "dtype"),
  [
    pytest.param(ODD, "float32", marks=pytest.mark.slow),
    pytest.param(EVEN, "bfloat16", marks=NIGHTLY),
  ],
)
def test_every_number_of_tasks_gives_the_same_bits(shape, dtype):
  """Apart, and in one jit with all of the tasks."""
  assert_same(
    {"shape": shape, "dtype": dtype, "batch": 3, "counts": COUNTS, "jits": [4]}
  )


@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param("float32", marks=pytest.mark.slow),
    pytest.param("bfloat16", marks=NIGHTLY),
  ],
)
def test_real_weights_give_the_same_bits(data_dir, dtype):
  assert_same(
    {"file": str(data_dir / "vit_ti16_64.npz"), "dtype": dtype, "batch": 7,
     "counts": COUNTS, "jits": []}
  )  # fmt: skip
