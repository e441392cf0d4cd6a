"""Files that state the version agree, and archives hold what they have to."""

import datetime
import shutil
import subprocess

import pytest
import yaml
from conftest import ROOT

import memory_vit as mv
from release import distributions, readme, versions
from release.errors import ReleaseError

FILES = ("memory_vit/version.py", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture
def checkout(tmp_path):
  """The files of this checkout that state a version."""
  for name in FILES:
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, copy)
  return tmp_path


def test_they_agree():
  assert versions.version_of(ROOT) == mv.__version__


@pytest.mark.parametrize("name", FILES)
def test_one_that_differs_is_named(checkout, name):
  path = checkout / name
  text = path.read_text()
  assert mv.__version__ in text
  path.write_text(text.replace(mv.__version__, "9.9.9"))
  with pytest.raises(ReleaseError, match=r"versions differ.*9\.9\.9"):
    versions.version_of(checkout)


def test_dates_that_differ_are_named(checkout):
  path = checkout / "CITATION.cff"
  path.write_text(path.read_text().replace("2026-11-23", "2026-11-24"))
  with pytest.raises(ReleaseError, match="2026-11-23 in CHANGELOG.md"):
    versions.version_of(checkout)


@pytest.mark.parametrize(
  ("name", "line"),
  [("CHANGELOG.md", "## ["), ("CITATION.cff", "version:")],
)
def test_one_that_states_nothing_is_named(checkout, name, line):
  path = checkout / name
  path.write_text(path.read_text().replace(line, "gone "))
  with pytest.raises(ReleaseError, match=name):
    versions.version_of(checkout)


def test_the_citation():
  """The software is ours, and the paper is to be cited.

  `make release` checks the file against its schema.
  """
  text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
  values = yaml.safe_load(text)
  assert values["cff-version"] == "1.2.0"
  assert values["type"] == "software"
  assert values["license"] == "Apache-2.0"
  assert isinstance(values["date-released"], datetime.date)
  assert values["message"]
  assert values["authors"]
  paper = values["preferred-citation"]
  assert paper["type"] == "conference-paper"
  names = [author["family-names"] for author in paper["authors"]]
  bibtex = (ROOT / "README.md").read_text().partition("@inproceedings")[2]
  for said in (paper["title"], str(paper["year"]), *names, str(paper["end"])):
    assert said in bibtex


def test_readme_with_an_address():
  text = (
    "![a](docs/a.svg)\n\nSee [b](docs/b.md#c), [d](https://d.org), [e](#e).\n"
  )
  assert readme.for_index(text, "1.2.3", "https://r.org/x/") == (
    "![a](https://r.org/x/raw/v1.2.3/docs/a.svg)\n\n"
    "See [b](https://r.org/x/blob/v1.2.3/docs/b.md#c), [d](https://d.org), "
    "[e](#e).\n"
  )


def test_readme_without_an_address():
  text = """# a

![a](docs/a.svg)

Some [b](https://b.org), [e](#e).

See [b](docs/b.md#c).

## Begin in a checkout

```
make all
```

On Linux.

## c

```
pip install .      # one
pip install '.[x]'
```

- one
- two, in [docs/d.md](docs/d.md)

### d

![a](docs/a.svg)

## e

```python
x = [y](docs)

z = 1
```
"""
  assert (
    readme.for_index(text, "1.2.3")
    == """# a

Some [b](https://b.org), [e](#e).

## c

```
pip install memory_vit      # one
pip install 'memory_vit[x]'
```

## e

```python
x = [y](docs)

z = 1
```
"""
  )


CODE = """```python
f = d["k"](y)
![a](a)
```"""
INDENTED = """  ```
  f = d["k"](y)

  z = 1
  ```"""


def test_code_of_a_readme_stays():
  text = f"Some:\n{CODE}\n\n- b:\n\n{INDENTED}\n"
  for repository in ("", "https://r.org/x"):
    assert readme.for_index(text, "1.2.3", repository) == text


def test_words_beside_code_are_no_code():
  text = f"{CODE}\nSee [b](c).\n\n{INDENTED}\n"
  assert readme.for_index(text, "1.2.3") == f"{INDENTED}\n"
  shown = readme.for_index(text, "1.2.3", "https://r.org")
  assert shown == (
    f"{CODE}\nSee [b](https://r.org/blob/v1.2.3/c).\n\n{INDENTED}\n"
  )


def test_an_image_whose_words_hold_its_path():
  shown = readme.for_index("![see a.svg](a.svg)\n", "1.2.3", "https://r.org")
  assert shown == "![see a.svg](https://r.org/raw/v1.2.3/a.svg)\n"


def test_no_relative_link_is_left_in_our_readme():
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  for repository in ("", "https://example.org/memory_vit"):
    shown = readme.for_index(text, "1.2.3", repository)
    assert "](docs/" not in shown
    assert "](../" not in shown
    assert "](https://arxiv.org/abs/2203.15243)" in shown
    assert "```bibtex" in shown


def test_without_an_address_our_readme_leads_to_no_file():
  """It stands alone in an index: nothing is there but what pip installs."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  shown = readme.for_index(text, "1.2.3")
  for part in ("docs/", "colab/", "configs/", ".venv", "make ", "checkout",
               "## Documentation", "drawing", ".md"):  # fmt: skip
    assert part not in shown, part
  for part in ("pip install 'memory_vit[train]'", "memory-vit train --config",
               "## In Python", "what it costs", "Apache License"):  # fmt: skip
    assert part in shown, part


def test_a_checkout_with_changes_is_refused(tmp_path):
  def git(*arguments):
    subprocess.run(["git", "-C", tmp_path, *arguments], check=True)

  git("init", "--quiet")
  distributions.require_clean(tmp_path)
  (tmp_path / "new.py").write_text("")
  with pytest.raises(ReleaseError, match=r"\(1 files, such as new.py"):
    distributions.require_clean(tmp_path)
