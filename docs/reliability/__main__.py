"""Write docs/dev/reliability.md: `python -m docs.reliability`."""

from pathlib import Path

from docs.reliability.page import render

path = Path(__file__).resolve().parents[1] / "dev" / "reliability.md"
path.write_text(render(), encoding="utf-8")
print(path)
