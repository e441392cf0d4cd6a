"""Splits of what Python holds: pairs, dictionaries, other libraries' sets."""

import dataclasses
import re
import threading

import fake_data
import numpy as np
import pytest
from conftest import tiny_backbone
from PIL import Image

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.config import DataConfig
from memory_vit.data import datasets, open_indexable, subset
from memory_vit.data.batching import eval_batches, train_batches
from memory_vit.data.split_ref import SplitRef, Subset
from memory_vit.errors import BrokenDataError, ConfigError, DataError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.train import run, settle

PLAIN = EvalPreprocessing(image_size=8)
NAMES = ["ant", "bee", "cat"]


def opened(examples, **options):
  options = {"name": "own", "version": "1", "class_names": NAMES, **options}
  return open_indexable(examples, **options)


def evaluated(reader):
  batches = list(eval_batches(reader, PLAIN, batch_size=4))
  real = np.concatenate([batch["mask"] for batch in batches]) > 0
  return [
    np.concatenate([batch[key] for batch in batches])[real]
    for key in ("image", "label")
  ]


def every_form(rgb):
  """One image in all forms that an example may have it."""
  image = Image.fromarray(rgb)
  png = fake_data.encode(image, "PNG")
  rgba = np.dstack([rgb, rgb[:, :, :1]])
  return {
    "pixels": rgb, "floats": rgb / 255, "alpha": rgba, "Pillow": image,
    "file": png,
    "Pillow with alpha": Image.fromarray(rgba), "undecoded": {"bytes": png},
  }  # fmt: skip


def test_every_form_of_an_image_is_the_same_picture():
  rgb = fake_data.noise(0)
  forms = every_form(rgb)
  pairs = [(image, 1) for image in forms.values()]
  images, labels = evaluated(opened(pairs))
  expected = mv.preprocess(rgb, PLAIN)
  for name, image in zip(forms, images, strict=True):
    np.testing.assert_array_equal(image, expected, err_msg=name)
  assert labels.tolist() == [1] * len(forms)
  grey = rgb[:, :, 0]
  high = grey.astype(np.uint16) * 256 + 77
  greys = [grey, grey[:, :, None], Image.fromarray(grey), Image.fromarray(high)]
  images, _ = evaluated(opened([(image, 0) for image in greys]))
  for image in images:
    np.testing.assert_array_equal(image, mv.preprocess(grey, PLAIN))


def test_dictionaries_and_all_types_of_labels_are_read():
  rows = [
    {"img": fake_data.picture(i), "y": label}
    for i, label in enumerate([0, np.int64(1), np.array(2), True])
  ]
  reader = opened(rows, keys=("img", "y"))
  images, labels = evaluated(reader)
  assert labels.tolist() == [0, 1, 2, 1]
  assert np.round(images.mean((1, 2, 3)) * 127.5 + 127.5).tolist() == [
    *range(4)
  ]
  assert (reader.name, reader.split, reader.size) == ("python:own", "all", 4)


class HuggingFace(list):
  """As much as is used of `datasets.Dataset`."""

  @property
  def features(self):
    label = type("ClassLabel", (), {"names": NAMES})()
    return {"image": None, "label": label}


class TorchVision(list):
  classes = NAMES


@pytest.mark.parametrize("kind", [HuggingFace, TorchVision])
def test_classes_stated_by_other_libraries_are_used(kind):
  examples = kind([(fake_data.picture(0), 2)])
  assert opened(examples, class_names=()).class_names == tuple(NAMES)
  with pytest.raises(DataError, match="give class_names"):
    opened([*examples], class_names=())


def test_training_sees_every_example_in_each_epoch():
  reader = opened([(fake_data.picture(i), i % 3) for i in range(7)])
  plain = DataConfig(train_crop="resize", flip=False)
  batches = train_batches(reader, plain, image_size=8, batch_size=7, seed=0)
  for _ in range(2):
    grey = next(batches)["image"].mean((1, 2, 3)) * 127.5 + 127.5
    assert sorted(np.round(grey)) == [*range(7)]


