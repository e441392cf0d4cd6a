"""A directory is replaced as a whole, and only by what wrote it."""

import json
import os
import pathlib

import pytest

from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime import files, output_directory

ONE = output_directory.OutputDirectory(
  "--out", output_directory.listed_in("index.json", "one")
)
INDEX = json.dumps({"kind": "one", "files": ["shares/a.png", "b.png"]})


def earlier(path):
  """The output of an earlier command."""
  (path / "shares").mkdir(parents=True)
  (path / "shares" / "a.png").write_bytes(b"old")
  (path / "b.png").write_bytes(b"old")
  (path / "index.json").write_text(INDEX)
  return path


def refused(path, name):
  with pytest.raises(ConfigError, match=r"--out .* unknown files") as error:
    ONE.require_own(str(path))
  assert f"({name!r})" in str(error.value)


def test_free_empty_or_own_directories_are_accepted(tmp_path):
  (tmp_path / "empty").mkdir()
  earlier(tmp_path / "own")
  for name in ("empty", "own", "new", "far/new"):
    assert ONE.require_own(str(tmp_path / name)) == tmp_path / name
  assert not (tmp_path / "new").exists()
  with pytest.raises(ConfigError, match="--out is ''"):
    ONE.require_own("")


@pytest.mark.fault("unfinished-report")
def test_earlier_output_is_replaced_as_a_whole(tmp_path):
  path = earlier(tmp_path / "own")
  with ONE.replacing(path) as new:
    (new / "index.json").write_text(INDEX)
    assert (path / "b.png").exists()
  assert [file.name for file in path.iterdir()] == ["index.json"]
  with pytest.raises(KeyError), ONE.replacing(path) as new:
    raise KeyError
  assert [file.name for file in path.iterdir()] == ["index.json"]
  assert [file.name for file in tmp_path.iterdir()] == ["own"]


@pytest.mark.fault("report-directory")
@pytest.mark.parametrize("name", ["c.png", "shares/b.png"])
def test_foreign_file_is_left_as_it_is(tmp_path, name):
  path = earlier(tmp_path / "own")
  (path / name).write_text("mine")
  refused(path, name)
  assert (path / name).read_text() == "mine"


@pytest.mark.fault("report-directory")
@pytest.mark.parametrize("name", ["mine", "shares/mine", "Thumbs.db/mine"])
def test_file_that_appears_meanwhile_is_left_as_it_is(tmp_path, name):
  """The new output then lies beside it."""
  path = earlier(tmp_path / "own")

  def write():
    with ONE.replacing(ONE.require_own(str(path))) as new:
      (new / "index.json").write_text("new")
      (path / name).parent.mkdir(exist_ok=True)
      (path / name).write_text("mine")

  with pytest.raises(TrainingError, match="holds unknown files") as error:
    write()
  assert (path / name).read_text() == "mine"
  assert (path / "index.json").read_text() == INDEX
  (kept,) = tmp_path.glob("own.new-*")
  assert f"in {kept}: " in str(error.value)
  assert (kept / "index.json").read_text() == "new"
  assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("name", [".DS_Store", "shares/.nfs00000001"])
def test_hidden_files_beside_an_earlier_one_go_with_it(tmp_path, name):
  """Desktops write them: opening a report does not block its replacement."""
  path = earlier(tmp_path / "own")
  (path / name).write_text("")
  with ONE.replacing(ONE.require_own(str(path))) as new:
    (new / "index.json").write_text(INDEX)
  assert [file.name for file in path.iterdir()] == ["index.json"]


@pytest.mark.fault("report-directory")
def test_hidden_files_and_folders_of_others_stay(tmp_path):
  """Such as `.git` in an earlier output, or `.env` in another directory."""
  path = earlier(tmp_path / "own")
  (path / ".git").mkdir()
  (path / ".git" / "HEAD").write_text("")
  refused(path, ".git/HEAD")
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / ".env").write_text("")
  refused(tmp_path / "mine", ".env")


@pytest.mark.fault("report-directory")
@pytest.mark.parametrize("name", [".", "..", "/", "here"])
def test_current_directory_and_mount_points_are_refused(
  tmp_path, monkeypatch, name
):
  """The current directory and those above it, and mount points such as "/"."""
  (tmp_path / "here").mkdir()
  monkeypatch.chdir(tmp_path / "here")
  with pytest.raises(ConfigError, match="--out .* replaced as a whole"):
    ONE.require_own(str(tmp_path / name) if name == "here" else name)
  assert ONE.require_own("there") == tmp_path / "here" / "there"


