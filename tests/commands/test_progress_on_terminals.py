"""Bars of whole commands, on a pseudo terminal."""

import itertools
import json
import re
import signal
import time

import fake_data
import pytest
from conftest import random_task, tiny_backbone
from terminals import Command

import memory_vit as mv

pytestmark = pytest.mark.processes

CLASSES = ("black", "white")


@pytest.fixture(scope="module")
def there(tmp_path_factory):
  """A folder with images of two classes, a backbone, and a task."""
  root = tmp_path_factory.mktemp("there")
  seeds = itertools.count()
  for split, count in (("train", 30), ("test", 10)):
    for name in CLASSES:
      folder = root / "data" / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        content = fake_data.encode(fake_data.noise(next(seeds)), "PNG")
        (folder / f"{i:02}.png").write_bytes(content)
  backbone = tiny_backbone(depth=1, num_classes=5)
  mv.save_backbone(backbone, root / "vit.npz")
  task = random_task(backbone, "pets", classes=2, class_names=CLASSES)
  mv.save_task(task, root / "tasks" / "pets")
  return root


def counts(text, title):
  """The numbers that a bar went through, "1/20" as 1, and their total."""
  found = re.findall(rf"{re.escape(title)}: +\d+%\|.*?\| (\d+)/(\d+) ", text)
  assert found, text
  assert len({total for _, total in found}) == 1
  return [int(done) for done, _ in found], int(found[0][1])


def test_check_data_shows_a_bar_per_split(there):
  command = Command(
    "check_data", "--config=configs/folder.py",
    f"--config.data.dir={there / 'data'}",
  )  # fmt: skip
  assert command.wait() == 0
  for title, total in (("train", 54), ("test", 20)):
    done, of = counts(command.err, title)
    assert of == total
    assert done == sorted(done)
  # Nothing is left but log lines, and stdout has nothing but the report.
  assert not re.search(r"\d/\d|%\|", "\n".join(command.screen))
  assert command.screen[-1] == ""
  assert command.out.startswith("split ")
  assert "\r" not in command.out


def test_predict_shows_a_bar_beside_its_results(there):
  """Results go to stdout, a bar for all images to the terminal."""
  model = [f"--backbone={there / 'vit.npz'}", f"--task={there / 'tasks/pets'}"]
  command = Command(
    "predict",
    *model,
    "--json",
    "--batch_size=4",
    there / "data" / "test",
    environment={"NO_COLOR": "1"},
  )
  assert command.wait() == 0, command.err
  done, total = counts(command.err, "predicting")
  assert total == 20
  assert done[-1] > 1
  assert command.screen == [""]
  assert "\x1b[" not in command.err  # no colour, in any case
  lines = [json.loads(line) for line in command.out.splitlines()]
  assert len(lines) == 20


def test_bulk_predictions_show_a_bar(there, tmp_path):
  command = Command(
    "predict", f"--backbone={there / 'vit.npz'}",
    f"--task={there / 'tasks/pets'}", "--batch_size=4", "--shard_images=8",
    f"--input={there / 'data' / 'test'}", f"--output={tmp_path / 'out'}",
  )  # fmt: skip
  assert command.wait() == 0, command.err
  _, total = counts(command.err, "out")
  assert total == 20
  assert not re.search(r"%\|", "\n".join(command.screen))
  assert "3 shards" in command.out


def test_evaluate_shows_a_bar(there):
  command = Command(
    "evaluate", f"--backbone={there / 'vit.npz'}",
    f"--task={there / 'tasks/pets'}", f"--data_dir={there / 'data'}",
    "--data=folder", "--split=test", "--batch_size=8",
  )  # fmt: skip
  assert command.wait() == 0, command.err
  _, total = counts(command.err, "evaluating folder data test")
  assert total == 20
  line, cursor = command.screen
  assert "importing TensorFlow" in line
  assert cursor == ""
  assert "pets" in command.out


def training(there, workdir, *more):
  """Trains for long, and says so each step."""
  return Command(
    "train", "--config=configs/folder.py", f"--workdir={workdir}",
    f"--config.backbone={there / 'vit.npz'}",
    f"--config.data.dir={there / 'data'}", "--config.batch_size=4",
    "--config.data.validation=", "--config.task.name=pets",
    "--config.checkpoint_every=1000000", "--config.epochs=0",
    "--config.optim.warmup_steps=0", "--config.log_images=0", *more,
  )  # fmt: skip


def test_log_lines_of_training_stand_above_its_bar(there, tmp_path):
  command = training(
    there, tmp_path / "run", "--config.total_steps=20", "--config.log_every=1",
    "--config.eval_every=20", "--config.data.train=train[:90%]",
    "--config.data.validation=train[90%:]",
  )  # fmt: skip
  assert command.wait() == 0, command.err
  screen = command.screen
  # The bar stays, with its last numbers; each line is whole.
  (bar,) = [line for line in screen if line.startswith("pets: 100%")]
  assert "20/20" in bar
  assert "loss" in bar
  (line,) = [line for line in screen if "validation of 6" in line]
  assert re.match(r"\d\d:\d\d:\d\d pets step 20 ", line)
  assert screen.index(line) < screen.index(bar)


def test_ctrl_c_leaves_the_terminal_clean(there, tmp_path):
  command = training(
    there, tmp_path / "run", "--config.total_steps=100000",
    "--config.eval_every=100000", "--config.data.test=",
  )  # fmt: skip
  with command:
    end = time.monotonic() + 300
    while not re.search(r"pets: .*? [1-9]\d*/100000 ", command.err):
      assert time.monotonic() < end, command.err
      assert command.process.poll() is None, command.err
      time.sleep(0.05)
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130
  *_, last, cursor = command.screen
  assert cursor == ""
  assert last.startswith("stopped by Ctrl-C: step ")
  assert last.endswith("Run the same command to resume.")