def test_few_of_each_class_are_found_without_their_labels_known():
  reader = opened([(fake_data.picture(i), i % 3) for i in range(12)])
  source = subset.choose(reader, Subset(per_class=2))
  assert sorted(evaluated(source)[1]) == [0, 0, 1, 1, 2, 2]


def test_several_data_sets_cause_no_retracing_warning(caplog):
  """Several runs in one process, of which each opens its own."""
  for i in range(7):
    opened([(fake_data.picture(i), 0)])
  assert "retracing" not in caplog.text


@pytest.mark.parametrize("parallel", [True, False])
def test_one_thread_at_a_time_where_it_is_asked_for(parallel):
  class Slow:
    inside, most, lock = 0, 0, threading.Condition()

    def __len__(self):
      return 8

    def __getitem__(self, index):
      with self.lock:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.lock.notify_all()
        # Until a second one comes, but for the first, which is read alone.
        patience = 30 if parallel else 0.01
        self.lock.wait_for(lambda: index == 0 or self.most > 1, patience)
        self.inside -= 1
      return fake_data.picture(index), 0

  slow = Slow()
  evaluated(opened(slow, parallel=parallel))
  assert (slow.most > 1) == parallel


@pytest.mark.fault("wrong-label")
@pytest.mark.parametrize(
  ("example", "message"),
  [
    ((fake_data.picture(0), "elk"), "label is 'elk', expected 0 to"),
    ((fake_data.picture(0), 1.5), "label is 1.5, expected an integer"),
    ((fake_data.picture(0), 3), "labels 3; expected 0 to 2"),
    ((fake_data.picture(0), -1), "labels -1: an unlabelled"),
    ((np.full((8, 8, 3), 2.0), 0), "with values from 2 to 2: expected a path"),
    ((np.zeros((8, 8, 2), np.uint8), 0), r"shape \(8, 8, 2\) and dtype uint8"),
    (("images/0.png", 0), "the path 'images/0.png': No such file"),
    (({"bytes": None, "path": None}, 0), "image is of type NoneType"),
    ((Image.new("I", (8, 8)), 0), "Pillow image has the mode I, whose range"),
    ({"pixels": 1, "label": 0}, r"keys are \['pixels', 'label'\], expected"),
    ((1, 2, 3), "the example is of type tuple, expected"),
    (7, "the example is of type int, expected"),
  ],
)
def test_examples_that_cannot_be_used_are_named(example, message):
  with pytest.raises(
    BrokenDataError, match=f"(?s)example 0.*{message}|{message}"
  ):
    opened([example])
  good = (fake_data.picture(0), 0)
  reader = opened([good, example, good])
  with pytest.raises(BrokenDataError, match="example 1") as error:
    evaluated(reader)
  assert re.search(message, str(error.value))


def test_error_without_a_message_is_named():
  class Fails(list):
    def __getitem__(self, index):
      if index == 1:
        raise NotImplementedError
      return super().__getitem__(index)

  reader = opened(Fails([(fake_data.picture(0), 0)] * 3))
  with pytest.raises(BrokenDataError, match="example 1.*NotImplementedError"):
    evaluated(reader)


@pytest.mark.parametrize(
  ("examples", "options", "message"),
  [
    (iter([]), {}, "`__len__` and `__getitem__`"),
    ([], {}, "are an empty list"),
    ([(fake_data.picture(0), 0)], {"name": "a b"}, "the name 'a b'"),
    ([(fake_data.picture(0), 0)], {"version": ""}, "version ''"),
  ],
)
def test_unusable_data_sets_are_refused(examples, options, message):
  with pytest.raises(DataError, match=message):
    opened(examples, **options)


def test_tenth_data_set_causes_no_retracing_warning(caplog):
  """Each has a graph of its own; it warned that a function is retraced."""
  with caplog.at_level("WARNING"):
    for _ in range(10):
      reader = opened([(np.zeros((4, 4, 3), np.uint8), 0)])
      reader.source.read(0)
  assert "retracing" not in caplog.text


