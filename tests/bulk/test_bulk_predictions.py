"""Predictions and embeddings as rows: the numbers of the model, to the bit."""

import dataclasses
import json
import re

import fake_data
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, random_task, run_program, tiny_backbone
from kinds_of_tasks import LABELS, VALUES, tasks_of_kinds

import memory_vit as mv
from memory_vit.bulk.predictions import PredictionJob
from memory_vit.commands import bulk_options, embed, predict
from memory_vit.data import read_embeddings
from memory_vit.errors import BackboneError, DataError
from memory_vit.prediction import PredictorConfig
from memory_vit.tasks import split_forward

IMAGES = 11
BROKEN = (2, 5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A backbone, two tasks, and images in folders of two classes."""
  root = tmp_path_factory.mktemp("bulk")
  mv.save_backbone(tiny_backbone(), root / "tiny.npz")
  backbone = mv.load_backbone(root / "tiny.npz")
  digits = random_task(backbone, "digits", classes=7)
  cats = random_task(
    backbone, "cats", seed=1, attends_to=digits, class_names=["a", "b", "c"]
  )
  mv.save_tasks([digits, cats], root / "tasks")
  for i in range(IMAGES):
    folder = root / "images" / ("even" if i % 2 == 0 else "odd")
    folder.mkdir(parents=True, exist_ok=True)
    content = fake_data.encode(fake_data.noise(i), "PNG")
    (folder / f"{i:02}.png").write_bytes(
      content[:-40] if i in BROKEN else content
    )
  return root


def command(module, place, output, *more):
  given = [
    f"--backbone={place / 'tiny.npz'}",
    f"--task={place / 'tasks'}",
    f"--input={place / 'images'}",
    f"--output={output}",
    "--batch_size=4",
  ]
  if module is embed:
    given[1] = f"--task={place / 'tasks' / 'digits'}"
  return module.main([*given, *more])


def batches(rows, size=4):
  """The readable images of rows, in the batches of the run."""
  for start in range(0, len(rows), size):
    yield [row for row in rows[start : start + size] if row["error"] is None]


def padded(backbone, rows, size=4):
  images = mv.preprocess(
    [row["path"] for row in rows],
    mv.EvalPreprocessing(image_size=backbone.config.image_size),
  )
  return np.concatenate([images, np.zeros((size - len(rows), 8, 8, 3), "f4")])


def test_lone_task_is_predicted_as_by_forward(place, tmp_path):
  backbone = mv.load_backbone(place / "tiny.npz")
  task = random_task(backbone, "own", regime="full", cells=0)
  mv.save_task(task, tmp_path / "own")
  output = tmp_path / "out"
  given = [
    f"--backbone={place / 'tiny.npz'}", f"--task={tmp_path / 'own'}",
    f"--input={place / 'images'}", f"--output={output}", "--batch_size=4",
    "--logits",
  ]  # fmt: skip
  assert predict.main(given) == 1  # some images could not be read
  rows = pq.read_table(output).to_pylist()
  assert len(rows) == IMAGES
  for batch in batches(rows):
    images = jnp.asarray(padded(backbone, batch))
    logits = run_program(backbone, [task], images)["own"]
    for row, expected in zip(batch, np.asarray(logits), strict=False):
      np.testing.assert_array_equal(row["own/logits"], expected)


@pytest.mark.fault("unreadable-images")
def test_predictions_are_those_of_forward(place, tmp_path, capsys):
  output = tmp_path / "out"
  status = command(predict, place, output, "--logits", "--original", "--top=2")
  assert status == 1  # some images could not be read
  said = capsys.readouterr()
  assert "11 images, 2 of them unreadable, in 1 shards" in said.out
  assert said.err.count("skipped ") == len(BROKEN)
  backbone = mv.load_backbone(place / "tiny.npz")
  tasks = mv.load_tasks(place / "tasks", backbone)
  slots = mv.fill_slots(backbone, tasks, slots=8, cells=8, classes=128)
  rows = pq.read_table(output).to_pylist()
  assert len(rows) == IMAGES
  assert {row["label"] for row in rows} == {"even", "odd"}
  for batch in batches(rows):
    expected = mv.forward(backbone, slots, padded(backbone, batch))
    for i, row in enumerate(batch):
      for name in ("digits", "cats", "backbone"):
        logits = np.asarray(expected[name])[i]
        np.testing.assert_array_equal(
          np.array(row[f"{name}/logits"], "f4"), logits
        )
        best = np.argsort(-logits, kind="stable")[:2]
        assert row[f"{name}/top_indices"] == list(best)
        names = "abc" if name == "cats" else "0123456"
        assert row[f"{name}/top_classes"] == [names[k] for k in best]
        shares = np.array(jax.nn.softmax(logits))[best]
        np.testing.assert_allclose(
          row[f"{name}/top_probabilities"], shares, rtol=1e-5
        )
  broken = [row for row in rows if row["error"]]
  assert len(broken) == len(BROKEN)
  assert all(row["cats/logits"] is None for row in broken)


def test_labels_and_values_have_columns_of_their_own(place, tmp_path):
  backbone = mv.load_backbone(place / "tiny.npz")
  _, tags, size = tasks_of_kinds(backbone)
  twice = dataclasses.replace(
    size,
    spec=dataclasses.replace(size.spec, name="same", class_names=("a",) * 2),
  )
  mv.save_tasks([tags, size, twice], tmp_path / "tasks")
  output = tmp_path / "out"
  given = [
    f"--backbone={place / 'tiny.npz'}", f"--task={tmp_path / 'tasks'}",
    f"--input={place / 'images'}", f"--output={output}", "--batch_size=4",
    "--logits",
  ]  # fmt: skip
  assert predict.main(given) == 1  # some images could not be read
  table = pq.read_table(output)
  assert {"same/values/0", "same/values/1"} <= {*table.column_names}
  for row in table.to_pylist():
    if row["error"]:
      assert row["tags/labels"] is row["size/values/angle"] is None
      continue
    chances = LABELS.activate(np.array(row["tags/logits"]))
    over = np.flatnonzero(chances >= LABELS.thresholds)
    assert sorted(row["tags/label_indices"]) == [*over]
    assert row["tags/labels"] == [
      tags.spec.class_names[i] for i in row["tags/label_indices"]
    ]
    np.testing.assert_allclose(
      row["tags/label_probabilities"],
      chances[row["tags/label_indices"]],
      rtol=1e-6,
    )
    values = VALUES.activate(np.array(row["size/logits"]))
    assert [row["size/values/angle"], row["size/values/height"]] == [*values]
  plan = json.loads((output / "_plan" / "plan.json").read_text())
  [kind, *_] = [task["kind"] for task in plan["model"]["tasks"]]
  assert "thresholds" in kind  # other thresholds are another run


def test_a_task_that_rejects_images_has_two_more_columns(place, tmp_path):
  backbone = mv.load_backbone(place / "tiny.npz")
  pets, *_ = tasks_of_kinds(backbone)
  spec = dataclasses.replace(pets.spec, kind=mv.TaskKind(unknown=0.1))
  mv.save_task(dataclasses.replace(pets, spec=spec), tmp_path / "task")
  given = [
    f"--backbone={place / 'tiny.npz'}", f"--task={tmp_path / 'task'}",
    f"--input={place / 'images'}", f"--output={tmp_path / 'out'}",
    "--batch_size=4", "--logits", "--original",
  ]  # fmt: skip
  assert predict.main(given) == 1  # some images could not be read
  table = pq.read_table(tmp_path / "out")
  assert "backbone/unknown" not in table.column_names
  for row in table.to_pylist():
    if row["error"]:
      assert row["pets/unknown"] is row["pets/known_score"] is None
    else:
      assert row["pets/known_score"] == max(row["pets/logits"])
      assert row["pets/unknown"] == (row["pets/known_score"] < 0.1)


def test_metadata_says_what_made_the_rows(place, tmp_path):
  command(predict, place, tmp_path / "out")
  found = pq.read_schema(tmp_path / "out" / "part-00000-of-00001.parquet")
  about = json.loads(found.metadata[b"memory_vit"])
  backbone = mv.load_backbone(place / "tiny.npz")
  tasks = mv.load_tasks(place / "tasks", backbone)
  assert about["backbone"]["fingerprint"] == backbone.fingerprint
  assert {t["name"]: t["digest"] for t in about["tasks"]} == {
    task.name: task.digest for task in tasks
  }
  assert about["preprocessing"]["image_size"] == 8
  assert set(about["versions"]) == {"memory_vit", "jax", "pyarrow", "device"}
  assert "digits/logits" not in found.names


@pytest.mark.fault("bulk-changed")
def test_a_retrained_task_is_another_run(place, tmp_path, capsys):
  output = tmp_path / "out"
  command(predict, place, output)
  other = tmp_path / "tasks"
  backbone = mv.load_backbone(place / "tiny.npz")
  digits = random_task(backbone, "digits", classes=7, seed=5)
  mv.save_tasks([digits], other)
  args = [
    f"--backbone={place / 'tiny.npz'}", f"--task={other}",
    f"--input={place / 'images'}", f"--output={output}", "--batch_size=4",
  ]  # fmt: skip
  capsys.readouterr()
  assert predict.main(args) == 2
  said = capsys.readouterr().err
  assert said.startswith("error: --output")
  assert "holds another run: model/tasks is" in said


def test_all_that_rows_depend_on_makes_another_run(place):
  """Otherwise one table would have rows of two kinds."""
  given = {
    "backbone": str(place / "tiny.npz"),
    "tasks": (str(place / "tasks"),),
  }
  config = PredictorConfig(**given, batch_sizes=(4,))
  job = PredictionJob(config)
  facts = job.open().facts
  for key, other in {
    "dtype": PredictionJob(dataclasses.replace(config, dtype="bfloat16")),
    "top": dataclasses.replace(job, top=1),
    "logits": dataclasses.replace(job, logits=True),
    "original": dataclasses.replace(job, original=True),
  }.items():
    found = other.open().facts
    assert [name for name in facts if found[name] != facts[name]] == [key]


@pytest.mark.parametrize(
  ("flags", "expected"),
  [
    (["--input=x"], "expected both --input and --output"),
    (["--output=x"], "expected both --input and --output"),
    (["--input=x", "--output=y", "--json"], "expected neither --json"),
    (["--input=x", "--output=y", "z.png"], "expected neither --json"),
    (["z.png", "--logits"], "--logits is for predictions into Parquet"),
    (["z.png", "--engine=ray"], "--engine is for predictions into Parquet"),
    (["--input=x", "--output=y", "--workers=3"], "expected --engine=ray"),
    ([], "there is no image"),
  ],
)
def test_options_without_effect_are_refused(flags, expected, capsys):
  given = ["--backbone=b.npz", "--task=t", *flags]
  assert predict.main(given) == 2
  assert expected in capsys.readouterr().err


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_embeddings_are_what_heads_and_probes_read(place, tmp_path, stored):
  output = tmp_path / "out"
  assert command(embed, place, output, f"--stored={stored}") == 1
  backbone = mv.load_backbone(place / "tiny.npz")
  found = read_embeddings(output)
  found.require_backbone(backbone)
  assert len(found.paths) == IMAGES - len(BROKEN)
  assert found.class_names() == ("even", "odd")
  assert found.pooled.shape == (9, 32)
  assert found.layers.shape == (9, 4, 32)
  specs = [
    random_task(
      backbone, regime, cells=0, regime=regime, bottleneck=bottleneck
    ).spec
    for regime, bottleneck in (("head", 0), ("probe", 2))
  ]
  prepare = split_forward.make_split_forward(
    backbone.config, tuple(specs)
  ).prepare
  rows = pq.read_table(output).to_pylist()
  place_ = 0
  for batch in batches(rows):
    expected = prepare(
      {"backbone": backbone.params}, jnp.asarray(padded(backbone, batch))
    )
    part = slice(place_, place_ + len(batch))
    place_ = part.stop
    for name, values in (("pooled", found.pooled), ("layers", found.layers)):
      wanted = np.asarray(expected[name])[: len(batch)]
      rounded = wanted.astype(jnp.dtype(stored)).astype(np.float32)
      np.testing.assert_allclose(
        values[part], rounded, rtol=1e-5 if stored == "float32" else 1 / 128,
        atol=1e-5,
      )  # fmt: skip


def test_workers_get_absolute_paths(tmp_path, monkeypatch):
  """Names of published backbones stay as they are."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny.npz").touch()
  assert bulk_options.whole_path("tiny.npz") == str(tmp_path / "tiny.npz")
  assert bulk_options.whole_path("timm:vit") == "timm:vit"


