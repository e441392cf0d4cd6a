"""Families of published ViTs: their configurations and parameter names."""