def test_data_are_identified_by_size_and_version():
  pairs = [(fake_data.picture(i), 0) for i in range(3)]
  tables = [
    opened(given, version=version).data_files.table("files")
    for given, version in ((pairs, "1"), (pairs, "2"), (pairs[:2], "1"))
  ]
  assert tables[0] == opened(pairs).data_files.table("files")
  assert tables[0] not in tables[1:]


def run_config(**data):
  values = digits.get_config()
  values.upstream.name = ""
  values.data.name = ""
  for key, value in data.items():
    values.data[key] = value
  return config_lib.from_dict(values.to_dict())


def test_splits_take_the_place_of_a_named_data_set():
  pairs = [(fake_data.picture(i), i % 3) for i in range(6)]
  train, test = opened(pairs, split="a"), opened(pairs, split="b")
  config = settle.with_splits(run_config(), {"train": train, "test": test})
  data = config.data
  assert (data.name, data.train) == ("python:own", "a")
  assert (data.validation, data.test) == ("", "b")
  # The name means nothing to a command: nothing is opened by it.
  with pytest.raises(DataError, match="namespace"):
    datasets.open_ref(SplitRef("python:own", "", "a"))


@pytest.mark.parametrize(
  ("data", "roles", "message"),
  [
    ({}, ("test",), "expected 'train'"),
    ({}, ("train", "upstream"), "expected 'train', and perhaps"),
    ({"name": "digits"}, ("train",), "data.name is 'digits'.*expected ''"),
    ({"dir": "x"}, ("train",), "data.dir is 'x'"),
    ({"label": "x"}, ("train",), "data.label is 'x'"),
    (
      {"digest": "contents"},
      ("train",),
      "expected 'files'.*change the argument `version`",
    ),
  ],
)
def test_splits_that_contradict_the_configuration_are_refused(
  data, roles, message
):
  reader = opened([(fake_data.picture(0), 0)])
  with pytest.raises((ConfigError, DataError), match=message):
    settle.with_splits(run_config(**data), dict.fromkeys(roles, reader))


@pytest.mark.slow
def test_run_on_given_splits_equals_run_on_the_same_files(tmp_path):
  """Same examples in the same order: the same bits, and a run that goes on."""
  fake_data.write_folder(
    tmp_path / "data",
    {f"train/{name}": [f"{i}.png" for i in range(4)] for name in NAMES},
  )
  named = datasets.open_split("folder", "train", str(tmp_path / "data"))
  pairs = []
  for i in range(named.size):
    encoded, label = named.source.read(i)
    pairs.append((encoded, int(label)))
  mv.save_backbone(tiny_backbone(), tmp_path / "tiny.npz")
  config = dataclasses.replace(
    run_config(), backbone=str(tmp_path / "tiny.npz"), batch_size=8,
    batch_size_eval=8, total_steps=2, eval_every=2, checkpoint_every=2,
    task=config_lib.TaskConfig(name="pets"),
  )  # fmt: skip
  given = opened(pairs, split="train")
  first = run.train_and_evaluate(
    config, tmp_path / "given", splits={"train": given, "test": given}
  )
  folder = dataclasses.replace(
    config.data, name="folder", dir=str(tmp_path / "data"), train="train",
    validation="", test="train",
  )  # fmt: skip
  second = run.train_and_evaluate(
    dataclasses.replace(config, data=folder), tmp_path / "folder"
  )
  assert first.tasks[0].test.accuracy == second.tasks[0].test.accuracy
  backbone = mv.load_backbone(tmp_path / "tiny.npz")
  tasks = [
    mv.load_task(tmp_path / place / "tasks" / "pets", backbone)
    for place in ("given", "folder")
  ]
  assert tasks[0].digest == tasks[1].digest
  again = opened(pairs, split="train", version="2")
  with pytest.raises(mv.MemoryVitError, match="other data.*\n.*version"):
    run.train_and_evaluate(
      config, tmp_path / "given", splits={"train": again, "test": again}
    )


def test_advice_for_data_in_python_is_no_command():
  """Which could not see them."""
  example = np.full((8, 8, 3), 2.0), 0
  with pytest.raises(BrokenDataError, match=r"\(x \+ 1\) / 2") as error:
    opened([example])
  assert "check_data" not in str(error.value)
  assert "max_bad" in str(error.value)
