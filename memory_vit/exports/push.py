"""Push tasks to the Hugging Face hub, in one commit."""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import tempfile
from pathlib import Path

from memory_vit.errors import ExportError, TaskError
from memory_vit.exports import model_card
from memory_vit.runtime import hub
from memory_vit.runtime.messages import brief, name_list
from memory_vit.tasks import compose, store
from memory_vit.tasks.compose import TasksLike


def push_task(
  task: TasksLike,
  repository: str,
  *,
  public: bool = False,
  message: str | None = None,
  card: bool = False,
) -> str:
  """Upload tasks to the Hugging Face hub as NAME.safetensors, in one commit.

  `load_task("hf://OWNER/NAME", backbone)` reads a pushed task. The access token
  comes from `hf auth login`, or from HF_TOKEN.

  Args:
    task: a task, or several that fit together, as for `concatenate`. A task of
      the same name in the repository is replaced.
    repository: OWNER/NAME; the repository is created if it does not exist.
    public: whether a new repository is public. An existing repository stays
      public or private.
    message: message of the commit.
    card: whether to replace an existing README.md by the model card. By
      default, an existing README.md is kept, because people edit it.

  Returns:
    The address of the new commit, or of the last commit if nothing has changed.

  Raises:
    TaskError: for tasks that do not fit together, or cannot be saved.
    ExportError: if the name of the repository is invalid, or if the hub refuses
      or cannot be reached.
  """
  tasks = compose.task_tuple(task)
  if not tasks:
    raise TaskError("there is no task to push.")
  if len(tasks) > 1:
    compose.require_fit(tasks)
  address = hub.parse(f"{hub.PREFIX}{repository}")
  if not address or address.repository != repository:
    raise ExportError(
      f"{brief(repository)} is not a repository: expected OWNER/NAME."
    )
  library = hub.library("push", ExportError)
  api, added = library.HfApi(), library.CommitOperationAdd
  names = name_list([task.name for task in tasks])
  with tempfile.TemporaryDirectory() as folder:
    files = [Path(folder) / f"{task.name}.safetensors" for task in tasks]
    for pushed, file in zip(tasks, files, strict=True):
      store.save_task(pushed, file)
    text = model_card.to_text(tasks, str(address))
    with hub.asking(f"push to {repository}", ExportError):
      api.create_repo(repository, private=not public, exist_ok=True)
      operations = [added(file.name, file) for file in files]
      if card or not api.file_exists(repository, model_card.FILE):
        operations.append(added(model_card.FILE, text.encode()))
      commit = api.create_commit(
        repository, operations, commit_message=message or f"Push {names}"
      )
  return str(commit.commit_url)
