"""What a release refuses, on small archives that were made up."""

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT

from release import __main__ as command
from release import addresses, distributions, environments, trials
from release.errors import ReleaseError

VERSION = "1.2.3"
PACKAGE = (
  "memory_vit/__init__.py", "memory_vit/py.typed",
  "memory_vit/configs/quickstart.py", "memory_vit/a/b/c.py",
  "memory_vit/reports/report.css", "memory_vit/serving/page/index.html",
  "memory_vit/serving/page/page.js", "memory_vit/serving/page/page.css",
  "memory_vit/glyphs/README.md", "memory_vit/glyphs/backbone.npz",
  "memory_vit/glyphs/inverted.npz",
)  # fmt: skip
IN_WHEEL = [
  *PACKAGE,
  *(f"memory_vit-{VERSION}.dist-info/{name}" for name in (
    "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
    "licenses/LICENSE",
  )),
]  # fmt: skip
IN_SOURCE = [
  *PACKAGE, "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md",
  "CITATION.cff", "MANIFEST.in", "PKG-INFO", "setup.cfg",
  "memory_vit.egg-info/SOURCES.txt",
]  # fmt: skip


@pytest.fixture
def tools(monkeypatch):
  """The tools of `make release` are not here: what they are asked."""
  asked = []
  monkeypatch.setattr(
    distributions, "_run", lambda *command: asked.append(command)
  )
  return asked


def built(folder, wheel=IN_WHEEL, source=IN_SOURCE, content=b""):
  """Archives of files that all have this content."""
  folder.mkdir(exist_ok=True)
  name = f"memory_vit-{VERSION}"
  with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
    for each in wheel:
      archive.writestr(each, content)
  with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
    for each in source:
      member = tarfile.TarInfo(f"{name}/{each}")
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return folder


def test_archives_that_are_as_they_should_be(tmp_path, tools):
  found = distributions.check(ROOT, built(tmp_path), VERSION)
  assert [path.name for path in found] == [
    f"memory_vit-{VERSION}-py3-none-any.whl", f"memory_vit-{VERSION}.tar.gz",
  ]  # fmt: skip
  (_, _, *twine), (_, *citation) = tools
  assert twine == ["twine", "check", "--strict", *map(str, found)]
  assert citation == ["--validate", "-i", str(ROOT / "CITATION.cff")]


@pytest.mark.parametrize(
  "name",
  [
    "memory_vit/a.env", "memory_vit/x.svg", "memory_vit/token",
    "memory_vit/backbone.npz", "memory_vit/glyphs/token",
    "memory_vit/configs/.py", "memory_vit/page.js",
    "memory_vit/__pycache__/a.pyc", "memory_vit/a.py.orig", "tests/test_a.py",
    "docs/install.md", "setup.py", "release/trials.py", ".git/config",
  ],
)  # fmt: skip
def test_what_does_not_belong_there(tmp_path, tools, name):
  with pytest.raises(ReleaseError, match="not to be there are") as refused:
    distributions.check(ROOT, built(tmp_path, [*IN_WHEEL, name]), VERSION)
  assert name in str(refused.value)
  with pytest.raises(ReleaseError, match=r"tar\.gz.*not to be there are") as e:
    distributions.check(
      ROOT, built(tmp_path, source=[*IN_SOURCE, name]), VERSION
    )
  assert name in str(e.value)


@pytest.mark.parametrize(
  "name",
  [
    "memory_vit/py.typed", "memory_vit/serving/page/page.js",
    "memory_vit/configs/quickstart.py", "memory_vit/reports/report.css",
    "memory_vit/glyphs/backbone.npz", "memory_vit/glyphs/inverted.npz",
    f"memory_vit-{VERSION}.dist-info/licenses/LICENSE",
    f"memory_vit-{VERSION}.dist-info/entry_points.txt",
  ],
)  # fmt: skip
def test_what_a_wheel_lacks(tmp_path, tools, name):
  left = [each for each in IN_WHEEL if each != name]
  with pytest.raises(ReleaseError, match="missing are") as refused:
    distributions.check(ROOT, built(tmp_path, left), VERSION)
  assert name in str(refused.value)


