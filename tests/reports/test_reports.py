"""Reports: the files say what the predictions say, and strangers' names little.

What is written is read back, and all numbers are counted again.
"""

import base64
import csv
import dataclasses
import hashlib
import html.parser
import io
import json
import re
import shutil
import types
import weakref

import numpy as np
import pyarrow.parquet as pq
import pytest
import sklearn.metrics
from conftest import random_task, tiny_backbone
from fake_data import write_folder
from PIL import Image

from memory_vit import reports
from memory_vit.data import datasets
from memory_vit.data.data_files import DataFiles
from memory_vit.errors import (
  BrokenDataError,
  ConfigError,
  TaskError,
  TrainingError,
)
from memory_vit.evaluation import verify
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.reports import directory, page
from memory_vit.reports.class_page import ClassEvaluation
from memory_vit.reports.metrics_file import to_values

EVIL = "<script>document.title='hacked'</script>"
NAMES = (EVIL, "=cmd|' /C calc'!A0", "$\\frac{x", "a\nb\x1b[2J", "\udcff",
         '"><img src=x onerror=alert(1)>', "-7")  # fmt: skip
NO_PLOTS = {"confusion_matrix": b"", "calibration": b""}
FILES = {3: "@evil.jpg", 5: "b\udcff.jpg"}


def predictions_of(labels, guesses, classes=7, **changes):
  """Predictions in which the second guess is the class after the first."""
  rng = np.random.default_rng(0)
  n, k = len(labels), min(5, classes)
  top = (np.asarray(guesses)[:, None] + np.arange(k)) % classes
  shares = -np.sort(-rng.dirichlet(np.ones(classes + 1), n)[:, :k])
  found = SplitPredictions(
    num_classes=classes,
    label=np.asarray(labels, np.int32),
    counted=np.ones(n, bool),
    finite=np.ones(n, bool),
    top_classes=top.astype(np.int32),
    top_probabilities=shares.astype(np.float32),
    loss=rng.random(n).astype(np.float32),
    brier=rng.random(n).astype(np.float32),
    known_score=rng.normal(size=n).astype(np.float32),
  )
  return dataclasses.replace(found, **changes)


def images_of(numbers):
  """Each of one grey, to know it again by; (k, 8, 8, 3)."""
  grey = np.asarray(numbers, np.float32).reshape(-1, 1, 1, 1) / 64 - 1
  return np.broadcast_to(grey, (len(grey), 8, 8, 3))


def evaluation_of(predictions, task="digits", **options):
  return ClassEvaluation(
    **{
      "task": task, "data": "folder", "split": "test",
      "class_names": NAMES[: predictions.num_classes],
      "predictions": predictions, "read_images": images_of,
      "file_name": lambda i: FILES.get(i, ""), "shown_images": 4,
      "details": {
        "memory_vit": "1.2.3", "task": {"name": task},
        "backbone": {"variant": "Ti/16", "dtype": "float32",
                     "fingerprint": "f" * 64},
      },
      **options,
    }
  )  # fmt: skip


def page_of(evaluation):
  return page.report_page(evaluation, NO_PLOTS, evaluation.read_mistakes())


def usual():
  """40 examples; class 6 has none, one cannot be read, of one all is NaN."""
  rng = np.random.default_rng(1)
  labels = rng.integers(0, 6, 40)
  guesses = np.where(rng.random(40) < 0.6, labels, rng.integers(0, 7, 40))
  some = predictions_of(labels, guesses)
  some.counted[7] = some.finite[9] = False
  some.loss[9] = some.top_probabilities[9] = np.nan
  return some


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """The report of one task, and what it is of."""
  path = tmp_path_factory.mktemp("reports") / "report"
  evaluation = evaluation_of(usual())
  reports.write_reports(path, [evaluation])
  return path / "digits", evaluation


@pytest.fixture
def plain(monkeypatch):
  """Leaves the figures out, which take the most time."""
  monkeypatch.setattr(directory.task_figures, "figures", lambda *_: {})
  monkeypatch.setattr(
    page, "report_page", lambda evaluation, plots, images: evaluation.task
  )


def rows_of(file):
  with file.open(encoding="utf-8", newline="") as opened:
    return list(csv.DictReader(opened))


