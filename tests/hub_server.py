"""A stand-in of the Hugging Face hub: models, as huggingface_hub asks for them.

Files that end in .safetensors are uploaded as large ones (LFS), as there.
"""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

# Its user may write into "me", and see what is private there.
TOKEN = "hf_averysecrettoken"
READ_TOKEN = "hf_anotherthatonlyreads"


class Repository:
  """Commits, of which each is {path: content}; the last one is main."""

  def __init__(self, private):
    self.private, self.commits, self.messages = private, [{}], []

  def at(self, revision):
    """The files of a revision, and its hash; None if there is none."""
    shas = [f"{number:040x}" for number in range(1, len(self.commits) + 1)]
    shas_of = {"main": shas[-1], **{sha: sha for sha in shas}}
    if revision not in shas_of:
      return None
    sha = shas_of[revision]
    return self.commits[shas.index(sha)], sha

  @property
  def tags(self):
    card = self.commits[-1].get("README.md", b"").decode().split("---\n")
    front = yaml.safe_load(card[1]) if len(card) > 1 else {}
    return [front.get("library_name"), *front.get("tags", [])]


class Hub(ThreadingHTTPServer):
  """Serves while it is entered."""

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.repositories, self.blobs, self.asked = {}, {}, []
    self.etags = {}  # {path: one that is not the digest of its content}

  @property
  def address(self):
    return f"http://127.0.0.1:{self.server_port}"

  def __enter__(self):
    threading.Thread(target=self.serve_forever, args=(0.01,)).start()
    return self

  def __exit__(self, *error):
    self.shutdown()
    self.server_close()

  def add(self, name, files, private=False):
    """Make a repository, or commit into it."""
    repository = self.repositories.setdefault(name, Repository(private))
    repository.commits.append({**repository.commits[-1], **files})


class Handler(BaseHTTPRequestHandler):
  """Answers one request."""

  def log_message(self, *args):
    pass

  def handle_one(self):
    url = urllib.parse.urlsplit(self.path)
    path = urllib.parse.unquote(url.path)
    self.query = urllib.parse.parse_qs(url.query)
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    self.server.asked.append((self.command, path))
    token = self.headers.get("Authorization", "").removeprefix("Bearer ")
    self.reads = token in (TOKEN, READ_TOKEN)
    if self.command == "POST" and token != TOKEN:
      return self.say(403 if self.reads else 401, {"error": "no"})
    for method, pattern, answer in ROUTES:
      found = re.fullmatch(pattern, path)
      if found and self.command in method.split():
        return answer(self, body, *found.groups())
    return self.say(404, {"error": f"no route: {path}"})

  do_GET = do_HEAD = do_POST = do_PUT = handle_one  # noqa: N815

  def say(self, status, content, **headers):
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    self.send_response(status)
    headers = {"Content-Length": len(content), **headers}
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  def found(self, name, revision):
    """The files and the hash of a revision, or None after an error."""
    repository = self.server.repositories.get(name)
    if not repository or (repository.private and not self.reads):
      status = 404 if self.reads else 401
      return self.say(status, {}, X_Error_Code="RepoNotFound")
    found = repository.at(revision)
    return found or self.say(404, {}, X_Error_Code="RevisionNotFound")

  def create(self, body):
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] != "me":
      return self.say(403, {"error": "not yours"})
    if name in self.server.repositories:
      return self.say(409, {"error": "exists", "url": name})
    private = asked.get("private") or asked.get("visibility") == "private"
    self.server.repositories[name] = Repository(private)
    return self.say(200, {"url": f"{self.server.address}/{name}"})

  def info(self, body, name, revision="main"):
    if found := self.found(name, revision):
      self.say(200, self.described(name, *found))

  def described(self, name, files, sha):
    names = [{"rfilename": path} for path in files]
    described = {"id": name, "sha": sha}
    # Lists of models have no names of files, unless they are asked for.
    is_list = self.path.startswith("/api/models?")
    if not is_list or self.query.get("full") in (["true"], ["True"]):
      described["siblings"] = names
    return described

  def models(self, body):
    [owner], wanted = self.query["author"], self.query["filter"]
    shown = [
      self.described(name, *repository.at("main"))
      for name, repository in self.server.repositories.items()
      if name.split("/")[0] == owner
      and {*wanted} <= {*repository.tags}
      and (self.reads or not repository.private)
    ]
    self.say(200, shown)

  def tree(self, body, name, revision):
    if not (found := self.found(name, revision)):
      return
    entries = []
    for path, content in found[0].items():
      sha256 = hashlib.sha256(content).hexdigest()
      entry = {"type": "file", "path": path, "size": len(content)}
      entry["oid"] = hashlib.sha1(content).hexdigest()
      if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 9}
      entries.append(entry)
    self.say(200, entries)

  def resolve(self, body, name, revision, path):
    if not (found := self.found(name, revision)):
      return None
    files, sha = found
    if path not in files:
      return self.say(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
    content = files[path]
    etag = hashlib.sha256(content).hexdigest()
    etag = self.server.etags.get(path, etag)
    headers = {"ETag": f'"{etag}"', "X_Repo_Commit": sha}
    given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if given is None:
      return self.say(200, content, **headers)
    first, last = int(given[1]), int(given[2] or len(content))
    return self.say(206, content[first : last + 1], **headers)

  def preupload(self, body, name):
    large = {True: "lfs", False: "regular"}
    self.say(200, {"files": [
      {"path": file["path"], "shouldIgnore": False,
       "uploadMode": large[file["path"].endswith(".safetensors")]}
      for file in json.loads(body)["files"]
    ]})  # fmt: skip

  def batch(self, body, name):
    href = f"{self.server.address}/blobs/"
    objects = [
      {**one, "actions": {"upload": {"href": href + one["oid"]}}}
      for one in json.loads(body)["objects"]
    ]
    self.say(200, {"transfer": "basic", "objects": objects})

  def blob(self, body, oid):
    assert hashlib.sha256(body).hexdigest() == oid
    self.server.blobs[oid] = body
    self.say(200, b"")

  def commit(self, body, name, revision):
    repository, files = self.server.repositories[name], {}
    for line in map(json.loads, body.splitlines()):
      value = line["value"]
      if line["key"] == "header":
        repository.messages.append(value["summary"])
      elif line["key"] == "lfsFile":
        files[value["path"]] = self.server.blobs[value["oid"]]
      else:
        files[value["path"]] = base64.b64decode(value["content"])
    self.server.add(name, files)
    sha = repository.at("main")[1]
    url = f"{self.server.address}/{name}/commit/{sha}"
    self.say(200, {"commitUrl": url, "commitOid": sha})

  def yaml(self, body):
    self.say(200, {"errors": [], "warnings": []})


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
  ("POST", "/api/repos/create", Handler.create),
  ("POST", "/api/validate-yaml", Handler.yaml),
  ("GET", "/api/models", Handler.models),
  ("GET", f"/api/models/{_NAME}", Handler.info),
  ("GET", f"/api/models/{_NAME}/revision/([^?]+)", Handler.info),
  ("GET", f"/api/models/{_NAME}/tree/([^/?]+)", Handler.tree),
  ("POST", f"/api/models/{_NAME}/preupload/main", Handler.preupload),
  ("POST", f"/api/models/{_NAME}/commit/(main)", Handler.commit),
  ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", Handler.batch),
  ("PUT", r"/blobs/(\w+)", Handler.blob),
  ("GET HEAD", f"/{_NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
)
