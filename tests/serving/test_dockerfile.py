"""The container image, as far as it can be tested without an engine."""

import http.server
import re
import subprocess
import sys
import threading
import tomllib

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")


def test_user_is_a_number():
  assert re.findall(r"^USER (\S+)", DOCKERFILE, re.M) == ["10001"]
  assert "useradd --uid 10001 " in DOCKERFILE


def test_copied_files_exist_and_are_not_ignored():
  sent = (ROOT / ".dockerignore").read_text().splitlines()
  copied = " ".join(re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M)).split()
  assert len(copied) == 6
  for name in copied:
    assert (ROOT / name).exists()
    assert f"!{name}" in sent


def test_versions_are_those_that_the_package_allows():
  lines = (ROOT / "Dockerfile.constraints").read_text().splitlines()
  pins = dict(line.split("==") for line in lines if line[0] != "#")
  pins = {name.replace("_", "-"): version for name, version in pins.items()}
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  wanted = [
    *project["dependencies"],
    *project["optional-dependencies"]["serve"],
  ]
  for line in wanted:
    needed = Requirement(line)
    assert needed.specifier.contains(pins[needed.name.replace("_", "-")]), line


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--port={}", "--port\0{}"])
def test_health_check_uses_the_port_of_the_command_line(tmp_path, flag):
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      self.send_response(200)
      self.end_headers()

    def log_message(self, *_):
      pass

  [check] = re.findall(r'^HEALTHCHECK .*python -c "(.*)"$', DOCKERFILE, re.M)
  with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
    line = f"python\0-m\0memory_vit\0serve\0{flag.format(server.server_port)}\0"
    (tmp_path / "cmdline").write_text(line)
    code = check.replace("/proc/1/cmdline", str(tmp_path / "cmdline"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    server.shutdown()
  assert asked == ["/healthz"]
