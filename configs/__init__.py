"""Configurations: each sets a few options of `base`."""
