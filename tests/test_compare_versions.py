"""The script that compares what two versions compute notices every change."""

import json

import compare_versions
import numpy as np


def write(folder, value=1.0, word="cat", line="b", extra=False):
  """A folder as the script writes them."""
  folder.mkdir()
  arrays = {"logits": np.array([0, value]), "labels": np.arange(2)}
  np.savez(folder / "arrays.npz", **arrays)
  values = {"a": [value, word], "none": {}}
  (folder / "values.json").write_text(json.dumps(values))
  (folder / "text.md").write_text(f"a\n{line}\n")
  if extra:
    (folder / "extra.txt").write_text("")
  return folder


def test_differences_are_named(tmp_path, capsys):
  before = write(tmp_path / "before")
  assert compare_versions.compare(before, write(tmp_path / "same")) == 0
  assert "3 of 3 files are equal to the bit" in capsys.readouterr().out
  for name, change, found in (
    (
      "number",
      {"value": 1.5},
      ["1 numbers, most /a/0 by 0.5", "logits by 0.5"],
    ),
    ("lost", {"value": np.nan}, ["logits by nan"]),
    ("word", {"word": "dog"}, ["/a/1 was 'cat', is 'dog'"]),
    ("line", {"line": "c"}, ["text.md: 1 lines, first 'b' is now 'c'"]),
    ("file", {"extra": True}, ["extra.txt: only in"]),
  ):
    changed = write(tmp_path / name, **change)
    assert compare_versions.compare(before, changed) == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in found), shown
  assert compare_versions.compare(tmp_path / "a", tmp_path / "b") == 1
