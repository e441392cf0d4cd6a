"""What executes the docs: a command that fails is seen."""

import pytest
from doc_shell import Shell, made_small

pytestmark = pytest.mark.processes


@pytest.fixture
def shell(tmp_path):
  made = Shell(tmp_path)
  yield made
  made.close()


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("false\ntrue", "status 1"),
    ("false | cat", "status 1"),
    ("nonesuch --help", "not found"),
    ("echo $UNSET_NAME", "unbound variable"),
    ("memory-vit inspect absent.npz", "status 2"),
    ("memory-vit inspect --nope", "the command line: "),
    ("memory-vit nonesuch", "status 2"),
    ("curl http://127.0.0.1:9/", "status 7"),
    ("python -c 'raise SystemExit(3)'", "status 3"),
  ],
)
def test_failing_commands_are_noticed(shell, text, said):
  with pytest.raises(AssertionError, match=said):
    shell.run(text)


def test_commands_run_as_in_a_shell(shell, tmp_path):
  """With variables, pipes, another directory, and the process that asks."""
  (tmp_path / "inner").mkdir()
  printed = shell.run(
    "cd inner\n"
    "A=3 python -c 'import os; print(os.environ[\"A\"], os.getcwd())'\n"
    "memory-vit inspect --help | grep -c usage\n"
    "docker build .  # there is none, and it is left out\n"
  )
  assert printed.splitlines() == [f"3 {tmp_path / 'inner'}", "1"]
  assert shell.ran == ["inspect"]


def test_small_flag_replaces_the_flag_of_the_page():
  command = [
    "-m",
    "memory_vit",
    "train",
    "--config.total_steps=500",
    "--workdir=a",
  ]
  small = made_small(command)
  assert "--config.total_steps=500" not in small
  assert "--config.total_steps=2" in small
  assert small[:4] == ["-m", "memory_vit", "train", "--workdir=a"]