def test_report_has_all_files(written):
  path, _ = written
  assert {file.name for file in path.iterdir()} == {
    "report.html", "metrics.json", "per_class.csv", "confusion_matrix.csv",
    "predictions.csv", "predictions.parquet", "confusion_matrix.png",
    "calibration.png", "mistakes.png",
  }  # fmt: skip
  assert [file.name for file in path.parent.glob("*.*")] == ["report.json"]
  for file in path.glob("*.png"):
    with Image.open(file) as image:
      assert image.format == "PNG"
      assert min(image.size) > 200


def test_metrics_follow_from_the_predictions_that_are_written(written):
  path, evaluation = written
  table = pq.read_table(path / "predictions.parquet").to_pylist()
  found = json.loads((path / "metrics.json").read_text())
  metrics = found["metrics"]
  assert [row["example"] for row in table] == [i for i in range(40) if i != 7]
  assert (metrics["examples"], metrics["skipped"]) == (39, 1)
  assert metrics["not_finite"] == sum(r["top_indices"] is None for r in table)
  labels = [row["label_index"] for row in table]
  best = [(row["top_indices"] or [7])[0] for row in table]
  right = [row["correct"] for row in table]
  assert right == [a == b for a, b in zip(labels, best, strict=True)]
  assert metrics["top1"]["share"] == np.mean(right)
  in_top5 = [r["label_index"] in (r["top_indices"] or []) for r in table]
  assert metrics["top5"]["share"] == np.mean(in_top5)
  assert metrics["loss"] is metrics["brier"] is None
  f1 = sklearn.metrics.f1_score(
    labels, best, labels=[*{*labels, *best} - {7}], average="macro"
  )
  assert metrics["macro_f1"] == pytest.approx(f1)
  # The file holds no NaN, which JSON does not have.
  assert found["per_class"]["recall"][6] is None
  assert found["schema"] == 1
  assert found["data"] == {
    "name": "folder", "directory": "", "split": "test", "digest": None,
  }  # fmt: skip
  assert found["class_names"][4] == "\\xff"
  names = [row["label"] for row in table]
  assert names == [found["class_names"][label] for label in labels]


def test_csv_and_parquet_say_the_same(written):
  path, evaluation = written
  table = pq.read_table(path / "predictions.parquet").to_pylist()
  rows = rows_of(path / "predictions.csv")
  assert len(rows) == len(table)
  for row, expected in zip(rows, table, strict=True):
    assert int(row["example"]) == expected["example"]
    assert int(row["label_index"]) == expected["label_index"]
    assert row["correct"] == str(expected["correct"]).lower()
    if expected["top_indices"] is None:
      assert {row["loss"], row["top_index_1"], row["top_class_5"]} == {""}
      continue
    assert np.float32(row["loss"]) == np.float32(expected["loss"])
    indices = [int(row[f"top_index_{i}"]) for i in range(1, 6)]
    shares = [np.float32(row[f"top_probability_{i}"]) for i in range(1, 6)]
    assert indices == expected["top_indices"]
    assert shares == [np.float32(p) for p in expected["top_probabilities"]]
  assert table[3]["file"] == "@evil.jpg"
  assert table[5]["file"] == "b\\xff.jpg"
  assert table[0]["file"] is None


@pytest.mark.fault("report-text")
def test_no_spreadsheet_finds_a_formula(written):
  path, _ = written
  cells = [
    cell
    for file in path.glob("*.csv")
    for row in rows_of(file)
    for cell in row.values()
  ]
  assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
  assert not [cell for cell in cells if not cell.isprintable()]
  assert {"'=cmd|' /C calc'!A0", "'-7", "'@evil.jpg", "a\\nb\\x1b[2J"} <= {
    *cells
  }


def test_confusions_and_classes_are_counted(written):
  path, evaluation = written
  some = evaluation.predictions.predicted
  labels = evaluation.predictions.label
  best = evaluation.predictions.top_classes[:, 0]
  matrix = sklearn.metrics.confusion_matrix(
    labels[some], best[some], labels=range(7)
  )
  found, places = np.zeros((7, 7), int), []
  for row in rows_of(path / "confusion_matrix.csv"):
    place = int(row["label_index"]), int(row["predicted_index"])
    places.append(place)
    found[place] = row["examples"]
  assert places == sorted(places)
  np.testing.assert_array_equal(found, matrix)
  classes = rows_of(path / "per_class.csv")
  assert [int(row["predicted"]) for row in classes] == [*matrix.sum(0)]
  counted = evaluation.predictions.counted
  assert [int(row["support"]) for row in classes] == [
    *np.bincount(labels[counted], minlength=7)
  ]
  assert classes[6]["recall"] == ""
  # It is predicted, so its F1 is 0, and comes last though the lowest is first.
  assert classes[6]["f1"] == "0"
  page_text = (path / "report.html").read_text(encoding="utf-8")
  body = page_text[page_text.index('aria-label="classes"') :]
  shown = re.findall(r'<tr><td class="name">([^<]*)</td>', body)
  assert (len(shown), shown[-1]) == (7, NAMES[6])


