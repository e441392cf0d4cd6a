"""Make docs/dev/reliability.md from faults.toml and the markers of the tests."""
