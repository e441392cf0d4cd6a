"""Processes, signals, locks, files, devices. Knows no Vision Transformer."""
