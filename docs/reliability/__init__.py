"""Make docs/dev/reliability.md from faults.toml and markers of the tests."""
