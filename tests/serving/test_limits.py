"""Settings, the token, and bodies that are too large or too slow."""

import asyncio
import os

import httpx
import pytest

from memory_vit.errors import ConfigError
from memory_vit.serving.access import Token, read_token
from memory_vit.serving.limits import BodyLimits
from memory_vit.serving.request_error import RequestError
from memory_vit.serving.settings import MIB, ServerSettings


@pytest.mark.fault("bad-server-start")
@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_queue": 0}, "max_queue is 0, expected at least 1"),
    ({"timeout": float("nan")}, "timeout is nan"),
    ({"top": "5"}, "top is '5', expected int: at least"),
    ({"top": True}, "top is True, expected int: at least"),
    ({"state_dir": 3}, "state_dir is 3, expected str . None: a path"),
    ({"max_queue": 8, "max_images": 9}, "would always be refused"),
    ({"max_held_mib": 8, "max_body_mib": 9}, "would always be refused"),
  ],
)
def test_invalid_settings_are_refused(options, message):
  with pytest.raises(ConfigError, match=message):
    ServerSettings(**options)


SECRET = "a token of 24 characters"


def token_file(tmp_path, text=SECRET + "\n", mode=0o600):
  path = tmp_path / "token"
  path.write_text(text)
  path.chmod(mode)
  return str(path)


@pytest.mark.fault("forged-change")
def test_only_the_token_is_accepted(tmp_path):
  token = read_token(token_file(tmp_path))
  token.require(f"Bearer {SECRET}")
  token.require(f"bearer  {SECRET}")
  for given in (None, "", SECRET, f"Digest {SECRET}", "Bearer ",
                f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}",
                "Bearer \udcff\xff"):  # fmt: skip
    with pytest.raises(RequestError) as refused:
      token.require(given)
    assert refused.value.status == 401
    assert SECRET not in refused.value.message


@pytest.mark.fault("forged-change")
def test_server_without_a_token_refuses_changes():
  with pytest.raises(RequestError, match="--token_file") as refused:
    Token(None).require("Bearer ")
  assert refused.value.status == 403


@pytest.mark.fault("forged-change")
@pytest.mark.parametrize(
  ("text", "mode", "message"),
  [
    (SECRET, 0o644, "mode 644, which lets other users access the file"),
    (SECRET, 0o620, "has the mode 620"),
    (SECRET, 0o602, "has the mode 602"),
    (SECRET, 0o601, "has the mode 601"),
    ("short", 0o600, "at least 16 characters"),
    ("x" * 5000, 0o600, "larger than 4096 bytes"),
    ("two\nlines of a token", 0o600, "expected one line"),
    ("é" * 20, 0o600, "the file is not ASCII"),
  ],
)
def test_unusable_token_files_are_refused(tmp_path, text, mode, message):
  with pytest.raises(ConfigError, match=message):
    read_token(token_file(tmp_path, text, mode))


@pytest.mark.fault("forged-change")
def test_missing_token_file_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="No such file"):
    read_token(str(tmp_path / "none"))
  os.mkfifo(tmp_path / "pipe", 0o600)
  with pytest.raises(ConfigError, match="is not a regular file"):
    read_token(str(tmp_path / "pipe"))


async def count_bytes(scope, receive, send):
  """An application that answers with the number of bytes that it got."""
  size, more = 0, True
  while more:
    message = await receive()
    size += len(message.get("body", b""))
    more = message.get("more_body", False)
  await send({"type": "http.response.start", "status": 200, "headers": []})
  await send({"type": "http.response.body", "body": b"%d" % size})


def client(**options):
  limits = BodyLimits(count_bytes, ServerSettings(**options))
  transport = httpx.ASGITransport(limits)
  return limits, httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.fault("large-body")
def test_bytes_are_counted_whatever_content_length_says():
  async def check():
    limits, http = client(max_body_mib=1, max_task_mib=2)

    async def sent(size):
      for _ in range(size // 1024):
        yield bytes(1024)

    async with http:
      for method, most in (("POST", 1), ("PUT", 2)):
        fits = await http.request(method, "/", content=sent(most * MIB))
        assert (fits.status_code, int(fits.text)) == (200, most * MIB)
        lie = {"Content-Length": "10"}
        large = await http.request(
          method, "/", content=sent(most * MIB + 1024), headers=lie
        )
        assert large.status_code == 413
        assert f"more than {most} MiB" in large.json()["error"]
    assert limits.held == 0

  asyncio.run(check())


@pytest.mark.fault("slow-client")
def test_a_slow_body_is_given_up():
  async def check():
    _, http = client(receive_timeout=0.5)

    async def drip():  # in less time for each byte than for all
      for _ in range(30):
        yield b"x"
        await asyncio.sleep(0.05)

    async with http:
      slow = await http.post("/", content=drip())
      assert slow.status_code == 408
      assert "within 0.5 seconds" in slow.json()["error"]
      assert (await http.post("/", content=b"next")).text == "4"

  asyncio.run(check())


@pytest.mark.fault("server-flood")
def test_all_bodies_together_are_limited():
  async def check():
    limits, http = client(max_body_mib=2, max_task_mib=2, max_held_mib=2)
    go = asyncio.Event()

    async def held():
      yield bytes(MIB)
      await go.wait()
      yield b"end"

    async with http:
      first = asyncio.create_task(http.post("/", content=held()))
      while limits.held < MIB:
        await asyncio.sleep(0)
      second = await http.post("/", content=bytes(MIB + 1))
      assert second.status_code == 503
      assert second.headers["retry-after"] == "1"
      go.set()
      assert (await first).text == str(MIB + 3)
      assert (await http.post("/", content=bytes(2 * MIB))).status_code == 200
    assert limits.held == 0

  asyncio.run(check())
