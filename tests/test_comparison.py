"""The table of `benchmarks.comparison`, and what every library is given."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import ROOT

import memory_vit as mv
from benchmarks import comparison
from benchmarks.compared import memory_vit, rounds, setting

SETTING = setting.Setting(
  variant="Ti/16", image_size=8, batch=3, classes=2, cells=1, rank=1,
  tasks=(1, 4), rounds=1, threads=1,
)  # fmt: skip


def one(name, ratios, **more):
  return {
    "name": name, "version": "1", "runs_on": "here", "parameters": 1234,
    "file_bytes": 2048, "seconds_forward": 0.25, "original_difference": 0.0,
    "task_difference": 2e-7, "ratios": ratios, **more,
  }  # fmt: skip


def result(*libraries, **more):
  return {
    "date": "2026-01-31", "machine": "x86_64", "cores": 2,
    "setting": dataclasses.asdict(SETTING), "libraries": libraries, **more,
  }  # fmt: skip


def test_table_has_a_row_for_every_measure():
  found = comparison.table(
    [
      one("A", {"train": [1.0, 1.25, 1.5], "infer_1": [1, 1, 1]}),
      one(
        "B",
        {"train": [2, 2, 2], "infer_4_one_batch": [3, 4, 5]},
        original_difference_one_batch=1e-6,
      ),
    ],
    SETTING,
  ).split("\n")
  assert found[:2] == ["|  | A | B |", "|---|---|---|"]
  cells = [[c.strip() for c in line.split("|")[1:-1]] for line in found]
  rows = {name: values for name, *values in cells}
  assert rows["training step, one task"] == [
    "1.25 (1.00 to 1.50)", "2.00 (2.00 to 2.00)"
  ]  # fmt: skip
  assert rows["original and 1 task"] == ["1.00 (1.00 to 1.00)", ""]
  assert rows["4 tasks, in one batch"] == ["", "4.00 (3.00 to 5.00)"]
  assert "original and 4 tasks" not in rows
  assert rows["change of the original outputs"] == [
    "0 (same bits)", "0 (same bits), 1.0e-06"
  ]  # fmt: skip
  assert rows["change of a task by the others"] == ["2.0e-07", "2.0e-07"]
  assert rows["file of a task"] == ["2 KiB", "2 KiB"]


def test_all_libraries_get_the_same_images_and_labels(tmp_path):
  SETTING.write(tmp_path)
  assert setting.Setting.read(tmp_path) == SETTING
  images = setting.images(tmp_path)
  assert (images.shape, images.dtype) == ((3, 8, 8, 3), np.float32)
  assert np.abs(images).max() <= 1
  assert setting.labels(tmp_path).tolist() == [0, 1, 0]


def test_ratios_are_to_the_forward_pass():
  calls = []
  found = rounds.measure(
    {"forward": lambda: calls.append("f"), "train": lambda: calls.append("t")},
    rounds=2,
  )
  assert calls == ["f", "f", "t", "t", *"ftft"]
  assert found["ratios"]["forward"][1] == 1
  assert set(found["ratios"]) == {"forward", "train"}


def test_zero_difference_means_equal_bits():
  some = np.eye(2, dtype=np.float32)
  assert rounds.difference(some, some.copy()) == 0
  assert rounds.difference(some, some + np.float32(1e-9)) > 0


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_equal_outputs_for_all_images_are_refused(value):
  """Those of a head that is zero would be equal whatever is computed."""
  alike = np.full((3, 2), value, np.float32)
  with pytest.raises(ValueError, match="equal for all images"):
    rounds.difference(alike, alike)
  assert rounds.spread([alike, np.eye(3)]) == 0


@pytest.mark.slow
def test_every_task_is_drawn_independently():
  """One in the place of another is noticed, and a head of zeros is none."""
  backbone = mv.random_backbone(
    "Micro/2", image_size=8, num_classes=3, key=jax.random.key(0)
  )
  a, b = (memory_vit.random_task(backbone, SETTING, i).params for i in (0, 1))
  for name in ("cls", "memory"):
    assert (np.asarray(a[name]) != np.asarray(b[name])).all()
  kernels = [np.asarray(each["head"]["kernel"]) for each in (a, b)]
  assert kernels[0].all()
  assert (kernels[0] != kernels[1]).all()


def test_processes_are_merged_into_one_result():
  found = comparison.merged(
    [
      one("A", {"train": [0, mid, 9]}, task_difference=moved)
      for mid, moved in ((1.5, 0.0), (1.2, 1e-7), (1.3, 0.0))
    ]
  )
  assert found["ratios"] == {"train": [1.2, 1.3, 1.5]}
  assert found["task_difference"] == 1e-7
  assert [one["ratios"]["train"][1] for one in found["processes"]] == [
    1.5, 1.2, 1.3
  ]  # fmt: skip
  alone = one("A", {"train": [1, 2, 3]})
  assert comparison.merged([alone]) == alone


def test_figures_explain_their_brackets():
  some = one("A", {"train": [1, 2, 3]})
  for processes, expected in ((1, "quartiles"), (3, "Medians of 3 processes")):
    text = " ".join(comparison.figures(result(some, processes=processes)))
    assert expected in text
    assert "Measured on 2026-01-31, " in text


def test_figures_name_their_machine():
  some = one("A", {"train": [1, 2, 3]})
  text = " ".join(comparison.figures(result(some)))
  assert "with 2 cores (x86_64), 1 thread of PyTorch. " in text
  assert text.endswith("the time that passed.")
  found = result(some, python="3.12.1")
  found["setting"]["clock"] = "cpu"
  text = " ".join(comparison.figures(found))
  assert "1 thread of PyTorch, Python 3.12.1. " in text
  assert "time that the process computed, not" in text


def test_figures_of_a_page_are_replaced():
  begins, ends = "<!-- figures -->", "<!-- end of figures -->"
  found = result(one("A", {"train": [1, 2, 3]}))
  page = comparison.with_figures(f"a\n{begins}\nold\n{ends}\nb\n", found)
  assert "2.00 (1.00 to 3.00)" in page
  assert "old" not in page
  assert page.startswith(f"a\n{begins}\n\n| ")
  assert page.endswith(f"\n\n{ends}\nb\n")
  assert comparison.with_figures(page, found) == page


def test_page_has_the_stored_figures():
  """`--json` and `--page` write both."""
  docs = ROOT / "docs"
  stored = docs / "results" / "comparison" / "comparison.json"
  page = (docs / "reference" / "comparison.md").read_text(encoding="utf-8")
  assert page == comparison.with_figures(page, json.loads(stored.read_text()))


def test_summary_of_the_page_equals_its_figures():
  docs = ROOT / "docs"
  stored = docs / "results" / "comparison" / "comparison.json"
  here, *others = json.loads(stored.read_text())["libraries"]
  *one_a_pass, reproduction = others

  def of(library, key):
    return f"{library['ratios'][key][1]:.1f}"

  sixteen = [
    found[1]
    for library in one_a_pass
    for key, found in library["ratios"].items()
    if key.startswith("infer_16")
  ]
  steps = sorted(of(library, "train") for library in others)
  others_cost = (
    f"{steps[0]} to {steps[-1]} in the other libraries"
    if len({*steps}) > 1
    else f"{steps[0]} in each of the other libraries"
  )
  page = (docs / "reference" / "comparison.md").read_text(encoding="utf-8")
  (said,) = [block for block in page.split("\n\n") if "In short:" in block]
  said = " ".join(said.split())
  for expected in (
    f"sixteen tasks cost {of(here, 'infer_16')} passes here, "
    f"{of(reproduction, 'infer_16')} in the reproduction, and "
    f"{min(sixteen):.0f} to {max(sixteen):.0f} in the libraries",
    f"step costs {of(here, 'train')} passes here, or "
    f"{of(here, 'train_kept')} with cached keys and values, and {others_cost}",
  ):
    assert expected in said


def test_empty_results_replace_no_figures():
  page = "<!-- figures -->\nold\n<!-- end of figures -->\n"
  with pytest.raises(ValueError, match="no library was measured"):
    comparison.with_figures(page, result())


@pytest.mark.parametrize(
  "flag",
  ["--image_size", "--batch", "--cells", "--classes", "--rank", "--tasks",
   "--processes", "--rounds", "--threads"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "one"])
def test_counts_below_one_are_refused(monkeypatch, capsys, flag, value):
  monkeypatch.setattr(
    comparison, "_setting", lambda arguments: pytest.fail("it was accepted")
  )
  with pytest.raises(SystemExit):
    comparison.main([f"{flag}={value}"])
  assert "expected 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flag", "value", "message"),
  [
    ("--variant", "B/32", "invalid choice"),
    ("--json", "missing/out.json", "cannot be written"),
    ("--page", "none.md", "is no file"),
    ("--page", "README.md", "expected the lines"),
    ("--reproduction", "vit.py", "is no file"),
    ("--reproduction_python", "no-such-python", "is no program"),
  ],
)
def test_wrong_options_are_refused_before_measuring(
  monkeypatch, capsys, flag, value, message
):
  monkeypatch.chdir(ROOT)
  with pytest.raises(SystemExit):
    comparison.main([flag, value])
  assert message in capsys.readouterr().err


def test_paths_are_relative_to_the_current_directory(tmp_path, monkeypatch):
  """Libraries are measured in another directory."""
  (tmp_path / "vit.py").write_text("")
  monkeypatch.chdir(tmp_path)
  found = comparison._arguments(["--reproduction=vit.py", "--json=out.json"])
  assert found.reproduction == (tmp_path / "vit.py").resolve()
  assert found.json == (tmp_path / "out.json").resolve()
