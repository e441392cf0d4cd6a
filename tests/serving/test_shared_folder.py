"""Three server processes on one folder, and what a client sees of them.

CHANGES=200 KILLS=20 python -m pytest -s tests/serving/test_shared_folder.py
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from campaign import CHANGES, KILLS, PATIENCE, Campaign, client, prepare

pytestmark = pytest.mark.processes
SERVERS = 3


class Processes:
  """Server processes of this machine, each on its port.

  A killed one gets requests again once it is ready.
  """

  seconds_after_kill = 0.0  # a request that comes later goes elsewhere

  def __init__(self, folder):
    self.folder, self.options = folder, prepare(folder)
    self.running, self.ready = {}, []
    self.killed_at, self.kills = {}, 0

  def start(self, url):
    options = {**self.options, "port": url.rpartition(":")[2]}
    command = [sys.executable, "-m", "memory_vit", "serve"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (self.folder / "log").open("a") as log:
      self.running[url] = subprocess.Popen(command, stdout=log, stderr=log)

  async def until_ready(self):
    """Wait until all answer; return their names."""
    async with client() as http, asyncio.timeout(PATIENCE):
      for url, process in self.running.items():
        while url not in self.ready:
          log = (self.folder / "log").read_text()[-2000:]
          assert process.poll() is None, log
          with contextlib.suppress(httpx.TransportError):
            if (await http.get(f"{url}/readyz")).status_code == 200:
              self.ready.append(url)
          await asyncio.sleep(0.05)
    return [self.name(url, {}) for url in self.running]

  def name(self, url, headers):
    return url, self.running[url].pid

  async def kill_one(self, rng, at):
    """Kill the process of the last change, or another; start it again."""
    url = rng.choice([*self.ready, at])
    self.ready.remove(url)
    self.killed_at[url] = time.monotonic()
    self.running[url].kill()
    await asyncio.to_thread(self.running[url].wait)
    self.start(url)
    await self.until_ready()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
  folder = tmp_path_factory.mktemp("serve")
  found = Processes(folder)
  with contextlib.ExitStack() as ports:
    for _ in range(SERVERS):
      free = ports.enter_context(socket.socket())
      free.bind(("127.0.0.1", 0))
      found.start(f"http://127.0.0.1:{free.getsockname()[1]}")
  try:
    yield found
    for process in found.running.values():
      process.send_signal(signal.SIGTERM)
    log = (folder / "log").read_text()[-2000:]
    assert [p.wait(PATIENCE) for p in found.running.values()] == 3 * [
      -signal.SIGTERM
    ], log
  finally:
    for process in found.running.values():
      process.kill()


@pytest.fixture(scope="module")
def campaign(servers):
  return Campaign(servers.folder, servers)


@pytest.mark.fault("two-servers")
def test_changes_under_load_reach_all_servers(campaign):
  """Made through any of the servers, and no request is lost."""
  asyncio.run(campaign.under_load())
  campaign.report("three processes")
  campaign.check()
  assert (len(campaign.changed), campaign.ended) == (CHANGES, 0)
  assert campaign.requests >= CHANGES


@pytest.mark.fault("server-killed")
def test_kills_in_the_middle_of_changes_lose_no_task(campaign):
  """Kills of the process that makes a change, and of others."""
  asyncio.run(campaign.under_kills())
  campaign.report(f"three processes, and then {KILLS} kills")
  campaign.check()