@pytest.mark.parametrize("name", ["LICENSE", "CITATION.cff", PACKAGE[2]])
def test_what_a_source_distribution_lacks(tmp_path, tools, name):
  left = [each for each in IN_SOURCE if each != name]
  with pytest.raises(ReleaseError, match=r"tar\.gz.*missing are") as refused:
    distributions.check(ROOT, built(tmp_path, source=left), VERSION)
  assert name in str(refused.value)


def test_one_that_is_too_large(tmp_path, tools, monkeypatch):
  monkeypatch.setattr(distributions, "_MOST_BYTES", 20_000)
  folder = built(tmp_path, content=b"a" * 2_000)
  with pytest.raises(ReleaseError, match=r"at most 20,000"):
    distributions.check(ROOT, folder, VERSION)


def test_another_version(tmp_path, tools):
  with pytest.raises(ReleaseError, match=r"was built, expected memory_vit-9\."):
    distributions.check(ROOT, built(tmp_path), "9.9.9")
  assert tools == []


def test_a_tool_that_fails():
  with pytest.raises(ReleaseError, match=r"(?s)false failed"):
    distributions._run("false")


@pytest.fixture
def checkout(tmp_path):
  """The beginnings of a checkout, with a file that git does not know."""
  root = tmp_path / "checkout"
  for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md",
               "CITATION.cff", "MANIFEST.in", "configs/quickstart.py",
               "memory_vit/__init__.py"):  # fmt: skip
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, root / name)
  (root / "memory_vit" / "configs").symlink_to("../configs")
  (root / "tests").mkdir()
  (root / "tests" / "test_a.py").touch()
  for arguments in (["init", "--quiet"], ["add", "."]):
    subprocess.run(["git", "-C", root, *arguments], check=True)
  (root / "memory_vit" / "token").touch()
  return root


@pytest.mark.parametrize("address", ["", "https://github.com/a/b"])
def test_what_is_built_is_what_git_knows(checkout, tmp_path, tools, address):
  scratch = tmp_path / "scratch"
  distributions.build(checkout, scratch, VERSION, address)
  source = scratch / "source"
  found = {str(p.relative_to(source)) for p in source.rglob("*.*")}
  assert found == {
    "pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff",
    "MANIFEST.in", "memory_vit/__init__.py", "memory_vit/configs/quickstart.py",
  }  # fmt: skip
  assert not (source / "memory_vit" / "token").exists()
  page = (source / "README.md").read_text(encoding="utf-8")
  assert ("/blob/v1.2.3/docs/install.md" in page) == bool(address)
  project = (source / "pyproject.toml").read_text(encoding="utf-8")
  assert ('Repository = "https://github.com/a/b"\n' in project) == bool(address)
  assert tools == [
    (tools[0][0], "-m", "build", "--outdir", str(scratch / "dist"), str(source))
  ]


# Addresses.


def test_addresses_for_an_index():
  text = '[project.urls]\nPaper = "p"\n'
  assert addresses.project_urls(text, VERSION, "") == text
  assert addresses.project_urls(text, VERSION, "https://github.com/a/b") == (
    "[project.urls]\n"
    'Repository = "https://github.com/a/b"\n'
    'Documentation = "https://github.com/a/b/tree/v1.2.3/docs"\n'
    'Changelog = "https://github.com/a/b/blob/v1.2.3/CHANGELOG.md"\n'
    'Paper = "p"\n'
  )
  with pytest.raises(ReleaseError, match="one table"):
    addresses.project_urls("", VERSION, "https://github.com/a/b")


