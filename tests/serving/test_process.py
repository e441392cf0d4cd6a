"""The command: its start, slow clients, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from conftest import ROOT
from served import image_files, png

from benchmarks import serve

pytestmark = pytest.mark.processes
GOLDEN = ROOT / "tests" / "golden" / "format_2"


def connected(url):
  """A socket to a server."""
  found = re.fullmatch(r"http://(.+):(\d+)", url)
  return socket.create_connection((found[1], int(found[2])), timeout=30)


def golden(folder, *options):
  source, tasks = GOLDEN / "backbone.npz", GOLDEN / "tasks"
  return serve.serving(str(source), [str(tasks)], folder / "server", *options)


@pytest.mark.fault("server-stop")
def test_server_serves_and_ends(tmp_path):
  """Open requests are answered after SIGTERM, and no new one is taken."""
  head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\n"
  request = httpx.Request("POST", "http://a", files=image_files(png()))
  body, kind = request.read(), request.headers["content-type"]
  with golden(tmp_path, "--receive_timeout=20") as server:
    done = httpx.post(f"{server.url}/v1/predict", files=image_files(png()))
    answered = done.json()["images"][0]["tasks"]
    assert sorted(answered) == ["birds", "pets", "size", "tags"]
    rebound = httpx.get(server.url, headers={"Host": "evil.example"})
    assert (rebound.status_code, list(rebound.json())) == (400, ["error"])
    with connected(server.url) as taken:
      start = head.format(kind) + f"Content-Length: {len(body)}\r\n\r\n"
      taken.sendall(start.encode() + body[:50])
      time.sleep(0.5)
      server.process.send_signal(signal.SIGTERM)
      time.sleep(0.5)
      with pytest.raises(OSError, match="refused"):
        connected(server.url)
      taken.sendall(body[50:])
      answer = b""
      while part := taken.recv(65536):
        answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"birds"' in answer
  assert server.process.returncode == -signal.SIGTERM


@pytest.mark.fault("stuck-thread")
@pytest.mark.parametrize(
  ("number", "again", "first"),
  [
    (signal.SIGTERM, False, False),
    (signal.SIGINT, True, False),
    (signal.SIGTERM, False, True),
  ],
)
def test_server_ends_while_threads_are_busy(number, again, first):
  """When the time to finish is over, or at a second signal.

  Process 1 of a container ignores signals that have no handler.
  """
  ignoring = (
    "real = signal.signal\n"
    "default, ignored = signal.SIG_DFL, signal.SIG_IGN\n"
    "signal.signal = lambda number, new: real(\n"
    "  number, ignored if new is default else new)\n"
  )
  code = (
    "import signal, sys, time\n"
    + ignoring * first
    + "from memory_vit.commands import serve\n"
    "from memory_vit.prediction import Predictor\n"
    "Predictor.predict_pixels = lambda *_, **__: time.sleep(90)\n"
    "sys.exit(serve.main(sys.argv[1:]))\n"
  )
  command = [
    sys.executable, "-c", code, f"--backbone={GOLDEN / 'backbone.npz'}",
    f"--task={GOLDEN / 'tasks'}", "--port=0", "--batch_sizes=1",
    f"--grace={60 if again else 1}",
  ]  # fmt: skip
  request = httpx.Request(
    "POST", "http://a/v1/predict", files=image_files(png())
  )
  body, kind = request.read(), request.headers["content-type"]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    cwd=ROOT,
  ) as process:  # fmt: skip
    try:
      url = re.search(r"http://\S+", process.stdout.readline())[0]
      serve.wait_until_ready(url)
      with connected(url) as client:
        client.sendall(
          "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n"
          f"Content-Type: {kind}\r\n"
          f"Content-Length: {len(body)}\r\n\r\n".encode()
          + body
        )
        time.sleep(0.5)
        process.send_signal(number)
        if again:
          time.sleep(0.3)
          process.send_signal(number)
        assert process.wait(15) == (0 if first else -number)
    finally:
      process.kill()
    assert again or "Cancel 1 running task" in process.stderr.read()


@pytest.mark.fault("slow-client")
def test_slow_clients_are_given_up(tmp_path):
  """They send headers or a body slowly, or nothing; others are answered."""
  ends = {}
  options = ("--receive_timeout=1", "--timeout_keep_alive=1")
  with golden(tmp_path, *options) as server:

    def drip(name, start):
      begun = time.monotonic()
      with connected(server.url) as client:
        client.sendall(start)
        client.settimeout(0.1)
        answer = b""
        while time.monotonic() < begun + 20:
          try:
            part = client.recv(4096)
            if not part:
              break
            answer += part
          except TimeoutError:
            try:
              client.sendall(b"a" if name != "silent" else b"")
            except OSError:
              break
          except OSError:
            break
      ends[name] = time.monotonic() - begun, answer

    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n"
    threads = [
      threading.Thread(target=drip, args=one)
      for one in (
        ("headers", head + b"X-Slow: "),
        ("body", head + b"Content-Type: application/json\r\n"
         b"Content-Length: 100000\r\n\r\n"),
        ("silent", b""),
      )
    ]  # fmt: skip
    for thread in threads:
      thread.start()
    good = httpx.post(f"{server.url}/v1/predict", files=image_files(png()))
    assert good.status_code == 200
    for thread in threads:
      thread.join()
  assert all(seconds < 15 for seconds, _ in ends.values()), ends
  assert b" 408 " in ends["body"][1]


@pytest.mark.fault("large-body")
def test_client_that_sends_too_much_can_read_the_answer(tmp_path):
  """Also over a connection that is closed after it, as a proxy wants."""
  with golden(tmp_path, "--max_task_mib=1") as server:
    for kind in ("keep-alive", "close"):
      with connected(server.url) as client:
        client.sendall(
          "PUT /v1/tasks/a HTTP/1.1\r\nHost: localhost\r\n"
          f"Authorization: Bearer {server.token}\r\nConnection: {kind}\r\n"
          "Content-Type: application/octet-stream\r\n"
          f"Content-Length: {8 * 2**20}\r\n\r\n".encode()
        )
        for _ in range(8):
          client.sendall(bytes(2**20))
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.fault("server-flood")
def test_a_flood_of_connections_is_turned_away(tmp_path):
  """From --max_connections on, and answered again once they are closed."""
  with golden(tmp_path, "--max_connections=4") as server:
    url = f"{server.url}/v1/predict"
    with contextlib.ExitStack() as opened:
      for _ in range(12):
        opened.enter_context(connected(server.url))
      busy = httpx.post(url, files=image_files(png()))
      assert busy.status_code == 503
    deadline = time.monotonic() + 20
    while busy.status_code == 503 and time.monotonic() < deadline:
      time.sleep(0.1)  # until the server has seen that they are gone
      busy = httpx.post(url, files=image_files(png()))
    assert busy.status_code == 200


def run(*arguments):
  """The command, which must end by itself."""
  return subprocess.run(
    [sys.executable, "-m", "memory_vit", "serve", *map(str, arguments)],
    capture_output=True, text=True, timeout=120, cwd=ROOT,
  )  # fmt: skip


@pytest.mark.fault("bad-server-start")
def test_bad_command_lines_end_in_one_line(tmp_path):
  source = f"--backbone={GOLDEN / 'backbone.npz'}"
  (tmp_path / "token").write_text("short")
  (tmp_path / "token").chmod(0o600)
  token = f"--token_file={tmp_path / 'token'}"
  with socket.socket() as other:
    other.bind(("127.0.0.1", 0))
    other.listen()
    port = other.getsockname()[1]
    for arguments, message in (
      ((source, f"--port={port}"), "Address already in use"),
      ((source, "--port=70000"), "--port"),
      ((source, "--host=no.such.host.invalid"), "cannot be used"),
      ((source, "--port=0", token), "at least 16"),
      ((source, "--batch_sizes=1,x"), "numbers such as 1,8,32"),
      ((source, "--max_queue=0"), "--max_queue"),
      ((source, "--port=0", f"--task={tmp_path}"), "neither a task nor"),
    ):
      done = run(*arguments)
      assert (done.returncode, done.stdout) == (2, ""), done
      assert done.stderr.startswith("error: "), done.stderr
      assert message in done.stderr
      assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.fault("bad-server-start")
def test_missing_library_is_named(tmp_path):
  """If the extra is not installed."""
  (tmp_path / "fastapi.py").write_text(
    "raise ModuleNotFoundError('no fastapi', name='fastapi')"
  )
  done = subprocess.run(
    [sys.executable, "-m", "memory_vit", "serve", "--port=0",
     f"--backbone={GOLDEN / 'backbone.npz'}"],
    capture_output=True, text=True, timeout=120, cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr == (
    "error: this command needs fastapi, which is not installed: in the "
    "checkout, pip install '.[serve]'\n"
  )


def test_server_imports_no_tensorflow(tmp_path):
  code = (
    "import json, sys; from memory_vit.serving import create_app; "
    "import memory_vit.serving.app; "
    "print(json.dumps(sorted(sys.modules)))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True,
    cwd=ROOT,
  )  # fmt: skip
  modules = set(json.loads(done.stdout.splitlines()[-1]))
  assert "fastapi" in modules
  assert not modules & {"tensorflow", "clu", "matplotlib", "sklearn"}


def test_help_does_not_wait_for_jax():
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "memory_vit", "serve", "--help"],
    check=True, capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  assert "--token_file" in done.stdout
  imported = {
    line.rpartition("|")[2].strip() for line in done.stderr.split("\n")
  }
  assert not imported & {"jax", "fastapi", "uvicorn", "pydantic"}


def test_the_page_is_in_the_package():
  folder = Path(serve.mv.__file__).parent / "serving" / "page"
  assert {path.name for path in folder.iterdir()} == {
    "docs.html", "index.html", "page.css", "page.js",
  }  # fmt: skip
