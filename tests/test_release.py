"""What a release holds and says: what a user would be hurt by.

`make release` builds the archives, and tries them; here they are made up.
"""

import io
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from conftest import ROOT

import memory_vit as mv
from release import addresses, distributions, readme, versions
from release.errors import ReleaseError

VERSION = "1.2.3"
IN_BOTH = [
  "memory_vit/__init__.py", "memory_vit/py.typed",
  "memory_vit/configs/quickstart.py", "memory_vit/a/b/c.py",
  "memory_vit/reports/report.css", "memory_vit/serving/page/index.html",
  "memory_vit/serving/page/page.js", "memory_vit/serving/page/page.css",
  "memory_vit/glyphs/README.md", "memory_vit/glyphs/backbone.npz",
  "memory_vit/glyphs/inverted.npz", "memory_vit/runtime/h100.txt",
]  # fmt: skip
IN_WHEEL = [
  *IN_BOTH,
  *(f"memory_vit-{VERSION}.dist-info/{name}" for name in (
    "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
    "licenses/LICENSE",
  )),
]  # fmt: skip
IN_SOURCE = [
  *IN_BOTH, "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md",
  "CITATION.cff", "MANIFEST.in", "PKG-INFO", "setup.cfg",
  "memory_vit.egg-info/SOURCES.txt",
]  # fmt: skip
PRIVATE = [
  "memory_vit/a.env", "memory_vit/token", "memory_vit/glyphs/token",
  "memory_vit/configs/.py", "memory_vit/__pycache__/a.pyc",
  "memory_vit/a.py.orig", "tests/test_a.py", "release/trials.py", ".git/config",
]  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
  """The commands that a release would run: its tools are not here."""
  commands = []
  monkeypatch.setattr(
    distributions, "_run", lambda *command: commands.append(command)
  )
  return commands


def made_up(folder, wheel=IN_WHEEL, source=IN_SOURCE):
  """A folder with archives of empty files."""
  folder.mkdir(exist_ok=True)
  name = f"memory_vit-{VERSION}"
  with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
    for each in wheel:
      archive.writestr(each, b"")
  with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
    for each in source:
      archive.addfile(tarfile.TarInfo(f"{name}/{each}"), io.BytesIO())
  return folder


def test_archives_hold_all_needed_files_and_no_private_ones(tmp_path, asked):
  def check(*lists):
    return distributions.check(ROOT, made_up(tmp_path, *lists), VERSION)

  assert len(check()) == 2
  for name in PRIVATE:
    for lists in ([*IN_WHEEL, name], IN_SOURCE), (IN_WHEEL, [*IN_SOURCE, name]):
      with pytest.raises(ReleaseError, match=rf"not to be .*{re.escape(name)}"):
        check(*lists)
  licence = f"memory_vit-{VERSION}.dist-info/licenses/LICENSE"
  for name in (
    licence,
    "memory_vit/py.typed",
    "memory_vit/glyphs/backbone.npz",
  ):
    left = [each for each in IN_WHEEL if each != name]
    with pytest.raises(ReleaseError, match=rf"missing are .*{name}"):
      check(left)
  left = [each for each in IN_SOURCE if each != "LICENSE"]
  with pytest.raises(ReleaseError, match=r"tar\.gz.*missing are .*LICENSE"):
    check(IN_WHEEL, left)


def test_only_files_known_to_git_are_packed(tmp_path, asked):
  root = tmp_path / "checkout"
  known = {
    "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
    "MANIFEST.in", "configs/quickstart.py", "memory_vit/__init__.py",
  }  # fmt: skip
  for name in (*known, "tests/conftest.py"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, root / name)
  (root / "memory_vit" / "configs").symlink_to("../configs")
  for arguments in (["init", "--quiet"], ["add", "."]):
    subprocess.run(["git", "-C", root, *arguments], check=True)
  (root / "memory_vit" / "token.py").touch()
  distributions.build(root, tmp_path / "scratch", VERSION, repository="")
  source = tmp_path / "scratch" / "source"
  found = {
    path.relative_to(source).as_posix()
    for path in source.rglob("*")
    if path.is_file()
  }
  packed = {"configs/quickstart.py": "memory_vit/configs/quickstart.py"}
  assert found == {packed.get(name, name) for name in known}
  assert asked[0][1:3] == ("-m", "build")


def test_package_changelog_citation_and_notebooks_state_one_version(tmp_path):
  assert versions.version_of(ROOT) == mv.__version__
  addresses.require_same(ROOT, mv.__version__, "")
  for name in ("memory_vit/version.py", "CHANGELOG.md", "CITATION.cff"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, tmp_path / name)
  path = tmp_path / "CITATION.cff"
  path.write_text(path.read_text().replace(mv.__version__, "9.9.9"))
  with pytest.raises(ReleaseError, match=r"versions differ.*9\.9\.9"):
    versions.version_of(tmp_path)
  shutil.copytree(ROOT / "colab", tmp_path / "colab")
  with pytest.raises(ReleaseError, match=r"v9\.9\.9 of nowhere"):
    addresses.require_same(tmp_path, "9.9.9", "")


@pytest.mark.parametrize("repository", ["", "https://example.org/memory_vit"])
def test_readme_on_a_package_index_has_only_absolute_links(repository):
  """An index takes a relative link for one to itself."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  shown = readme.for_index(text, mv.__version__, repository)
  prose = re.sub(r"(?ms)^```.*?^```$", "", shown)
  links = re.findall(r"\]\(([^)]*)\)", prose)
  assert [each for each in links if not each.startswith("https://")] == []
  assert "https://arxiv.org/abs/2203.15243" in links
  assert ("docs/install.md" in shown) == bool(repository)
  for part in ("pip install 'memory_vit[train]'", "## In Python", "```bibtex"):
    assert part in shown