class Page(html.parser.HTMLParser):
  """What a browser would make of a page."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self.style = [], [], "", ""
    self.meta = {}
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, *pair) for pair in attrs]
    values = dict(attrs)
    if tag == "meta" and "http-equiv" in values:
      self.meta[values["http-equiv"]] = values["content"]

  def handle_data(self, data):
    if self.tags[-1:] == ["style"] and not self.style:
      self.style = data
    else:
      self.text += data


@pytest.mark.fault("report-text")
def test_a_page_loads_nothing_and_runs_nothing(written):
  path, _ = written
  found = Page((path / "report.html").read_text(encoding="utf-8"))
  assert not {"script", "link", "iframe", "object", "base"} & {*found.tags}
  names = {name for _, name, _ in found.attributes}
  assert not [name for name in names if name.startswith("on")]
  assert "style" not in names
  for _, name, value in found.attributes:
    if name in ("src", "srcset", "href", "data", "action"):
      assert re.match(r"data:image/(png|jpeg);base64,|#\w+$", value)
  assert "url(" not in found.style
  assert "@import" not in found.style
  digest = hashlib.sha256(found.style.encode()).digest()
  policy = found.meta["Content-Security-Policy"]
  assert "default-src 'none'" in policy
  assert f"style-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
  assert found.tags.count("img") == 2 + 4
  for name in (EVIL, NAMES[5], "a\\nb\\x1b[2J"):
    assert name in found.text


def test_a_page_shows_the_mistakes_and_the_numbers(written):
  path, evaluation = written
  text = (path / "report.html").read_text(encoding="utf-8")
  sources = re.findall(r'src="data:image/png;base64,([^"]*)" alt="An', text)
  numbers = evaluation.predictions.mistakes[:4]
  confidence = evaluation.predictions.confidence
  wrong = evaluation.predictions.predicted & ~evaluation.predictions.correct
  assert confidence[numbers[0]] == confidence[wrong].max()
  assert [one.note for one in evaluation.mistakes] == [
    f"{100 * share:.1f} %" for share in confidence[numbers]
  ]
  for source, number in zip(sources, numbers, strict=True):
    with Image.open(io.BytesIO(base64.b64decode(source))) as image:
      grey = np.asarray(image)
    assert {*grey.ravel()} == {round(number / 64 * 127.5)}
  said = Page(text).text.replace("\u00a0", " ")
  found = evaluation.metrics
  assert f"{100 * found.top1.share:.2f} %" in said
  assert f"{100 * found.top1.low:.1f} to {100 * found.top1.high:.1f} %" in said
  assert f"{100 * found.macro_f1:.2f} %" in said
  assert "1 example could not be read" in said
  assert "outputs for 1 example are not finite" in said


def test_report_without_mistakes_and_of_one_class():
  right = evaluation_of(predictions_of([0, 1, 2], [0, 1, 2]))
  text = page_of(right)
  assert "There are no confusions." in text
  assert "There are no mistakes." in text
  one = predictions_of([0] * 5, [0] * 5, classes=1)
  found = to_values(evaluation_of(one))
  assert found["metrics"]["top1"]["share"] == 1
  assert found["per_class"]["f1"] == [1]
  assert found["metrics"]["top5"] is None


@pytest.mark.fault("non-finite-outputs")
def test_report_of_outputs_that_are_not_finite():
  none = predictions_of(
    [0, 1], [0, 1], finite=np.zeros(2, bool),
    top_probabilities=np.full((2, 5), np.nan, np.float32),
  )  # fmt: skip
  evaluation = evaluation_of(none)
  found = to_values(evaluation)
  assert found["metrics"]["top1"]["share"] == 0
  assert found["metrics"]["calibration_error"] is None
  json.dumps(found, allow_nan=False)
  text = page_of(evaluation)
  assert "nan" not in Page(text).text
  assert set(reports.figures(evaluation)) == {
    "confusion_matrix", "calibration", "mistakes",
  }  # fmt: skip


def test_a_comparison_with_the_task_alone_is_told():
  good = {"score": 0.5, "max_difference": 1e-7, "outputs_bit_equal": True}
  changes = (
    {}, {"outputs_bit_equal": False}, {"max_difference": None},
    {"max_difference": 1e-3},
  )  # fmt: skip
  said, kept = [], []
  for change in changes:
    alone = {**good, **change}
    alone["verified"] = verify.agrees(alone, "float32")
    one = evaluation_of(predictions_of([0, 1], [0, 2]), alone=alone)
    said.append(page_of(one))
    kept.append(to_values(one)["alone"]["verified"])
  assert "plain ViT: yes. Verified: yes" in said[0]
  assert "plain ViT: NO. Verified: NO" in said[1]
  assert "not finite" in said[2]
  # Finite, and more than rounding: not as it should be.
  assert "plain ViT: yes. Verified: NO" in said[3]
  assert kept == [True, False, False, False]
  assert ['<p class="bad">' in text for text in said] == [not k for k in kept]
  assert verify.agrees({**good, "max_difference": 1e-3}, "bfloat16")


def test_images_are_released_after_their_report(tmp_path, plain):
  """There may be many tasks: each is written, and let go.

  Of one task some are read at a time, and kept as thumbnails: 200 of 2,048
  pixels a side would take 10 GB.
  """
  alive = []

  def read(numbers):
    assert len(numbers) <= 8
    assert not [one for one in alive if one() is not None]
    images = np.zeros((len(numbers), 400, 400, 3), np.float32)
    alive.append(weakref.ref(images))
    return images

  tasks = [
    evaluation_of(usual(), task=name, read_images=read, shown_images=12)
    for name in "abc"
  ]
  reports.write_reports(tmp_path / "report", tasks)
  assert len(alive) == 3 * 2
  images = tasks[0].read_mistakes()
  assert (images.shape, images.dtype) == ((12, 320, 320, 3), np.uint8)


def test_a_sheet_holds_levels_and_no_floats():
  figure = reports.figures(evaluation_of(usual()))["mistakes"]
  kinds = {axes.images[0].get_array().dtype for axes in figure.axes}
  assert kinds == {np.dtype(np.uint8)}


@pytest.mark.fault("report-text")
def test_names_of_two_lines_are_escaped_before_titles_are_split():
  """A class named "a\\nb" is one line of a title, also among the mistakes."""
  labels = np.full(3, 3)
  evaluation = evaluation_of(predictions_of(labels, labels - 3))
  sheet = reports.figures(evaluation)["mistakes"]
  titles = [axes.get_title().split("\n") for axes in sheet.axes]
  assert {title[0] for title in titles} == {"a\\nb\\x1b[2J"}
  assert all(title[-1].endswith(" %") for title in titles)


def test_the_page_of_many_classes_has_the_worst_of_them():
  classes = 300
  labels = np.arange(classes).repeat(2)
  guesses = np.where((labels == 250) | (labels == 30), labels - 1, labels)
  evaluation = evaluation_of(
    predictions_of(labels, guesses, classes),
    class_names=tuple(f"class {i}." for i in range(classes)),
  )
  text = page_of(evaluation)
  body = text[text.index('aria-label="classes"') :]
  shown = re.findall(r'<tr><td class="name">(class \d+\.)', body)
  assert len(shown) == 200
  assert shown[:2] == ["class 30.", "class 250."]
  assert "100 more are in per_class.csv" in text


def test_several_tasks_have_an_index(tmp_path, plain):
  path = tmp_path / "report"
  tasks = [
    evaluation_of(predictions_of([0, 1], [0, 2]), task=name)
    for name in ("digits", "letters")
  ]
  reports.write_reports(path, tasks)
  found = Page((path / "index.html").read_text())
  links = [v for _, name, v in found.attributes if name == "href"]
  assert links == ["digits/report.html", "letters/report.html"]
  assert all((path / link).is_file() for link in links)
  assert reports.first_page(path) == path / "index.html"
  overview = json.loads((path / "report.json").read_text())
  assert [task["task"] for task in overview["tasks"]] == ["digits", "letters"]
  # The next one is of one task, and nothing of this is left.
  reports.write_reports(path, tasks[:1])
  assert {file.name for file in path.iterdir()} == {"digits", "report.json"}
  assert reports.first_page(path) == path / "digits" / "report.html"
  assert [file.name for file in tmp_path.iterdir()] == ["report"]


def test_an_index_names_the_tasks_with_problems():
  right = predictions_of([0, 1], [0, 1])
  alone = {"score": 1.0, "max_difference": 0.1, "outputs_bit_equal": True}
  tasks = [
    evaluation_of(usual(), task="spoiled"),
    evaluation_of(right, task="differs", alone={**alone, "verified": False}),
    evaluation_of(right, task="good", alone={**alone, "verified": True}),
  ]
  text = page.index_page(tasks)
  assert re.findall(r'<p class="bad">(.*?)</p>', text) == [
    "spoiled: 1 example could not be read; outputs for 1 example are not "
    "finite.",
    "differs: not verified.",
  ]


def test_impossible_sets_of_reports_are_refused(tmp_path):
  path, one = tmp_path / "report", evaluation_of(usual())
  for evaluations, message in (
    ([], "there is no evaluation"),
    ([one, one], "several evaluations have the task name 'digits'"),
    (
      [evaluation_of(usual(), task="../../out")],
      "task '../../out', which is not a valid name: expected 1 to 64",
    ),
  ):
    with pytest.raises(ConfigError, match=message):
      reports.write_reports(path, evaluations)
  with pytest.raises(ConfigError, match="holds no report"):
    reports.first_page(path)
  assert not [*tmp_path.iterdir()]


def test_a_path_may_be_text(tmp_path, plain):
  path = str(tmp_path / "report")
  reports.write_reports(path, [evaluation_of(usual())])
  assert str(reports.first_page(path)) == f"{path}/digits/report.html"


def folder_evaluation(root):
  """Of a task on the test split of an image folder."""
  reader = datasets.open_split("folder", "test", str(root))
  task = random_task(
    tiny_backbone(depth=1), "t", classes=2, class_names=("a", "b")
  )
  found = predictions_of([0, 1], [0, 1], 2)
  return reports.TaskEvaluation.of(task, reader, found)


def test_reports_of_folders_have_their_names(tmp_path):
  """By the name of the directory, for people, and by its files."""
  files = {f"{s}/{c}": ["1.png"] for s in ("train", "test") for c in "ab"}
  for name in ("cats", "dogs"):
    write_folder(tmp_path / name, files)
  shutil.copytree(tmp_path / "cats", tmp_path / "copy" / "cats")
  picture = next((tmp_path / "dogs" / "test").rglob("*.png"))
  picture.write_bytes(picture.read_bytes() + b"more")
  cats, dogs, copy = (
    folder_evaluation(tmp_path / name) for name in ("cats", "dogs", "copy/cats")
  )
  values = [to_values(one)["data"] for one in (cats, dogs, copy)]
  assert [found["directory"] for found in values] == ["cats", "dogs", "cats"]
  assert values[0]["digest"] == values[2]["digest"] != values[1]["digest"]
  assert len(values[0]["digest"]) == 64
  index = page.index_page([cats, dogs])
  rows = re.findall(r'<td class="name">(folder \w+)</td>', index)
  assert rows == ["folder cats", "folder dogs"]
  text = page_of(cats)
  assert "folder cats, test: 2 examples" in text
  assert str(tmp_path) not in text + index


@pytest.mark.slow
def test_equal_evaluations_have_equal_files(tmp_path):
  for name in ("a", "b"):
    reports.write_reports(
      tmp_path / name, [evaluation_of(usual(), shown_images=1)]
    )
  for file in (tmp_path / "a" / "digits").iterdir():
    other = tmp_path / "b" / "digits" / file.name
    assert file.read_bytes() == other.read_bytes(), file.name


@pytest.mark.fault("report-directory")
@pytest.mark.parametrize("strange", ["notes.txt", "digits/notes.txt"])
def test_foreign_directory_is_refused(tmp_path, plain, strange):
  path = tmp_path / "report"
  reports.write_reports(path, [evaluation_of(usual())])
  assert directory.REPORT.require_own(str(path)) == path
  (path / strange).write_text("mine")
  with pytest.raises(ConfigError, match=r"--report .* unknown files"):
    directory.REPORT.require_own(str(path))
  # It came while the evaluation ran, which must not be in vain.
  with pytest.raises(TrainingError, match="holds unknown files"):
    reports.write_reports(path, [evaluation_of(usual(), task="letters")])
  assert (path / strange).exists()
  assert (path / "digits" / "metrics.json").exists()
  (kept,) = tmp_path.glob("report.new-*")
  assert (kept / "letters" / "metrics.json").exists()


def test_directories_that_are_no_reports_are_refused(tmp_path):
  (tmp_path / "file").write_text("mine")
  (tmp_path / "damaged").mkdir()
  (tmp_path / "damaged" / "report.json").write_text('{"tasks": [{}]}')
  (tmp_path / "home").mkdir()
  (tmp_path / "home" / "index.html").write_text("mine")
  for name in ("file", "damaged", "home"):
    with pytest.raises(ConfigError, match="unknown files"):
      directory.REPORT.require_own(str(tmp_path / name))
  with pytest.raises(ConfigError, match="--report is ''"):
    directory.REPORT.require_own("")
  (tmp_path / "empty").mkdir()
  for name in ("empty", "new/one"):
    assert directory.REPORT.require_own(str(tmp_path / name)) == tmp_path / name


@pytest.mark.fault("unfinished-report")
def test_failed_report_leaves_the_earlier_one(tmp_path, plain, monkeypatch):
  path = tmp_path / "report"
  reports.write_reports(path, [evaluation_of(predictions_of([0, 1], [0, 2]))])
  before = {f: f.read_bytes() for f in path.rglob("*.*")}

  def full(*arguments):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(directory.files, "write_json", full)
  with pytest.raises(TrainingError, match="No space left"):
    reports.write_reports(path, [evaluation_of(usual())])
  assert {f: f.read_bytes() for f in path.rglob("*.*")} == before
  assert [file.name for file in tmp_path.iterdir()] == ["report"]


def test_missing_image_leaves_no_report(tmp_path):
  def gone(numbers):
    raise BrokenDataError("example 3 cannot be read")

  with pytest.raises(BrokenDataError, match="example 3"):
    reports.write_reports(
      tmp_path / "report", [evaluation_of(usual(), read_images=gone)]
    )
  assert [*tmp_path.iterdir()] == []


def test_link_to_a_report_directory_is_kept(tmp_path, plain):
  (tmp_path / "real").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "real")
  reports.write_reports(tmp_path / "link", [evaluation_of(usual())])
  assert (tmp_path / "link").is_symlink()
  assert (tmp_path / "real" / "digits" / "metrics.json").is_file()


def test_report_without_images_reads_none():
  """Also none is read: they may be nobody else's business."""
  evaluation = evaluation_of(usual(), shown_images=0, read_images=None)
  assert set(reports.figures(evaluation)) == {"confusion_matrix", "calibration"}
  text = page_of(evaluation)
  assert "confident mistakes" not in text
  assert Page(text).tags.count("img") == 2


