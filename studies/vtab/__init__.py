"""VTAB-1k by one command: 19 tasks of 1,000 images each, made of runs."""
