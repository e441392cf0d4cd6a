"""Walking folders of images: what is found, in which order, what is skipped."""

import os

import fake_data
import pytest

from memory_vit.images import image_files


def write(root, *names):
  for name in names:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
  return root


def test_everything_below_is_found_and_what_is_skipped_is_counted(tmp_path):
  names = ("b/2.PNG", "b/deep/er/1.jpg", "a/3.gif", "top.webp", "a/notes.txt",
           "b/deep/x.parquet", ".git/1.png", "a/.DS_Store")  # fmt: skip
  write(tmp_path, *names)
  found = image_files.walk(str(tmp_path))

  def below(paths):
    return [os.path.relpath(path, tmp_path) for path in paths]

  assert below(found.images) == [
    "a/3.gif", "b/2.PNG", "b/deep/er/1.jpg", "top.webp",
  ]  # fmt: skip
  assert below(found.others) == ["a/notes.txt", "b/deep/x.parquet"]
  assert below(found.hidden) == [".git", "a/.DS_Store"]
  assert found.irregular == found.loops == []
  assert found.closed == {}
  entries = image_files.find_images([str(tmp_path)])
  assert [entry.path for entry in entries] == found.images


@pytest.mark.fault("broken-image")
def test_links_are_followed_but_never_in_a_circle(tmp_path):
  write(tmp_path, "data/a/1.png", "elsewhere/2.png", "elsewhere/sub/3.png")
  (tmp_path / "data/b").symlink_to("../elsewhere")
  (tmp_path / "data/a/up").symlink_to("..")
  (tmp_path / "data/a/same").symlink_to(".")
  (tmp_path / "elsewhere/sub/back").symlink_to("..")
  (tmp_path / "data/a/x.png").symlink_to("x.png")
  (tmp_path / "data/y").symlink_to("y")
  data = tmp_path / "data"
  found = image_files.walk(str(data))
  assert [os.path.relpath(path, data) for path in found.images] == [
    "a/1.png", "a/x.png", "b/2.png", "b/sub/3.png",
  ]  # fmt: skip
  assert found.irregular == [str(data / "a/x.png")]
  assert found.loops == [
    str(data / name) for name in ("a/same", "a/up", "b/sub/back")
  ]
  assert found.others == [str(data / "y")]


def test_folders_that_link_to_each_other_are_read_once(tmp_path):
  """Each of 27 folders links to two of the others."""
  names = [chr(ord("a") + i) for i in range(26)]
  write(tmp_path, *(f"{name}/{i}.png" for i, name in enumerate(names)))
  for i, name in enumerate(names):
    for other in (names[i - 1], names[i - 2]):
      (tmp_path / name / f"to-{other}").symlink_to(f"../{other}")
  (tmp_path / "0").symlink_to("a")
  write(tmp_path.parent / f"{tmp_path.name}-pool", "deep/x.png")
  for name in ("z2", "a2"):
    (tmp_path / name).symlink_to(f"../{tmp_path.name}-pool")
  found = image_files.walk(str(tmp_path))
  assert [path.rpartition("/")[2] for path in found.images] == [
    "0.png", "x.png", *(f"{i}.png" for i in range(1, 26)),
  ]  # fmt: skip
  assert found.images[1] == str(tmp_path / "a2/deep/x.png")
  assert len(found.loops) == 2 * 26 + 2


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
  write(tmp_path, "a/1.png", "closed/2.png")
  listed = os.scandir

  def scandir(path):
    if str(path).endswith("closed"):
      raise PermissionError(13, "Permission denied")
    return listed(path)

  monkeypatch.setattr(os, "scandir", scandir)
  found = image_files.walk(str(tmp_path))
  assert found.images == [str(tmp_path / "a/1.png")]
  assert found.closed == {str(tmp_path / "closed"): "Permission denied"}
  first, second = image_files.find_images([str(tmp_path)])
  assert (first.path, first.reason) == (
    str(tmp_path / "closed"), "Permission denied",
  )  # fmt: skip
  assert second.path == str(tmp_path / "a/1.png")


def test_of_a_flat_folder_the_order_is_that_of_the_names(tmp_path):
  names = ["a-b/1.png", "a/1.png", "a/10.png", "a/2.png", "é/1.png"]
  fake_data.write_folder(tmp_path, {
    "a-b": ["1.png"], "a": ["1.png", "10.png", "2.png"], "é": ["1.png"],
  })  # fmt: skip
  found = image_files.walk(str(tmp_path)).images
  assert found == [str(tmp_path / name) for name in names]
