"""`serve run` on a real cluster: three replicas on one folder of tasks."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from ray_clusters import children_of, end, environment

from benchmarks import task_folder
from benchmarks.task_folder import PATIENCE, client

pytest.importorskip("ray.serve", reason="ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.processes]
REPLICAS, CHANGES, KILLS = 3, 10, 2
# As on a terminal: shells let what is in the background ignore Ctrl-C.
_HEED_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Cluster:
  """Replicas behind one address, which Ray replaces after a kill."""

  # Until Ray's proxy has noticed that a replica is dead.
  seconds_after_kill = 5.0

  def __init__(self, folder, url, process):
    self.folder, self.url, self.process = folder, url, process
    self.ready, self.killed_at = [url], {}

  def name(self, url, headers):
    return headers["x-replica"]

  def log(self):
    return (self.folder / "log").read_text()

  async def until_ready(self):
    """Wait until all replicas answer."""
    async with client() as http, asyncio.timeout(PATIENCE):
      found = set()
      while len(found) < REPLICAS:
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(httpx.TransportError):
          done = await http.get(f"{self.url}/readyz")
          if done.status_code == 200:
            found.add(done.headers["x-replica"])
        await asyncio.sleep(0.02)

  async def kill_one(self, rng, at):
    """Kill a replica, and wait until Ray has started another one."""
    pid = rng.choice(children_of(self.process, "ray::ServeReplica"))
    self.killed_at[self.url] = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await self.until_ready()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return task_folder.Model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def cluster(model):
  folder = model.folder
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  application = {
    "name": "tasks", "route_prefix": "/",
    "import_path": "memory_vit.serving.ray:application",
    "args": {
      **model.options, "num_replicas": REPLICAS, "num_cpus": 0.1,
    },
  }  # fmt: skip
  config = {
    "http_options": {"host": "127.0.0.1", "port": port},
    "applications": [application],
  }
  (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
  serve = Path(sys.executable).parent / "serve"
  with (folder / "log").open("w") as log:
    process = subprocess.Popen(
      [sys.executable, "-c", _HEED_INTERRUPTS, serve, "run", "config.yaml"],
      cwd=folder, env=environment(),
      stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
  try:
    yield Cluster(folder, f"http://127.0.0.1:{port}", process)
  finally:
    end(process, PATIENCE)


@pytest.fixture(scope="module")
def campaign(model, cluster):
  return task_folder.Campaign(model, cluster)


@pytest.mark.fault("two-servers")
def test_changes_under_load_reach_all_replicas(campaign):
  asyncio.run(campaign.under_load(CHANGES))
  campaign.check()
  found = campaign.figures()
  assert found["changes"] == CHANGES
  assert found["requests that ended with a killed process"] == 0
  assert found["requests"] >= CHANGES


@pytest.mark.fault("server-killed")
def test_killed_replicas_lose_no_task(campaign):
  asyncio.run(campaign.under_kills(KILLS))
  campaign.check()
  assert campaign.figures()["kills"] == KILLS


def test_application_ends_at_ctrl_c(cluster, campaign):
  """At Ctrl-C; its changes are in the log."""
  cluster.process.send_signal(signal.SIGINT)
  cluster.process.wait(PATIENCE)
  assert re.search(r"audit \S+ add name='t\d' client=127", cluster.log())
