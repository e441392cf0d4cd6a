"""A report in a browser: nothing is loaded, nothing runs, all can be read."""

import shutil

import pytest
from test_reports import EVIL, evaluation_of, usual

from memory_vit import reports

pytestmark = [pytest.mark.slow, pytest.mark.processes]
_FLAGS = (
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
  "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture
def browser():
  chromium = shutil.which("chromium") or shutil.which("chromium-browser")
  if chromium is None:
    pytest.skip("no chromium is installed")
  api = pytest.importorskip("playwright.sync_api", reason="no playwright")
  with api.sync_playwright() as playwright:
    found = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
    yield found
    found.close()


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_readable_everywhere(browser, tmp_path, width, scheme):
  reports.write_reports(tmp_path / "report", [evaluation_of(usual())])
  context = browser.new_context(
    viewport={"width": width, "height": 800}, color_scheme=scheme
  )
  opened = context.new_page()
  said, asked = [], []
  opened.on("console", lambda message: said.append(message.text))
  opened.on("pageerror", lambda error: said.append(str(error)))
  opened.on("request", lambda request: asked.append(request.url))
  address = reports.first_page(tmp_path / "report").as_uri()
  opened.goto(address)
  assert opened.title() == "digits"  # and not what a class name sets
  assert EVIL in opened.inner_text("main")
  # The style is in force: its hash is that of the policy.
  back = "getComputedStyle(document.body).backgroundColor"
  light = opened.evaluate(back) == "rgb(255, 255, 255)"
  assert light == (scheme == "light")
  # Wide tables scroll by themselves, and the page does not.
  assert opened.evaluate("document.documentElement.scrollWidth") == width
  sizes = opened.evaluate("[...document.images].map(i => i.naturalWidth)")
  assert len(sizes) == 6
  assert min(sizes) > 0
  assert [url for url in asked if not url.startswith("data:")] == [address]
  assert said == []
