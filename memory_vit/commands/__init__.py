"""The commands, a file for each, and what they share: flags, help, errors."""
