"""Requests that pages of other sites send by a visitor's browser."""

import asyncio

import pytest
from served import image_files, png, serving, warm_predictor

from memory_vit.commands import serve
from memory_vit.errors import ConfigError
from memory_vit.serving import ServerSettings


@pytest.mark.fault("forged-change")
@pytest.mark.parametrize(
  ("allowed", "good", "bad"),
  [
    (None, "any.example:80", None),
    ("*", "any.example", None),
    ("127.0.0.1", "localhost:8000", "evil.example"),
    ("127.0.0.1", "[::1]:8000", "[::2]:8000"),
    ("127.0.0.1", "127.0.0.1", "127.0.0.1.evil.example"),
    ("a.example,B.example", "b.Example:443", "c.a.example"),
    ("a.example", "127.0.0.1:8000", ""),
  ],
)
def test_names_that_a_page_was_rebound_from_are_refused(allowed, good, bad):
  """On each route, and as JSON."""

  async def check():
    async with serving(warm_predictor(), allowed_hosts=allowed) as http:
      for host, status in ((good, 200), (bad, 400)):
        if host is None:
          continue
        headers = {"Host": host}
        sent = {"files": image_files(png()), "headers": headers}
        for done in (
          await http.get("/", headers=headers),
          await http.get("/v1/tasks", headers=headers),
          await http.post("/v1/predict", **sent),
        ):
          assert done.status_code == status
          assert status == 200 or "allowed_hosts" in done.json()["error"]

  if allowed != "*" and allowed is not None:
    allowed = f"test,{allowed}"  # the client's own name
  asyncio.run(check())


@pytest.mark.fault("forged-change")
def test_pages_of_other_sites_change_and_ask_nothing():
  async def check():
    async with serving(warm_predictor()) as http:
      for method, path in (
        ("POST", "/v1/predict"), ("POST", "/v1/attention"),
        ("PUT", "/v1/tasks/a"), ("DELETE", "/v1/tasks/birds"),
      ):  # fmt: skip
        headers = {"Sec-Fetch-Site": "cross-site"}
        done = await http.request(method, path, headers=headers)
        assert done.status_code == 403
        assert "another site" in done.json()["error"]
      # A link from elsewhere, and the server's own page.
      assert (await http.get("/", headers=headers)).status_code == 200
      own = {"Sec-Fetch-Site": "same-origin"}
      files = image_files(png())
      done = await http.post("/v1/predict", files=files, headers=own)
      assert done.status_code == 200

  asyncio.run(check())


@pytest.mark.parametrize(
  ("flags", "address", "allowed"),
  [
    ([], "127.0.0.1", "127.0.0.1"),
    (["--host=here"], "127.0.0.2", "here"),
    (["--host=::1"], "::1", "[::1]"),
    (["--host=0.0.0.0"], "0.0.0.0", None),
    (["--host=0.0.0.0", "--allowed_hosts=a.example"], "0.0.0.0", "a.example"),
    (["--allowed_hosts=a.example"], "127.0.0.1", "a.example"),
    (["--allowed_hosts=*"], "127.0.0.1", "*"),
  ],
)
def test_the_command_trusts_loopback_names_alone_by_default(
  flags, address, allowed
):
  arguments = serve._parser().parse_args(["--backbone=a.npz", *flags])
  settings = serve._trusting(
    serve._settings(arguments), arguments.host, address
  )
  assert settings.allowed_hosts == allowed


@pytest.mark.parametrize(
  "hosts", ["https://a.example", "a.example:80", "", "a,"]
)
def test_hosts_that_no_request_could_name_are_refused(hosts):
  with pytest.raises(ConfigError, match="allowed_hosts is .* without a scheme"):
    ServerSettings(allowed_hosts=hosts)
