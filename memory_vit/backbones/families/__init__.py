"""Families of published ViTs: their configurations and names to ours."""
