"""The HTML page of an evaluation, and the index of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from memory_vit.evaluation.calibration import BINS
from memory_vit.evaluation.classification import Proportion
from memory_vit.evaluation.confusion import largest_confusions
from memory_vit.reports.document import (
  MISSING,
  data_uri,
  document,
  number,
  percent,
  plot,
  table,
)
from memory_vit.reports.markup import Html, element, joined
from memory_vit.reports.task_evaluation import Mistake, TaskEvaluation

# Rows of the tables on the page; the CSV files have all.
_MOST_CLASSES, _MOST_CONFUSIONS = 200, 10
# Pixels up to which an image is enlarged without smoothing, and lossless.
_SMALL = 64
_MEANINGS = {
  "top-1": "share of the examples whose most probable class is right. In "
  "brackets the 95 % Wilson score interval, for the examples as a sample of "
  "all: it says nothing of another training.",
  "top-5": "share whose class is among the five most probable.",
  "largest class": "the accuracy of always predicting the most frequent class.",
  "precision, recall, F1": "of a class: the share of its predictions that are "
  "right, the share of its examples that are found, and their harmonic mean.",
  "macro F1": "mean F1 over the classes that have examples or are predicted: "
  "rare classes count as much as frequent ones.",
  "balanced accuracy": "mean recall over the classes that have examples.",
  "log loss": "mean cross-entropy (negative log-likelihood) in nats: 0 is "
  "best.",
  "Brier score": "squared error of the probabilities, summed over the classes, "
  "mean over the examples: 0 is best, 2 worst.",
  "ECE": "expected calibration error: how far the confidence is from the "
  f"accuracy, in {BINS} bins of equal width, weighted by their examples.",
}


def report_page(
  evaluation: TaskEvaluation,
  plots: Mapping[str, bytes],
  images: np.ndarray,
) -> str:
  """The page of a task, with PNG files and the images of `read_mistakes`."""
  found = evaluation.metrics
  sections = {
    "confusions": ("Confusions", _confusions(evaluation, plots)),
    "calibration": ("Calibration", _calibration(evaluation, plots)),
    "classes": ("Classes", _classes(evaluation)),
  }
  if evaluation.shown_images:
    sections["mistakes"] = (
      "Most confident mistakes",
      _mistakes(evaluation, images),
    )
  links = [
    element("a", title, href=f"#{key}") for key, (title, _) in sections.items()
  ]
  content = [
    element("section", element("h2", title, id=key), *body)
    for key, (title, body) in sections.items()
  ]
  head = element(
    "p",
    f"{evaluation.data_shown}, {evaluation.split}: {found.examples:,} examples "
    f"of {len(evaluation.class_names):,} classes",
    class_="quiet",
  )
  return document(
    evaluation.task,
    joined(head, element("nav", *links)),
    element("main", *_problems(evaluation), _numbers(evaluation), *content),
    _about(evaluation),
  )


def index_page(evaluations: Sequence[TaskEvaluation]) -> str:
  """A page that links to those of several tasks."""
  rows = []
  for one in evaluations:
    found = one.metrics
    link = element("a", one.task, href=f"{one.task}/report.html")
    rows.append(
      (link, one.data_shown, one.split, f"{found.examples:,}",
       percent(found.top1.share), _interval(found.top1),
       percent(found.macro_f1), percent(found.calibration_error))
    )  # fmt: skip
  header = ("task", "data set", "split", "examples", "top-1", "95 % interval",
            "macro F1", "ECE")  # fmt: skip
  head = element("p", f"{len(evaluations)} tasks in one model", class_="quiet")
  problems = [
    element("p", f"{one.task}: {'; '.join(notes)}.", class_="bad")
    for one in evaluations
    if (notes := _notes(one))
  ]
  tasks = table(header, rows, names=(0, 1, 2), label="tasks")
  body = element("main", *problems, tasks)
  return document("Evaluation", head, body, _meanings())


def _notes(evaluation: TaskEvaluation) -> list[str]:
  """Problems of an evaluation in short; its own page says more."""
  found, alone, notes = evaluation.metrics, evaluation.alone, []
  if found.skipped:
    notes.append(f"{found.skipped:,} examples could not be read")
  if found.not_finite:
    notes.append(f"outputs for {found.not_finite:,} examples are not finite")
  if alone and not alone["verified"]:
    notes.append("not verified")
  return notes


def _interval(found: Proportion) -> str:
  return f"{100 * found.low:.1f} to {percent(found.high, 1)}"


def _problems(evaluation: TaskEvaluation) -> Iterable[Html]:
  """What a reader has to know before the numbers."""
  found, alone = evaluation.metrics, evaluation.alone
  if found.skipped:
    text = f"{found.skipped:,} examples could not be read, and do not count."
    yield element("p", text, class_="bad")
  if found.not_finite:
    yield element(
      "p",
      f"The outputs for {found.not_finite:,} examples are not finite numbers: "
      "they count as mistakes, and there is no loss.",
      class_="bad",
    )
  if alone:
    difference = alone["max_difference"]
    equal, verified = bool(alone["outputs_bit_equal"]), alone["verified"]
    shown = "not finite" if difference is None else f"{difference:.1e}"
    yield element(
      "p",
      f"Compared with the task alone: top-1 {percent(alone['accuracy'])}, "
      f"greatest difference of an output {shown} of the greatest output. The "
      "original outputs are equal to the bit to those of the plain ViT: "
      f"{'yes' if equal else 'NO'}. Verified: {'yes' if verified else 'NO'}.",
      class_="quiet" if verified else "bad",
    )


def _numbers(evaluation: TaskEvaluation) -> Html:
  found = evaluation.metrics
  values: list[tuple[str, str, str]] = [
    ("top-1", percent(found.top1.share), _interval(found.top1)),
  ]
  if found.top5:
    values.append(("top-5", percent(found.top5.share), _interval(found.top5)))
  values += [
    ("macro F1", percent(found.macro_f1), ""),
    ("balanced accuracy", percent(found.balanced_accuracy), ""),
    ("largest class", percent(found.majority), ""),
    ("log loss", number(found.loss), ""),
    ("Brier score", number(found.brier), ""),
    ("ECE", percent(found.calibration_error), ""),
    ("examples", f"{found.examples:,}", ""),
    ("skipped", f"{found.skipped:,}", ""),
  ]
  cards = [
    element(
      "div",
      element("dt", name),
      element("dd", value, element("small", more) if more else ""),
    )
    for name, value, more in values
  ]
  return joined(element("dl", *cards, class_="numbers"), _meanings())


def _confusions(
  evaluation: TaskEvaluation, plots: Mapping[str, bytes]
) -> list[Html]:
  names, support = evaluation.class_names, evaluation.classes.support
  largest = largest_confusions(evaluation.confusion, _MOST_CONFUSIONS)
  rows = [
    (
      names[one.label],
      names[one.predicted],
      f"{one.examples:,}",
      percent(one.examples / support[one.label], 1),
    )
    for one in largest
  ]
  header = ("class", "taken for", "examples", "of the class")
  figure = plot(plots["confusion_matrix"], "Confusion matrix")
  if not rows:
    return [figure, element("p", "There are no confusions.")]
  title = element("h3", f"The {len(rows)} largest")
  return [figure, title, table(header, rows, names=(0, 1), label="confusions")]


def _calibration(
  evaluation: TaskEvaluation, plots: Mapping[str, bytes]
) -> list[Html]:
  text = element(
    "p",
    "Is the model right as often as its confidence, the probability of the "
    "predicted class, says? Bars below the diagonal: it is too sure. The "
    "expected calibration error is "
    f"{percent(evaluation.metrics.calibration_error)}.",
  )
  return [text, plot(plots["calibration"], "Reliability diagram")]


def _classes(evaluation: TaskEvaluation) -> list[Html]:
  """Metrics of each class, the lowest F1 first."""
  classes, names = evaluation.classes, evaluation.class_names
  # NaN is sorted last.
  f1 = np.where(classes.support > 0, classes.f1, np.nan)
  order = np.argsort(f1, kind="stable")[:_MOST_CLASSES]
  taken = _most_taken_for(evaluation)
  worst = _worst_mistakes(evaluation)
  rows = [
    (
      names[i], f"{classes.support[i]:,}", percent(classes.precision[i], 1),
      percent(classes.recall[i], 1), percent(classes.f1[i], 1),
      taken.get(int(i), MISSING), worst.get(int(i), MISSING),
    )
    for i in order
  ]  # fmt: skip
  header = ("class", "examples", "precision", "recall", "F1",
            "most often taken for", "most confident mistake")  # fmt: skip
  left = len(names) - len(rows)
  note = f" {left:,} more are in per_class.csv." if left else ""
  return [
    element(
      "p",
      f"The lowest F1 comes first, classes without examples last.{note}",
      class_="quiet",
    ),
    table(header, rows, names=(0, 5, 6), label="classes"),
  ]


def _most_taken_for(evaluation: TaskEvaluation) -> dict[int, str]:
  """{class: the class that most of its examples are confused with}."""
  found: dict[int, str] = {}
  matrix = evaluation.confusion
  for one in largest_confusions(matrix, matrix.nnz):
    name = evaluation.class_names[one.predicted]
    found.setdefault(one.label, f"{name} ({one.examples:,})")
  return found


def _worst_mistakes(evaluation: TaskEvaluation) -> dict[int, str]:
  mistakes = evaluation.predictions.mistakes
  labels, first = np.unique(
    evaluation.predictions.label[mistakes], return_index=True
  )
  found = {}
  for label, place in zip(labels.tolist(), first.tolist(), strict=True):
    mistake = evaluation.mistake(int(mistakes[place]))
    share = percent(mistake.confidence, 1)
    found[label] = f"{mistake.predicted}, {share}, example {mistake.example}"
  return found


def _mistakes(evaluation: TaskEvaluation, images: np.ndarray) -> list[Html]:
  if not evaluation.mistakes:
    return [element("p", "There are no mistakes.")]
  shown = map(_mistake, evaluation.mistakes, images)
  return [
    element(
      "p", "Images as the model sees them: class, and what they are taken for.",
      class_="quiet",
    ),
    element("div", *shown, class_="sheet"),
  ]  # fmt: skip


def _mistake(mistake: Mistake, image: np.ndarray) -> Html:
  described = f"An image of {mistake.label}, taken for {mistake.predicted}"
  small = max(image.shape) <= _SMALL
  picture = element(
    "img", src=data_uri(image, "PNG" if small else "JPEG"), alt=described,
    class_="small" if small else "photo",
  )  # fmt: skip
  share = percent(mistake.confidence, 1)
  where = f"example {mistake.example:,}"
  # Directories are left out: the page may be sent to strangers.
  file = mistake.file.rpartition("/")[2]
  caption = element(
    "figcaption",
    element("strong", mistake.label),
    f"as {mistake.predicted}, {share}",
    element("small", f"{where}, {file}" if file else where),
  )
  return element("figure", picture, caption)


def _about(evaluation: TaskEvaluation) -> Html:
  backbone = evaluation.details["backbone"]
  text = (
    f"Made by memory_vit {evaluation.details['memory_vit']}, on a backbone "
    f"{backbone['variant']} in {backbone['dtype']}, fingerprint "
    f"{backbone['fingerprint'][:12]}. All numbers are in metrics.json beside "
    "this page, all predictions in predictions.csv and predictions.parquet."
  )
  return element("footer", element("p", text))


def _meanings() -> Html:
  entries = [
    joined(element("dt", name), element("dd", text))
    for name, text in _MEANINGS.items()
  ]
  return element(
    "details",
    element("summary", "What the numbers mean"),
    element("dl", *entries, class_="meanings"),
  )
