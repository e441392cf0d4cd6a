"""Make docs/reliability.md from faults.toml and the markers of the tests."""
