"""What the commands share: flags, configuration, and errors in one line."""
