"""Build a release, and try it where a user would: see `make release`."""
