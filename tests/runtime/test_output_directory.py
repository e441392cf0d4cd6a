"""A directory is replaced as a whole, and only by what wrote it."""

import os

import pytest

from memory_vit.errors import ConfigError
from memory_vit.runtime import output_directory

ONE = output_directory.OutputDirectory(
  "--out", "index.json", lambda values: values["files"]
)
INDEX = '{"files": ["shares/a.png", "b.png"]}'


def earlier(path):
  """What an earlier command wrote."""
  (path / "shares").mkdir(parents=True)
  (path / "shares" / "a.png").write_bytes(b"old")
  (path / "b.png").write_bytes(b"old")
  (path / "index.json").write_text(INDEX)
  return path


def refused(path, name):
  with pytest.raises(ConfigError, match=r"--out .* something else") as error:
    ONE.claim(str(path))
  assert f"({name!r})" in str(error.value)


def test_what_is_free_or_empty_or_its_own_is_taken(tmp_path):
  (tmp_path / "empty").mkdir()
  earlier(tmp_path / "own")
  for name in ("empty", "own", "new", "far/new"):
    assert ONE.claim(str(tmp_path / name)) == tmp_path / name
  assert not (tmp_path / "new").exists()
  with pytest.raises(ConfigError, match="--out is ''"):
    ONE.claim("")


def test_it_is_replaced_as_a_whole(tmp_path):
  path = earlier(tmp_path / "own")
  with ONE.replacing(path) as new:
    (new / "index.json").write_text('{"files": []}')
    assert (path / "b.png").exists()
  assert [file.name for file in path.iterdir()] == ["index.json"]
  with pytest.raises(KeyError), ONE.replacing(path) as new:
    raise KeyError
  assert [file.name for file in path.iterdir()] == ["index.json"]
  assert [file.name for file in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize("name", ["c.png", "shares/b.png"])
def test_a_file_of_others_is_left_as_it_is(tmp_path, name):
  path = earlier(tmp_path / "own")
  (path / name).write_text("mine")
  refused(path, name)
  with pytest.raises(ConfigError), ONE.replacing(path):
    pass
  assert (path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["mine", "shares/mine"])
def test_a_folder_of_others_is_left_even_where_it_is_empty(tmp_path, name):
  path = earlier(tmp_path / "own")
  (path / name).mkdir()
  refused(path, name)


def test_folders_alone_are_of_others(tmp_path):
  (tmp_path / "tree" / "below").mkdir(parents=True)
  refused(tmp_path / "tree", "below")


def test_nothing_behind_a_stranger_is_looked_at(tmp_path, monkeypatch):
  (tmp_path / "home" / "deep" / "deeper").mkdir(parents=True)
  real, seen = os.scandir, []

  def scandir(path):
    seen.append(path)
    return real(path)

  monkeypatch.setattr(output_directory.os, "scandir", scandir)
  refused(tmp_path / "home", "deep")
  assert seen == [tmp_path / "home"]


@pytest.mark.parametrize(
  "text", ["[]", "1", "{", '{"files": 3}', '{"tasks": []}', "[" * 100_000]
)
def test_an_index_of_something_else_is_not_believed(tmp_path, text):
  (tmp_path / "index.json").write_text(text)
  refused(tmp_path, "index.json")


def test_links(tmp_path):
  """One to a directory stays, one to nowhere is refused, one inside too."""
  real, link = earlier(tmp_path / "real"), tmp_path / "link"
  link.symlink_to(real)
  with ONE.replacing(ONE.claim(str(link))) as new:
    (new / "index.json").write_text(INDEX)
  assert link.is_symlink()
  assert [file.name for file in real.iterdir()] == ["index.json"]
  (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
  refused(tmp_path / "lost", "lost")
  (real / "b.png").symlink_to(tmp_path / "photo.png")
  refused(real, "b.png")
  (tmp_path / "file").write_text("mine")
  refused(tmp_path / "file", "file")


def test_where_nothing_can_be_written_is_said_first(tmp_path, monkeypatch):
  def full(**options):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(output_directory.paths.tempfile, "TemporaryFile", full)
  with pytest.raises(ConfigError, match="nothing can be written"):
    ONE.claim(str(tmp_path / "new"))
