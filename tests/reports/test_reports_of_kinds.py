"""Reports of labels and values: the files say what the predictions say."""

import csv
import dataclasses
import html
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import random_task, tiny_backbone
from fake_data import numbered_source
from kinds_of_tasks import of_outputs
from PIL import Image

import memory_vit as mv
from memory_vit import reports
from memory_vit.errors import TaskError
from memory_vit.reports import directory, page, tables
from memory_vit.reports.label_page import LabelEvaluation
from memory_vit.reports.metrics_file import to_values
from memory_vit.reports.value_page import ValueEvaluation

EVIL = "<script>alert(1)</script>"
LABELS = mv.TaskKind(name="labels", thresholds=(0.4, 0.5, 0.5))
VALUES = mv.TaskKind(
  name="values", mean=(10, 0, 0), std=(5, 1, 1), units=("mm", "", "°")
)
# Probabilities of the first are above 1/2 for outputs above 0; an example could
# not be read, and outputs for one are no numbers.
OUTPUTS = np.array(
  [[2, -2, -3], [-0.2, 1, -3], [9, 9, 9], [-2, -1, 3], [np.nan, 0, 0]],
  np.float32,
)
HAS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]])
RIGHT = np.array([[18, -2, 0], [9, 1, 0], [0, 0, 0], [1, 0, 0], [2, 5, 0]])
COUNTED = np.array([1, 1, 0, 1, 1], np.float32)


def images_of(numbers):
  grey = np.asarray(numbers, np.float32).reshape(-1, 1, 1, 1) / 64 - 1
  return np.broadcast_to(grey, (len(grey), 8, 8, 3))


def evaluation_of(kind, **options):
  made, rows = (
    (LabelEvaluation, HAS)
    if kind.name == "labels"
    else (ValueEvaluation, RIGHT)
  )
  outputs = options.pop("outputs", OUTPUTS)
  rows = options.pop("rows", rows)
  return made(
    **{
      "task": kind.name, "data": "list", "split": "test",
      "class_names": (EVIL, "=b", "c\nd"),
      "predictions": of_outputs(
        kind, outputs, rows.astype(np.float32), COUNTED
      ),
      "read_images": images_of, "file_name": lambda i: f"{i}.jpg",
      "details": {
        "memory_vit": "1", "task": {"name": kind.name},
        "backbone": {"variant": "Ti/16", "dtype": "float32",
                     "fingerprint": "f" * 64},
      },
      **options,
    }
  )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp("kinds") / "report"
  finite = np.nan_to_num(OUTPUTS)
  tasks = [evaluation_of(LABELS), evaluation_of(VALUES, outputs=finite)]
  reports.write_reports(path, tasks)
  return path, tasks


def rows_of(file):
  with file.open(encoding="utf-8", newline="") as opened:
    return list(csv.DictReader(opened))


def test_report_of_labels_and_values_has_all_files(written):
  path, _ = written
  both = {"report.html", "metrics.json", "predictions.csv",
          "predictions.parquet", "mistakes.png"}  # fmt: skip
  own = {
    "labels": {"per_label.csv", "calibration.png", "precision_recall.png"},
    "values": {"per_value.csv", "scatter.png"},
  }
  for kind, files in own.items():
    folder = path / kind
    assert {file.name for file in folder.iterdir()} == both | files
    for file in folder.glob("*.png"):
      with Image.open(file) as image:
        assert min(image.size) > 200
  assert directory.REPORT.require_own(str(path)) == path
  overview = json.loads((path / "report.json").read_text())
  assert [task["kind"] for task in overview["tasks"]] == ["labels", "values"]


def test_predictions_of_labels(written):
  path, tasks = written
  rows = pq.read_table(path / "labels" / "predictions.parquet").to_pylist()
  assert [row["example"] for row in rows] == [0, 1, 3, 4]
  assert [row["labels"] for row in rows] == [[EVIL], ["=b"], [EVIL], [EVIL]]
  # The sigmoid of -0.2 is 0.45, above the first threshold.
  assert [row["predicted"] for row in rows] == [
    [EVIL], [EVIL, "=b"], ["c\nd"], None
  ]  # fmt: skip
  sigmoid = 1 / (1 + np.exp(-OUTPUTS))
  np.testing.assert_allclose(rows[1]["probabilities"], sigmoid[1], rtol=1e-6)
  assert rows[3]["probabilities"] is None
  cells = rows_of(path / "labels" / "predictions.csv")
  assert [row["labels"] for row in cells][:2] == [EVIL, "'=b"]
  assert [row["predicted"] for row in cells] == [
    EVIL, f"{EVIL}|=b", "c\\nd", ""
  ]  # fmt: skip
  assert float(cells[1]["probability: =b"]) == pytest.approx(sigmoid[1, 1])
  assert cells[3]["probability: c\\nd"] == ""


def test_metrics_of_labels(written):
  path, _ = written
  found = json.loads((path / "labels" / "metrics.json").read_text())
  each = found["per_class"]
  assert each["support"] == [3, 1, 0]
  assert each["predicted"] == [2, 1, 1]
  assert each["precision"] == [0.5, 1, 0]
  assert each["recall"] == [pytest.approx(1 / 3), 1, None]
  assert each["f1"] == [pytest.approx(0.4), 1, 0]
  # Precision from above: 1 (1/3), 1/2, 2/3 (2/3), 3/4 (1).
  first = (1 + 2 / 3 + 3 / 4) / 3
  assert each["average_precision"] == [pytest.approx(first), 1, None]
  assert each["threshold"] == [0.4, 0.5, 0.5]
  metrics = found["metrics"]
  assert metrics["map"] == pytest.approx((first + 1) / 2)
  assert (metrics["examples"], metrics["skipped"]) == (4, 1)
  assert metrics["not_finite"] == 1
  assert metrics["loss"] is metrics["calibration_error"] is None
  assert sum(found["calibration"]["count"]) == 3 * 3
  rows = rows_of(path / "labels" / "per_label.csv")
  assert [row["label"] for row in rows] == [EVIL, "'=b", "c\\nd"]
  assert [row["recall"] for row in rows][1:] == ["1", ""]
  assert rows[0]["threshold"] == "0.4"


