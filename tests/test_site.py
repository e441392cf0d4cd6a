"""The site of docs/: what can be said of it without building it.

`make docs` builds it, and fails on broken links and anchors, on pages that the
navigation lacks, and on names that are not in the source.
"""

import ast
import html
import pkgutil
import re
import tomllib
from types import FunctionType

import pytest
import yaml
from conftest import ROOT, random_task, tiny_backbone

import memory_vit as mv
from docs.drawings import layers, masks
from docs.drawings.pictures import PICTURES
from memory_vit.model.masks import attention_graph

API = ROOT / "docs" / "api"


class _Loader(yaml.SafeLoader):
  """Reads mkdocs.yml; what is made by a call of Python is left out."""


_LOADER_TAG = "tag:yaml.org,2002:python/object/apply:"
_Loader.add_multi_constructor(_LOADER_TAG, lambda *_: None)


def site():
  return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages(nav):
  for entry in nav:
    for value in entry.values():
      yield from [value] if isinstance(value, str) else pages(value)


def shown(page):
  """Names that a page of the API shows."""
  return re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)


def test_api_pages_show_every_public_name():
  names = shown(API / "index.md")
  assert sorted(names) == sorted(f"memory_vit.{n}" for n in mv.__all__)


def test_api_pages_show_every_plot():
  names = shown(API / "plots.md")
  assert set(names) >= {
    f"memory_vit.plots.{n}" for n in exported("memory_vit.plots")
  }


def exported(module):
  """`__all__` of a subpackage, which is not imported; None of a module."""
  path = ROOT / module.replace(".", "/") / "__init__.py"
  if not path.is_file():
    return None
  listed = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.M | re.S)
  return ast.literal_eval(listed[1])


@pytest.mark.parametrize(
  "page", sorted(API.glob("*.md")), ids=lambda page: page.name
)
def test_names_on_api_pages_are_exported(page):
  """That it is there, the build says."""
  assert shown(page)
  for path in shown(page):
    module, _, name = path.rpartition(".")
    names = exported(module)
    assert names is None or name in names, path


def undocumented(path):
  """A name that a page of the API shows, and its members, without docstring."""
  thing = pkgutil.resolve_name(path)
  if not isinstance(thing, type | FunctionType):
    return []  # the name of a type such as dict[str, ...]
  members = vars(thing).items() if isinstance(thing, type) else ()
  fields = getattr(thing, "__annotations__", {})
  documented = {path: thing.__doc__} | {
    f"{path}.{name}": member.__doc__
    for name, member in members
    if not name.startswith("_")
    and name not in fields
    and isinstance(member, FunctionType | property | classmethod | staticmethod)
  }
  # A dataclass without a docstring gets its signature as one.
  return [
    name
    for name, text in documented.items()
    if not text or text.startswith(f"{thing.__name__}(")
  ]


@pytest.mark.parametrize(
  "page", sorted(API.glob("*.md")), ids=lambda page: page.name
)
def test_public_names_are_documented(page):
  assert [name for path in shown(page) for name in undocumented(path)] == []


def test_each_page_is_in_the_navigation_once():
  found = list(pages(site()["nav"]))
  written = {str(p.relative_to(ROOT / "docs")) for p in API.glob("*.md")}
  written |= {page.name for page in (ROOT / "docs").glob("*.md")}
  for folder in ("reference", "dev"):
    found_in = (ROOT / "docs" / folder).glob("*.md")
    written |= {f"{folder}/{page.name}" for page in found_in}
  generated = {"index.md", "contributing.md", "changelog.md"}
  assert len(found) == len(set(found))
  assert set(found) - generated == written


def test_site_needs_no_network():
  theme = site()["theme"]
  assert (theme["name"], theme["highlightjs"]) == ("mkdocs", False)
  assert not any(
    "//" in path for path in [*site()["extra_css"], *site()["hooks"]]
  )
  assert "```mermaid" not in "".join(
    page.read_text() for page in (ROOT / "docs").rglob("*.md")
  )


def test_warnings_of_the_build_are_errors():
  assert site()["strict"] is True
  recipe = re.search(
    r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M
  )
  assert "--strict" in recipe[1]
  assert "quiet" not in recipe[1]
  assert " docs | " in (ROOT / ".ci" / "run").read_text()


def test_docs_extra_has_the_site_generator():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extra = project["optional-dependencies"]["docs"]
  assert any(line.startswith("properdocs>=") for line in extra)


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_up_to_date(name):
  written = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
  assert written == PICTURES[name]().svg(), "run python -m docs.drawings"


def test_layer_of_commands_is_highlighted():
  box = r'<rect [^>]*class="learned"[^>]*/>\s*<text [^>]*>([^<]*)<'
  assert re.findall(box, layers.draw().svg()) == ["commands"]


@pytest.mark.parametrize("name", PICTURES)
def test_words_stay_within_their_drawing(name):
  """By the width of a wide letter, as no font is at hand."""
  canvas = PICTURES[name]()
  words = r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)" ' + (
    r'font-size="(\d+)"[^>]*>([^<]*)<'
  )
  found = re.findall(words, canvas.svg())
  assert found
  for x, y, anchor, size, text in found:
    width = 0.55 * float(size) * len(html.unescape(text))
    left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
    assert left >= 0, text
    assert left + width <= canvas.width, text
    assert 0 < float(y) < canvas.height, text
    assert float(size) >= 14, text


def test_drawn_mask_equals_that_of_the_model():
  backbone = tiny_backbone(depth=1)
  made = {}
  for name in ("pets", "birds", "breeds"):
    parents = [made[parent] for parent in masks.READS.get(name, ())]
    made[name] = random_task(backbone, name, attends_to=parents)
  graph = attention_graph([task.spec for task in made.values()])
  drawn = [[masks.sees(query, key) for key in made] for query in made]
  assert drawn == graph.tolist()
  assert all(masks.sees(query, None) for query in (None, *made))
  assert not any(masks.sees(None, key) for key in made)
