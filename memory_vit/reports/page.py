"""HTML page of an evaluation, and index page of several evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from memory_vit.kinds import KINDS
from memory_vit.reports.document import (
  data_uri,
  document,
  table,
)
from memory_vit.reports.markup import Html, element, joined
from memory_vit.reports.task_evaluation import Mistake, TaskEvaluation
from memory_vit.runtime.messages import counted

# Maximum side in pixels of images that are stored as PNG and enlarged without
# smoothing.
_SMALL = 64


def report_page(
  evaluation: TaskEvaluation,
  plots: Mapping[str, bytes],
  images: np.ndarray,
) -> str:
  """Return the page of a task, from PNG plots and the images of mistakes."""
  sections = evaluation.sections(plots)
  if evaluation.shown_images:
    sections["mistakes"] = (
      evaluation.worst_title,
      _mistakes(evaluation, images),
    )
  links = [
    element("a", title, href=f"#{key}") for key, (title, _) in sections.items()
  ]
  content = [
    element("section", element("h2", title, id=key), *body)
    for key, (title, body) in sections.items()
  ]
  outputs = len(evaluation.class_names)
  head = element(
    "p",
    f"{evaluation.data_shown}, {evaluation.split}: "
    f"{counted(evaluation.summary['examples'], 'example')} of {outputs:,} "
    f"{evaluation.noun if outputs == 1 else evaluation.kind}",
    class_="quiet",
  )
  return document(
    evaluation.task,
    joined(head, element("nav", *links)),
    element("main", *_problems(evaluation), _numbers(evaluation), *content),
    _about(evaluation),
  )


def index_page(evaluations: Sequence[TaskEvaluation]) -> str:
  """Return a page that links to the pages of several tasks."""
  head = element("p", f"{len(evaluations)} tasks in one model", class_="quiet")
  problems = [
    element("p", f"{evaluation.task}: {'; '.join(notes)}.", class_="bad")
    for evaluation in evaluations
    if (notes := _notes(evaluation))
  ]
  body = []
  for kind in KINDS:
    of_kind = [task for task in evaluations if task.kind == kind]
    if of_kind:
      body += [_tasks(of_kind), _meanings(of_kind[0])]
  return document("Evaluation", head, element("main", *problems, *body))


def _tasks(evaluations: Sequence[TaskEvaluation]) -> Html:
  """Return a table of tasks of the same kind."""
  in_index = evaluations[0].in_index
  rows = []
  for evaluation in evaluations:
    link = element("a", evaluation.task, href=f"{evaluation.task}/report.html")
    numbers = {
      name: f"{value} ({interval})" if interval else value
      for name, value, interval in evaluation.numbers()
    }
    count = f"{evaluation.summary['examples']:,}"
    shown = (numbers[name] for name in in_index)
    rows.append((link, evaluation.data_shown, evaluation.split, count, *shown))
  header = ("task", "data set", "split", "examples", *in_index)
  return table(
    header, rows, names=(0, 1, 2), label=f"tasks of {evaluations[0].kind}"
  )


def _notes(evaluation: TaskEvaluation) -> list[str]:
  """Return short texts about problems of `evaluation`, for the index page."""
  summary, alone, notes = evaluation.summary, evaluation.alone, []
  if summary["skipped"]:
    notes.append(f"{counted(summary['skipped'], 'example')} could not be read")
  if summary["not_finite"]:
    outputs = f"outputs for {counted(summary['not_finite'], 'example')}"
    notes.append(f"{outputs} are not finite")
  if alone and not alone["verified"]:
    notes.append("not verified")
  return notes


def _problems(evaluation: TaskEvaluation) -> Iterable[Html]:
  """Yield paragraphs about problems, and about what --verify found."""
  summary, alone = evaluation.summary, evaluation.alone
  if summary["skipped"]:
    skipped = counted(summary["skipped"], "example")
    yield element("p", f"{skipped} could not be read (skipped).", class_="bad")
  if summary["not_finite"]:
    yield element(
      "p",
      f"The outputs for {counted(summary['not_finite'], 'example')} are not "
      f"finite numbers: {KINDS[evaluation.kind].not_finite}.",
      class_="bad",
    )
  if alone:
    difference = alone["max_difference"]
    equal, verified = bool(alone["outputs_bit_equal"]), alone["verified"]
    shown = "not finite" if difference is None else f"{difference:.1e}"
    yield element(
      "p",
      f"Evaluated alone, the task has {evaluation.in_index[0]} "
      f"{evaluation.show_score(alone['score'])}. Greatest difference from its "
      f"outputs alone, as a share of the greatest output: {shown}. Original "
      "outputs are equal to the bit to those of the plain ViT: "
      f"{'yes' if equal else 'NO'}. Verified: {'yes' if verified else 'NO'}.",
      class_="quiet" if verified else "bad",
    )


def _numbers(evaluation: TaskEvaluation) -> Html:
  summary = evaluation.summary
  values = [
    *evaluation.numbers(),
    ("examples", f"{summary['examples']:,}", ""),
    ("skipped", f"{summary['skipped']:,}", ""),
  ]
  cards = [
    element(
      "div",
      element("dt", name),
      element("dd", value, element("small", interval) if interval else ""),
    )
    for name, value, interval in values
  ]
  return joined(element("dl", *cards, class_="numbers"), _meanings(evaluation))


def _mistakes(evaluation: TaskEvaluation, images: np.ndarray) -> list[Html]:
  if not evaluation.mistakes:
    return [element("p", "There are no mistakes.")]
  shown = map(_mistake, evaluation.mistakes, images)
  return [
    element(
      "p", "Images as the model sees them, with the right answer in bold and "
      "the prediction.",
      class_="quiet",
    ),
    element("div", *shown, class_="sheet"),
  ]  # fmt: skip


def _mistake(mistake: Mistake, image: np.ndarray) -> Html:
  described = f"An image of {mistake.label}, predicted as {mistake.predicted}"
  small = max(image.shape) <= _SMALL
  picture = element(
    "img", src=data_uri(image, "PNG" if small else "JPEG"), alt=described,
    class_="small" if small else "photo",
  )  # fmt: skip
  where = f"example {mistake.example:,}"
  # Leave out directories, because the page may be sent to other people.
  file = mistake.file.rpartition("/")[2]
  caption = element(
    "figcaption",
    element("strong", mistake.label),
    f"as {mistake.predicted}, {mistake.note}",
    element("small", f"{where}, {file}" if file else where),
  )
  return element("figure", picture, caption)


def _about(evaluation: TaskEvaluation) -> Html:
  backbone = evaluation.details["backbone"]
  text = (
    f"Made by memory_vit {evaluation.details['memory_vit']} with the backbone "
    f"{backbone['variant']} in {backbone['dtype']}, fingerprint "
    f"{backbone['fingerprint'][:12]}. All numbers are in metrics.json beside "
    "this page, all predictions in predictions.csv and predictions.parquet."
  )
  return element("footer", element("p", text))


def _meanings(evaluation: TaskEvaluation) -> Html:
  entries = [
    joined(element("dt", name), element("dd", text))
    for name, text in evaluation.meanings.items()
  ]
  return element(
    "details",
    element("summary", "What the numbers mean"),
    element("dl", *entries, class_="meanings"),
  )
