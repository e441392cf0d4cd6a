"""Configurations: short differences from `base`."""
