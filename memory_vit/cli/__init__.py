"""Shared by the commands: flags, configuration, and errors in one line."""
