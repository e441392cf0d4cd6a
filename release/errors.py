"""Error that stops a release."""


class ReleaseError(Exception):
  """Something that has to be put right before a release, in one line."""
