"""Measurements; these programs assert nothing."""
