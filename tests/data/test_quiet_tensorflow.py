"""TensorFlow loads without a word, and nothing else is left out."""

import os

import pytest

from memory_vit.data.quiet_tensorflow import without_remarks

ABSL = (
  "WARNING: All log messages before absl::InitializeLog() is called are ..."
)
REMARKS = f"""{ABSL}
I0000 00:00:1795356133.734632    4658 cudart_stub.cc:31] Could not find cuda
E0000 00:00:1795356143.174137    4658 cuda_platform.cc:52] failed call to cuInit
""".encode()


def test_remarks_are_hidden_and_errors_are_shown(capfd):
  error = b"E0000 00:00:17.1 1 allocator.cc:1] out of memory\n"
  with without_remarks():
    os.write(2, REMARKS + error + REMARKS + b"other\n")
  assert capfd.readouterr().err.encode() == error + b"other\n"


def fail():
  with without_remarks():
    os.write(2, REMARKS + b"no such library\n")
    raise ImportError


def test_output_before_an_error_is_shown(capfd):
  with pytest.raises(ImportError):
    fail()
  os.write(2, b"behind\n")
  assert capfd.readouterr().err == "no such library\nbehind\n"