def test_predictions_and_metrics_of_values(written):
  path, _ = written
  folder = path / "values"
  rows = pq.read_table(folder / "predictions.parquet").to_pylist()
  assert [row["value"][0] for row in rows] == [18, 9, 1, 2]
  found = [row["predicted"][0] for row in rows]
  assert found == [20, 9, 0, 10]  # 10 + 5 * output
  cells = rows_of(folder / "predictions.csv")
  assert [float(row[f"value: {EVIL}"]) for row in cells] == [18, 9, 1, 2]
  assert [float(row[f"predicted: {EVIL}"]) for row in cells] == found
  metrics = json.loads((folder / "metrics.json").read_text())
  assert metrics["per_class"]["mae"][0] == pytest.approx((2 + 0 + 1 + 8) / 4)
  assert metrics["per_class"]["r2"][2] is None  # all the same
  assert metrics["calibration"] is None
  rows = rows_of(folder / "per_value.csv")
  assert [row["unit"] for row in rows] == ["mm", "", "°"]
  assert float(rows[0]["rmse"]) == pytest.approx(np.sqrt(69 / 4))
  # Of one whose outputs are no numbers.
  none = evaluation_of(VALUES)
  assert to_values(none)["metrics"]["r2"] is None
  json.dumps(to_values(none), allow_nan=False)
  assert "there are no metrics" in page.report_page(
    none, {"scatter": b""}, none.read_mistakes()
  )


def test_pages_of_labels_and_values(written):
  path, tasks = written
  for task in tasks:
    text = (path / task.kind / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r">[^<]*\bnan\b", text)
  # Five standard deviations, then three of the third value, by number.
  assert [one.example for one in tasks[1].mistakes] == [4, 0, 1, 3]
  worst = tasks[1].mistakes[0]
  assert (worst.label, worst.predicted, worst.note) == ("=b 5", "0", "error -5")
  # The third label of the fourth example: 0.95 for one that it has not.
  first, second = tasks[0].mistakes
  assert (first.example, second.example) == (3, 1)
  assert (first.label, first.predicted) == (EVIL, "c\nd")
  assert first.note == "c\nd 95.3 %"
  text = (path / "index.html").read_text(encoding="utf-8")
  assert text.count("<table>") == 2
  one = evaluation_of(
    mv.TaskKind(name="values", mean=(0,), std=(1,)), class_names=("a",),
    outputs=OUTPUTS[:, :1], rows=RIGHT[:, :1],
  )  # fmt: skip
  assert "4 examples of 1 value<" in page.report_page(
    one, {"scatter": b""}, one.read_mistakes()
  )
  assert "labels: 1 example could not be read; outputs for 1 example" in text


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a", "\n", "\\n")])
@pytest.mark.parametrize("kind", [LABELS, VALUES])
def test_labels_of_one_name_keep_their_columns(tmp_path, kind, names):
  evaluation = evaluation_of(kind, class_names=names)
  tables.write_tables(tmp_path, evaluation)
  [row, *_] = rows_of(tmp_path / "predictions.csv")
  kept = [key for key in row if ":" in key]
  sets = ["probability"] if kind.name == "labels" else ["value", "predicted"]
  assert kept == [f"{what}: {i}" for what in sets for i in range(3)]


def test_the_lowest_average_precision_comes_first(written):
  path, _ = written
  text = (path / "labels" / "report.html").read_text(encoding="utf-8")
  body = text[text.index('aria-label="labels"') :]
  shown = re.findall(r'<tr><td class="name">([^<]*)</td>', body)
  assert shown == [html.escape(EVIL), "=b", "c\\nd"]


def test_means_over_several_units_have_none(written):
  path, _ = written
  text = (path / "values" / "report.html").read_text(encoding="utf-8")
  assert re.search(r"MAE</dt><dd>[\d.]+</dd>", text)
  kind = dataclasses.replace(VALUES, units=("mm",) * 3)
  one = evaluation_of(kind, outputs=np.nan_to_num(OUTPUTS))
  text = page.report_page(one, {"scatter": b""}, one.read_mistakes())
  assert re.search(r"MAE</dt><dd>[\d.]+.mm</dd>", text)


def test_an_evaluation_is_of_the_kind_of_its_task():
  names = ("a", "b", "c")
  task = random_task(
    tiny_backbone(depth=1), "t", classes=3, kind=LABELS, class_names=names
  )
  split = dataclasses.replace(
    numbered_source(5), class_names=names, kind="labels"
  )
  predictions = evaluation_of(LABELS).predictions
  found = reports.TaskEvaluation.of(task, split, predictions)
  assert isinstance(found, LabelEvaluation)
  assert found.details["task"]["kind"]["thresholds"] == LABELS.thresholds
  values = dataclasses.replace(split, kind="values")
  with pytest.raises(TaskError, match=r"3 labels \(a, b, c.*has 3 values"):
    reports.TaskEvaluation.of(task, values, predictions)
