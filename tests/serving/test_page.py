"""The page in a browser: by keyboard, with names that look like HTML."""

import re
import shutil

import pytest
from conftest import random_task, tiny_backbone
from kinds_of_tasks import tasks_of_kinds
from served import png, task_bytes

import memory_vit as mv
from benchmarks import serve

pytestmark = [pytest.mark.slow, pytest.mark.processes]
_FLAGS = (
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
  "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
)  # fmt: skip
# As text it shows; as HTML it would run.
_EVIL = "<img src=x onerror=document.title='hacked'>"


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


@pytest.mark.fault("page-text")
def test_page_works_in_a_browser(browser, tmp_path):
  backbone = tiny_backbone(num_classes=5)
  birds = random_task(backbone, "birds", class_names=("heron", _EVIL, "c"))
  mv.save_backbone(backbone, tmp_path / "tiny.npz")
  _, tags, size = tasks_of_kinds(backbone)
  mv.save_tasks([birds, tags, size], tmp_path / "tasks")
  cats = tmp_path / "Cats 2.safetensors"
  cats.write_bytes(task_bytes(random_task(backbone, "cats", seed=3), tmp_path))
  (tmp_path / "good.png").write_bytes(png(1, 64))
  (tmp_path / "bad.png").write_bytes(b"no picture")
  source, tasks = str(tmp_path / "tiny.npz"), str(tmp_path / "tasks")
  with serve.serving(source, [tasks], tmp_path / "server") as server:
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("#tasks tr")
    _ask(page, tmp_path)
    _look(page)
    _change(page, cats, server.token)
    _fits_a_phone(page)
    assert page.title() != "hacked"
    assert problems == []


def _ask(page, folder):
  """Images are answered, and a file that is no image is named."""
  page.set_input_files("#files", [folder / "good.png", folder / "bad.png"])
  page.wait_for_selector("#results > li:nth-child(2)")
  said = page.inner_text("#results")
  assert "not a JPEG" in said
  assert _EVIL in said
  assert re.search(r"angle\s+-?[0-9.]+\sdegrees", said)
  assert re.search(r"(prime|above 4|even)\s+[0-9.]+\s%|no label", said)
  assert "2 values" in page.inner_text("#tasks")
  assert (
    page.inner_text("#progress") == "1 image answered, 1 could not be read."
  )


def _look(page):
  """By keyboard: the button, the task, the layer."""
  page.focus("#results button")
  page.keyboard.press("Enter")
  page.wait_for_selector(".looks canvas")
  canvas = page.locator(".looks canvas")
  assert "mean of 2 layers" in canvas.get_attribute("aria-label")
  before = canvas.evaluate("canvas => canvas.toDataURL()")
  page.keyboard.press("Tab")
  page.keyboard.press("ArrowRight")
  assert "layer 1 of 2" in canvas.get_attribute("aria-label")
  assert canvas.evaluate("canvas => canvas.toDataURL()") != before


def _fits_a_phone(page):
  """No column is cut off; each value has its name."""
  page.set_viewport_size({"width": 390, "height": 800})
  cells = page.locator("#tasks > tr:first-child > *")
  assert cells.count() == 7
  for cell in cells.all():
    box = cell.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
  named = "e => getComputedStyle(e, '::before').content"
  assert "Digest" in cells.nth(5).evaluate(named)


def _change(page, file, token):
  """A task is added and removed with the token, and refused without."""
  page.fill("#token", "another token than that")
  page.set_input_files("#file", file)
  assert page.input_value("#name") == "cats-2"
  page.focus("#name")
  page.keyboard.press("Enter")
  page.wait_for_selector("#changed.error")
  assert "send the token" in page.inner_text("#changed")
  page.fill("#token", token)
  page.focus("#name")
  page.keyboard.press("Enter")
  page.wait_for_selector("#tasks tr:nth-child(4)")
  page.on("dialog", lambda dialog: dialog.accept())
  page.focus("button[aria-label='Remove cats-2']")
  page.keyboard.press("Enter")
  page.wait_for_selector("#tasks tr:nth-child(4)", state="detached")
  page.wait_for_function(
    "document.getElementById('changed').textContent.includes('removed')"
  )