@pytest.mark.fault("foreign-embeddings")
def test_embeddings_of_another_backbone_are_refused(place, tmp_path):
  command(embed, place, tmp_path / "out")
  found = read_embeddings(tmp_path / "out")
  with pytest.raises(BackboneError, match="load the backbone that made"):
    found.require_backbone(tiny_backbone(seed=3))


@pytest.mark.fault("foreign-embeddings")
def test_files_without_embeddings_are_refused(place, tmp_path):
  command(predict, place, tmp_path / "out")
  with pytest.raises(DataError, match="holds no embeddings"):
    read_embeddings(tmp_path / "out")
  with pytest.raises(DataError, match=r"has the shards \[\]: expected all"):
    read_embeddings(place)
  output = tmp_path / "embedded"
  command(embed, place, output, "--shard_images=4")
  (output / "part-00001-of-00003.parquet").unlink()
  with pytest.raises(DataError, match="of-00003.*expected all shards of a run"):
    read_embeddings(output)
  first = output / "part-00000-of-00003.parquet"
  first.rename(output / "part-x.parquet")
  (output / "part-00002-of-00003.parquet").unlink()
  with pytest.raises(DataError, match="'part-x.parquet'.*expected all"):
    read_embeddings(output)


def test_the_example_reads_a_table(place, tmp_path, monkeypatch, capsys):
  """The code in docs/scale.md."""
  monkeypatch.chdir(tmp_path)
  command(predict, place, "OUT", "--shard_images=4")
  capsys.readouterr()
  page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
  [example] = re.findall(r"```python\n([^`]*?pq.read_table.*?)```", page, re.S)
  exec(compile(example, "an example", "exec"), {})
  assert capsys.readouterr().out == f"{IMAGES}\n"


def test_the_example_reads_arrays(place, tmp_path, monkeypatch, capsys):
  """The code in docs/scale.md."""
  monkeypatch.chdir(tmp_path)
  command(embed, place, tmp_path / "EMBEDDED" / "train")
  page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
  [example] = re.findall(
    r"```python\n([^`]*?read_embeddings.*?)```", page, re.S
  )
  example = example.replace("augreg-B/32", str(place / "tiny.npz"))
  exec(compile(example, "an example", "exec"), {})
  assert "(9, 32) (9, 4, 32) ('even', 'odd')" in capsys.readouterr().out
