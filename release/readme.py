"""The README as a package index shows it, where relative links lead nowhere."""

import re

_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)([^)\s]+)\)\n*", re.M)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def for_index(text: str, version: str, repository: str = "") -> str:
  """Make links of a README absolute, or plain text.

  Args:
    text: of the README, whose links are relative to the checkout.
    version: whose tag, "v1.2.3", the links are to lead to.
    repository: the address of the repository, as a browser opens it; where
      there is none, names of files stay as text, and images are left out.
  """
  if not repository:
    return _LINK.sub(_as_text, _IMAGE.sub("", text))
  base = repository.rstrip("/")
  text = _IMAGE.sub(
    lambda m: m[0].replace(m[1], f"{base}/raw/v{version}/{m[1]}"), text
  )
  return _LINK.sub(rf"[\1]({base}/blob/v{version}/\2)", text)


def _as_text(link: re.Match[str]) -> str:
  """The words of a link, and the file unless they name it."""
  words, target = link[1], link[2].partition("#")[0]
  return words if target.endswith(words) else f"{words} ({target})"