@pytest.mark.parametrize(
  "text", ["a/b", "http://github.com/a/b", "https://github.com/a",
           "https://github.com/a/b/tree/main", "https://github.com/../b",
           "https://github.com/a/.", "https://github.com/a/..",
           "https://github.com/a/b.git.git"]
)  # fmt: skip
def test_what_is_no_address_of_a_repository(text):
  with pytest.raises(argparse.ArgumentTypeError, match="expected https://git"):
    addresses.repository(text)


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_an_address_of_a_repository(end):
  found = addresses.repository(f"https://github.com/a/b.c{end}")
  assert found == "https://github.com/a/b.c"


def test_an_address_is_given_or_not():
  parse = command._parser().parse_args
  assert parse([]).repository == ""
  assert parse(["--repository=https://github.com/a/b/"]).repository == (
    "https://github.com/a/b"
  )


@pytest.fixture
def named(tmp_path):
  """A checkout with the notebooks and the citation of this one."""
  shutil.copytree(ROOT / "colab", tmp_path / "colab")
  shutil.copyfile(ROOT / "CITATION.cff", tmp_path / "CITATION.cff")
  return tmp_path


def test_notebooks_of_this_version():
  addresses.require_same(ROOT, command.versions.version_of(ROOT), "")


def test_notebooks_of_another_version_are_refused(named):
  with pytest.raises(
    ReleaseError, match=r"v9\.9\.9 of nowhere.*shared_cells\.py, and"
  ):
    addresses.require_same(named, "9.9.9", "")


def test_a_notebook_of_another_place_than_the_others_is_refused(named):
  version = command.versions.version_of(ROOT)
  path = named / "colab" / "many_tasks.ipynb"
  stored = path.read_text(encoding="utf-8")
  for text in (
    stored.replace(*_set_to("x/y")),
    stored.replace("# Many", "[a](https://colab/assets/colab-badge.svg) Many"),
  ):
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"of nowhere: many_tasks\.ipynb"):
      addresses.require_same(named, version, "")


def _set_to(repository):
  """What the set-up of a notebook says before and after it has an address."""
  return r"REPOSITORY = \"\"", rf"REPOSITORY = \"{repository}\""


def test_notebooks_and_citation_name_the_address(named):
  version = command.versions.version_of(ROOT)
  address = "https://github.com/a/b"
  with pytest.raises(ReleaseError, match=r"quickstart.*--repository=a/b"):
    addresses.require_same(named, version, address)
  script = [sys.executable, named / "colab" / "shared_cells.py"]
  (named / "memory_vit").mkdir()
  shutil.copy(ROOT / "memory_vit" / "version.py", named / "memory_vit")
  subprocess.run([*script, "--repository=a/b"], check=True)
  with pytest.raises(ReleaseError, match=f"'repository-code: {address}'"):
    addresses.require_same(named, version, address)
  with (named / "CITATION.cff").open("a") as file:
    file.write(f"repository-code: {address}\n")
  addresses.require_same(named, version, address)


def test_what_is_missing_without_an_address_is_said():
  assert "do not say where the project" in command._leads_to("")
  assert command._leads_to("https://github.com/a/b").endswith("/a/b")


# The program of an installed wheel.


@pytest.fixture
def environment(tmp_path):
  """An environment without anything, made by hand."""
  made = object.__new__(environments.Environment)
  (tmp_path / "bin").mkdir()
  made.work = tmp_path
  made._python, made._log = tmp_path / "bin" / "python", tmp_path / "log.txt"
  made._cache = tmp_path / "cache"
  return made


def test_the_program_says_its_version(environment):
  wheel = environment.work / f"memory_vit-{VERSION}-py3-none-any.whl"
  with pytest.raises(ReleaseError, match="not brought the program memory-vit"):
    trials._require_program(environment, wheel)
  program = environment.work / "bin" / "memory-vit"
  program.write_text("#!/bin/sh\necho 1.2.4\n")
  program.chmod(0o755)
  with pytest.raises(ReleaseError, match=r"'1\.2\.4', not '1\.2\.3'"):
    trials._require_program(environment, wheel)
  program.write_text('#!/bin/sh\ntest "$1" = --version && echo 1.2.3\n')
  trials._require_program(environment, wheel)
