"""What a type checker, and with it an editor, sees of the public API."""

import re

import pytest
from conftest import ROOT
from mypy import api

import memory_vit as mv

PROGRAM = """
import jax
import memory_vit as mv

backbone = mv.load_backbone("augreg-B/32")
tasks = mv.load_tasks(["pets", "birds"], backbone)
new = mv.init_task(jax.random.key(0), backbone, name="new", num_classes=2)
images = mv.preprocess("cat.jpg", tasks)
logits = mv.forward(backbone, [*tasks, new], images)
reveal_type(backbone)
reveal_type(tasks)
reveal_type(new)
reveal_type(logits)
mv.save_task(new, "new")
"""
# With the error that each makes.
MISTAKES = {
  "mv.load_backbone(32)": "arg-type",
  "mv.forward(backbone, tasks)": "call-arg",
  "tasks.names": "attr-defined",
  "mv.load_tusks": "attr-defined",
}


def check(directory, monkeypatch, lines):
  """Checks a program of a user: exit status, what mypy says of its lines."""
  program = directory / "program.py"
  program.write_text(lines)
  monkeypatch.setenv("MYPYPATH", str(ROOT))
  # As of an installed package, errors within it are not shown.
  found, said, status = api.run(
    [
      "--config-file=",
      "--strict",
      "--follow-imports=silent",
      f"--cache-dir={directory / 'cache'}",
      str(program),
    ]
  )
  assert not said
  return status, found


@pytest.mark.slow
def test_program_on_the_public_api_passes_mypy(tmp_path, monkeypatch):
  assert (ROOT / "memory_vit" / "py.typed").is_file()
  status, found = check(tmp_path, monkeypatch, PROGRAM)
  assert status == 0, found
  *others, logits = re.findall(r'Revealed type is "(.*)"', found)
  assert others == [
    "memory_vit.model.backbone.Backbone",
    "memory_vit.tasks.compose.Tasks",
    "memory_vit.model.task.Task",
  ]
  # Where the class lies is an affair of jax.
  assert re.fullmatch(r"dict\[str, jax\.[\w.]+\.Array\]", logits)
  public = "".join(f"reveal_type(mv.{name})\n" for name in mv.__all__)
  status, found = check(tmp_path, monkeypatch, PROGRAM + public)
  assert status == 0, found
  assert 'Revealed type is "Any"' not in found
  wrong = PROGRAM + "\n".join(MISTAKES)
  status, found = check(tmp_path, monkeypatch, wrong)
  assert status == 1
  assert re.findall(r"error: .*\[(.*)\]", found) == [*MISTAKES.values()]
