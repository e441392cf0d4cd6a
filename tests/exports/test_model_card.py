"""The model card shows what a task states, as text without markup."""

import re

import markdown_it
import pytest
import yaml
from conftest import random_task
from kinds_of_tasks import tasks_of_kinds

import memory_vit as mv
from memory_vit.exports import model_card

# Each would be markup, where it was not escaped.
HOSTILE = (
  "<script>alert(1)</script>", "[here](http://e.example)", "![x](http://e/x)",
  "www.e.example", "http://e.example", "a | b |", "`code`", "**bold**",
  "# title", "line\n# break", "---", "&lt;b&gt;", "line\u2028break", "x\r---\r",
  "me@e.example", "``a", "`", "```\nx", "~~~", " ", "a" * 999 + "`",
  "<http://e.example>", "$$x$$", "~~x~~", "\\", "\\<b>",
)  # fmt: skip


def test_the_card_says_what_on_what_and_how_good(backbone):
  made = {
    "config": {"data": {"name": "digits", "train": "train"}},
    "metrics": {
      "test": {"metrics": {"top1": 0.875}, "examples": 2000},
      "chance": 0.1,
    },
  }
  task = random_task(backbone, "a", class_names=("cat", "dog", "hen"))
  text = model_card.to_text([mv.Task(task.spec, task.params, made)])
  for part in ("# a\n", "3: `cat`, `dog`, `hen`", "name `digits`, train",
               "| accuracy, test | 87.50 % |", "| test images | 2,000 |",
               'mv.load_tasks(["a.safetensors"]', backbone.fingerprint,
               "resized to 8 x 8 pixels"):  # fmt: skip
    assert part in text
  front = yaml.safe_load(text.split("---\n")[1])
  assert front["library_name"] == "memory_vit"
  assert front["pipeline_tag"] == "image-classification"
  assert "license" not in front  # the user's to choose


@pytest.mark.parametrize(
  ("source", "shown"),
  [
    ("augreg-B/32", '"augreg-B/32"'),
    ("hf://google/vit@main", '"hf://google/vit@main"'),
    ("hf://google/vit\"\n# title", "BACKBONE"),
    ("/home/me/vit.npz", "BACKBONE"), ("https://e.example/a.npz", "BACKBONE"),
    (["augreg-B/32"], "BACKBONE"), ("", "BACKBONE"),
  ],
)  # fmt: skip
def test_the_card_names_a_backbone_that_is_public(backbone, source, shown):
  """Readers have no local file of the author."""
  task = random_task(backbone, "a")
  made = {"config": {"backbone": source}}
  text = model_card.to_text([mv.Task(task.spec, task.params, made)])
  assert f"  {shown}, image_size=8" in text
  assert f"--backbone={shown.strip(chr(34))} --task=." in text
  assert "memory tokens" not in text  # one word for one thing


def test_the_card_says_how_images_are_resized(backbone):
  for interpolation, said in (
    ("bilinear", "(bilinear, without antialiasing)"),
    ("bilinear_antialias", "(bilinear with antialiasing, as in Pillow)"),
    ("bicubic", "(bicubic with antialiasing, as in Pillow)"),
  ):
    preprocessing = mv.EvalPreprocessing(
      image_size=8, interpolation=interpolation
    )
    task = random_task(backbone, "a", preprocessing=preprocessing)
    assert f"pixels, whatever their shape {said}" in model_card.to_text([task])


@pytest.mark.parametrize(("classes", "tells"), [(5, False), (6, True)])
def test_card_of_five_classes_has_no_top_5(backbone, classes, tells):
  task = random_task(backbone, "a", classes=classes)
  made = {"metrics": {"test": {"metrics": {"top5": 1.0, "top1": 0.5}}}}
  text = model_card.to_text([mv.Task(task.spec, task.params, made)])
  assert ("| top-5 accuracy, test | 100.00 % |" in text) == tells
  assert "| accuracy, test | 50.00 % |" in text


def test_the_card_of_labels_and_values(backbone):
  _, tags, size = tasks_of_kinds(backbone)
  test = {"metrics": {"map": 0.75, "r2": float("nan")}}
  made = {"metrics": {"test": test, "val": {"metrics": {"mae": 1.5}}}}
  text = model_card.to_text([mv.Task(tags.spec, tags.params, made)])
  assert (
    "- labels: 3: `even` (threshold 0.3), `above 4` (threshold 0.5), `prime` "
    "(threshold 0.7)\n"
  ) in text
  assert "activate(outputs['tags'])` returns probabil" in text
  assert "| mean average precision, test | 75.00 % |" in text
  assert "| mean absolute error, mean over values, validation | 1.5 |" in text
  assert "R2" not in text
  assert "pipeline_tag: image-classification" in text
  text = model_card.to_text([size])
  assert "- values: 2: `angle` (`degrees`), `height` (`mm`)\n" in text
  front = yaml.safe_load(text.split("---\n")[1])
  assert "pipeline_tag" not in front
  assert "learnable-memory" in front["tags"]


def test_a_card_needs_no_provenance(backbone):
  text = model_card.to_text([random_task(backbone, "a")])
  assert "- data: unknown" in text
  assert "- metrics: unknown" in text
  assert "with unknown names" in text


def _kinds(text):
  """The tokens of Markdown as hubs read it, without what they contain."""
  parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
  tokens = parser.parse(re.sub(r"^---\n.*?^---\n", "", text, flags=re.M | re.S))
  return [
    (token.type, inner.type)
    for token in tokens
    for inner in (token.children or [token])
    if inner.type != "text"
  ]


@pytest.mark.fault("model-card-text")
@pytest.mark.parametrize("name", HOSTILE)
def test_card_escapes_untrusted_names(backbone, name):
  """Any names give a card of the same structure."""

  def card(text):
    made = {
      "config": {"backbone": text, "data": {"name": text, "test": text}},
      "metrics": {
        "test": {"metrics": {"top1": text}},
        "steps": text,
        "chance": 0.5,
      },
    }
    names = (text, f"{text} 2", f"{text} 3")
    kind = mv.TaskKind(
      name="values", mean=(0,) * 3, std=(1,) * 3, units=(text,) * 3
    )
    task = random_task(backbone, "a", class_names=names, kind=kind)
    return model_card.to_text([mv.Task(task.spec, task.params, made)])

  hostile, harmless = card(name), card("harmless")
  assert _kinds(hostile) == _kinds(harmless)
  assert hostile.split("---\n")[1] == harmless.split("---\n")[1]


@pytest.mark.parametrize(
  "metrics",
  [[], {"test": {"metrics": {"top1": float("nan")}}}, {"steps": True},
   {"chance": 10**99}, {"test": {"metrics": {"top1": None}}, "steps": 1.5},
   {"test": [], "val": {"metrics": 3}}],
)  # fmt: skip
def test_card_leaves_out_invalid_numbers(backbone, metrics):
  task = random_task(backbone, "a")
  made = {"metrics": metrics, "config": 3}
  text = model_card.to_text([mv.Task(task.spec, task.params, made)])
  assert "- metrics: unknown" in text
