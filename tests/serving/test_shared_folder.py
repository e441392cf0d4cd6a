"""Three server processes on one folder; see benchmarks/task_folder.py."""

import asyncio

import pytest

from benchmarks import task_folder

pytestmark = pytest.mark.processes
CHANGES, KILLS = 10, 2


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
  model = task_folder.Model(tmp_path_factory.mktemp("serve"))
  with task_folder.processes(model) as servers:
    yield task_folder.Campaign(model, servers)


@pytest.mark.fault("two-servers")
def test_changes_under_load_reach_all_servers(campaign):
  """Made through any of the servers, and no request is lost."""
  asyncio.run(campaign.under_load(CHANGES))
  campaign.check()
  found = campaign.figures()
  assert found["changes"] == CHANGES
  assert found["requests that ended with a killed process"] == 0
  assert found["requests"] >= CHANGES


@pytest.mark.fault("server-killed")
def test_kills_in_the_middle_of_changes_lose_no_task(campaign):
  """Kills of the process that makes a change, and of others."""
  asyncio.run(campaign.under_kills(KILLS))
  campaign.check()
  assert campaign.figures()["kills"] == KILLS