@pytest.mark.fault("report-directory")
def test_a_mount_point_is_refused_before_anything_is_computed(
  tmp_path, monkeypatch
):
  (tmp_path / "disk").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "disk")
  monkeypatch.setattr(
    output_directory.paths.os.path, "ismount",
    lambda path: path == str(tmp_path / "disk"),
  )  # fmt: skip
  for name in ("disk", "link"):
    inside = tmp_path / name / "results"
    with pytest.raises(ConfigError, match=f"mount point, .* as {inside}"):
      ONE.require_own(str(tmp_path / name))
    assert ONE.require_own(str(inside)) == inside


def test_irreplaceable_directory_is_refused_before_anything_is_computed(
  tmp_path, monkeypatch
):
  """A name too long for the temporary one, and a protected directory."""
  assert ONE.require_own(str(tmp_path / ("ж" * 120))).name == "ж" * 120
  with pytest.raises(ConfigError, match="expected at most 240 bytes"):
    ONE.require_own(str(tmp_path / ("ж" * 121)))
  path = earlier(tmp_path / "own")
  # Root may write everywhere.
  monkeypatch.setattr(os, "access", lambda place, mode: False)
  with pytest.raises(ConfigError, match="protected against writing"):
    ONE.require_own(str(path))


@pytest.mark.fault("kill-during-write")
def test_killed_replacement_is_put_back_and_checked_again(tmp_path):
  """Between the two renames, with and without a foreign file."""
  path, scratch = tmp_path / "own", tmp_path / ".own-0123abcd"
  for strange in (False, True):
    earlier(scratch / "old")
    (scratch / "lock").write_bytes(files.SCRATCH_MARK)
    if strange:
      (scratch / "old" / "mine").write_text("")
      refused(path, "mine")
    else:
      ONE.require_own(str(path))
    assert (path / "b.png").exists()
    assert not scratch.exists()
    path.rename(tmp_path / f"away{strange}")


def test_the_current_directory_is_not_replaced_from_python(
  tmp_path, monkeypatch
):
  """Also without a call of `require_own`."""
  monkeypatch.chdir(tmp_path)
  with (
    pytest.raises(ConfigError, match="current directory"),
    ONE.replacing(tmp_path),
  ):
    raise AssertionError
  assert tmp_path.exists()


def test_empty_folders_are_replaced(tmp_path):
  """A SavedModel has one."""
  path = earlier(tmp_path / "own")
  (path / "assets" / "below").mkdir(parents=True)
  assert ONE.require_own(str(path)) == path


def test_unreadable_folder_is_refused(tmp_path, monkeypatch):
  """Its files must not be lost."""
  path, iterdir = earlier(tmp_path / "own"), pathlib.Path.iterdir

  def unreadable(folder):
    if folder.name == "shares":
      raise PermissionError(13, "Permission denied", str(folder))
    return iterdir(folder)

  monkeypatch.setattr(pathlib.Path, "iterdir", unreadable)
  with pytest.raises(ConfigError, match="cannot be read .Permission denied"):
    ONE.require_own(str(path))


@pytest.mark.parametrize(
  "text",
  [
    "[]", "1", "{", '{"files": 3}', '{"tasks": []}', "[" * 100_000,
    INDEX.replace('"one"', '"other"'), '{"files": ["b.png"]}',
    '{"kind": "one"}', '{"kind": "one", "files": [{}]}',
  ],
)  # fmt: skip
def test_foreign_index_is_refused(tmp_path, text):
  (tmp_path / "index.json").write_text(text)
  refused(tmp_path, "index.json")


def test_links_to_a_directory_stay_and_links_inside_are_not_followed(tmp_path):
  """A link to a directory stays, and a link inside is not followed."""
  real, link = earlier(tmp_path / "real"), tmp_path / "link"
  link.symlink_to(real)
  with ONE.replacing(ONE.require_own(str(link))) as new:
    (new / "index.json").write_text(INDEX)
  assert link.is_symlink()
  assert [file.name for file in real.iterdir()] == ["index.json"]
  (tmp_path / "photos").mkdir()
  (real / "shares").symlink_to(tmp_path / "photos")
  refused(real, "shares")
  (tmp_path / "file").write_text("mine")
  refused(tmp_path / "file", "file")


@pytest.mark.fault("report-directory")
def test_unwritable_directory_is_refused_first(tmp_path, monkeypatch):
  def full(**options):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(output_directory.paths.tempfile, "TemporaryFile", full)
  with pytest.raises(ConfigError, match="nothing can be written"):
    ONE.require_own(str(tmp_path / "new"))