def reader_of(*class_names):
  """A split of embeddings."""
  return types.SimpleNamespace(
    embedded=object(), file_name=str, data_files=DataFiles(), directory="",
    name="embeddings", full_name="embeddings", split="test",
    class_names=class_names, num_classes=len(class_names), kind="classes",
  )  # fmt: skip


def test_other_classes_are_refused():
  backbone = tiny_backbone(depth=1)
  named = random_task(backbone, "t", classes=2, class_names=("a", "c"))
  nameless = random_task(backbone, "t", classes=2)
  two, three = (predictions_of([0], [1], classes) for classes in (2, 3))
  for task, reader, predictions, message in (
    (named, reader_of("a", "b"), two, "has 2 classes .a, c, "),
    (
      nameless,
      reader_of("a", "b", "c"),
      two,
      "'embeddings' has 3 classes: expected",
    ),
    (nameless, reader_of("a", "b"), three, "the predictions have 3"),
  ):
    with pytest.raises(TaskError, match=message):
      reports.TaskEvaluation.of(task, reader, predictions)


def test_embeddings_have_no_images():
  reader = reader_of("a", "b")
  task = random_task(tiny_backbone(depth=1), "t", classes=2)
  found = reports.TaskEvaluation.of(task, reader, predictions_of([0], [1], 2))
  assert found.shown_images == 0
  assert found.details["task"]["digest"] == task.digest
