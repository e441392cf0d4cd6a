"""Plans, shards, resuming: exactly one row for every image."""

import errno
import json
import os
import resource
import shutil

import fake_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_job import MeanJob

from memory_vit.bulk import make_shards, ray_engine, readers, run, shard_file
from memory_vit.bulk import plan as plans
from memory_vit.bulk.run import run_bulk
from memory_vit.errors import ConfigError, DataError, TrainingError
from memory_vit.images import preparation
from memory_vit.runtime import parquet

pytestmark = pytest.mark.versions

BROKEN = (1, 4, 5, 6, 7, 13)  # 4 to 7 are a whole batch


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / "images"
  path.mkdir()
  for i in range(23):
    content = fake_data.encode(fake_data.picture(10 * i), "PNG")
    good = i not in BROKEN
    (path / f"{i:02}.png").write_bytes(content if good else content[:-30])
  return path


def make(folder, output, **options):
  options = {"shard_images": 8, **options}
  job = options.pop("job", MeanJob())
  return run_bulk(job, [str(folder)], str(output), **options)


def table(output):
  return pq.read_table(output).to_pylist()


@pytest.mark.fault("unreadable-images")
def test_every_image_has_one_row(folder, tmp_path):
  summary = make(folder, tmp_path / "out")
  assert (summary.images, summary.errors) == (23, len(BROKEN))
  assert (summary.shards, summary.made) == (3, 3)
  rows = table(tmp_path / "out")
  assert [row["id"] for row in rows] == list(range(23))
  assert [row["path"] for row in rows] == [
    str(folder / f"{i:02}.png") for i in range(23)
  ]
  for i, row in enumerate(rows):
    if i in BROKEN:
      assert row["error"]
      assert row["mean"] is None
    else:
      assert row["error"] is None
      expected = 10 * i / 127.5 - 1
      np.testing.assert_allclose(row["mean"], expected, atol=1e-6)
  named = dict(run.unreadable(str(tmp_path / "out")))
  assert set(named) == {str(folder / f"{i:02}.png") for i in BROKEN}


@pytest.mark.fault("unreadable-images")
def test_images_in_tables_have_the_limits_of_files(tmp_path, monkeypatch):
  monkeypatch.setattr(preparation, "MAX_FILE_BYTES", 2**20)
  picture = fake_data.encode(fake_data.noise(0), "PNG")
  larger = picture + bytes(2**20)
  path = tmp_path / "x.parquet"
  pq.write_table(pa.table({"image": [picture, larger]}), path)
  assert make(path, tmp_path / "out").errors == 1
  first, second = table(tmp_path / "out")
  assert first["error"] is None
  assert second["error"] == "the file has more than 1 MiB"


def test_shards_say_what_made_them(folder, tmp_path):
  make(folder, tmp_path / "out")
  metadata = pq.read_schema(
    tmp_path / "out" / "part-00001-of-00003.parquet"
  ).metadata
  about = json.loads(metadata[b"memory_vit"])
  assert about["shard"] == 1
  assert about["rows"] == "means"


def test_row_groups_have_several_batches(folder, tmp_path, monkeypatch):
  for i in BROKEN:
    shutil.copy(folder / "00.png", folder / f"{i:02}.png")
  make(folder, tmp_path / "whole")
  bytes_of_row = pq.read_table(tmp_path / "whole").nbytes // 23
  monkeypatch.setattr(shard_file, "_GROUP_BYTES", 6 * bytes_of_row)
  make(folder, tmp_path / "out", shard_images=23)
  [shard] = (tmp_path / "out").glob("*.parquet")
  about = pq.read_metadata(shard)
  groups = map(about.row_group, range(about.num_row_groups))
  assert [group.num_rows for group in groups] == [8, 8, 7]


@pytest.mark.fault("bulk-killed")
def test_run_killed_while_planning_starts_again(folder, tmp_path, monkeypatch):
  """Between the two files of a plan, of which plan.json is the last."""

  def killed(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(plans.pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
      make(folder, tmp_path / "out")
  assert make(folder, tmp_path / "out").images == 23
  # As a worker reads it.
  assert plans.read_plan(tmp_path / "out").inventory.images == 23


@pytest.mark.fault("bulk-killed")
def test_finished_shards_are_not_made_again(folder, tmp_path):
  make(folder, tmp_path / "whole")
  output = tmp_path / "out"

  def two_shards(plan, there, job, missing, count):
    make_shards.make_shards(plan, there, job.open(), missing[:2])
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    make(folder, output, engine=two_shards)
  first = output / "part-00000-of-00003.parquet"
  before = first.stat()
  left = output / ".part-00002-of-00003.parquet.0123abcd.part"
  left.write_bytes(b"of a process that was killed")
  made = []

  def engine(plan, there, job, missing, count):
    made.extend(missing)
    make_shards.make_shards(plan, there, job.open(), missing)

  assert make(folder, output, engine=engine).made == 1
  assert made == [2]
  assert first.stat().st_mtime_ns == before.st_mtime_ns
  assert not left.exists()
  assert table(output) == table(tmp_path / "whole")
  again = make(folder, output)
  assert (again.made, again.images, again.errors) == (0, 23, len(BROKEN))


def flipped(file):
  """The content of a file, with one bit of its values changed."""
  column = pq.read_metadata(file).row_group(0).column(4)
  content = bytearray(file.read_bytes())
  content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
  return bytes(content)


def with_rows(file, count):
  """The content of a whole shard with the first rows alone."""
  rows, part = pq.read_table(file).slice(0, count), file.with_name("part")
  with parquet.writing_sealed(part, rows.schema) as writer:
    writer.write_table(rows)
  content = part.read_bytes()
  part.unlink()
  return content


@pytest.mark.fault("bulk-damaged")
@pytest.mark.parametrize("how", ["cut", "empty", "other", "flipped", "short"])
def test_a_damaged_shard_is_made_again(folder, tmp_path, how):
  make(folder, tmp_path / "out")
  expected = table(tmp_path / "out")
  shard = tmp_path / "out" / "part-00001-of-00003.parquet"
  content = {
    "cut": shard.read_bytes()[:-20],
    "empty": b"",
    "other": (tmp_path / "out" / "part-00000-of-00003.parquet").read_bytes(),
    "flipped": flipped(shard),
    "short": with_rows(shard, 5),
  }[how]
  shard.write_bytes(content)
  said = []
  assert make(folder, tmp_path / "out", say=said.append).made == 1
  assert any("is damaged, and is made again" in line for line in said)
  assert table(tmp_path / "out") == expected


@pytest.mark.fault("bulk-damaged")
def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(folder, tmp_path):
  """In values, in the footer, and in the seal itself."""
  make(folder, tmp_path / "out")
  plan = plans.read_plan(tmp_path / "out")
  shard = tmp_path / "out" / plan.name(1)
  assert shard_file.is_whole(tmp_path / "out", plan, 1)
  whole = shard.read_bytes()
  generator = np.random.default_rng(0)
  for place in range(0, len(whole), 17):
    content = bytearray(whole)
    content[place] ^= 1 << generator.integers(8)
    shard.write_bytes(content)
    assert not shard_file.is_whole(tmp_path / "out", plan, 1), place


@pytest.mark.fault("bulk-damaged")
def test_a_shard_with_a_damaged_footer_is_made_again(folder, tmp_path):
  """A renamed column, which no checksum of a page covers."""
  make(folder, tmp_path / "out")
  shard = tmp_path / "out" / "part-00001-of-00003.parquet"
  whole = shard.read_bytes()
  shard.write_bytes(whole.replace(b"error", b"errop"))
  assert make(folder, tmp_path / "out").made == 1
  assert shard.read_bytes() == whole


@pytest.mark.fault("bulk-changed")
def test_output_of_another_run_is_refused(folder, tmp_path):
  output = tmp_path / "out"
  make(folder, output)
  for options, key in (
    ({"job": MeanJob(version=1)}, "model/version is 1, but in its plan 0"),
    ({"job": MeanJob(batch_size=2)}, "batch_size is 2, but in its plan 4"),
    ({"shard_images": 9}, "shard_images is 9, but in its plan 8"),
  ):
    with pytest.raises(ConfigError, match=key):
      make(folder, output, **options)
  (folder / "more.png").write_bytes(b"")
  with pytest.raises(
    ConfigError, match="input/files is 24, but in its plan 23"
  ):
    make(folder, output)


@pytest.mark.fault("bulk-changed")
def test_other_files_are_left_alone(folder, tmp_path):
  output = tmp_path / "out"
  output.mkdir()
  (output / "mine.txt").write_text("mine")
  with pytest.raises(ConfigError, match="is not the output of a bulk run"):
    make(folder, output)
  assert [path.name for path in output.iterdir()] == ["mine.txt"]
  file = tmp_path / "x.parquet"
  file.write_bytes(b"mine")
  with pytest.raises(ConfigError, match="expected a new or empty directory"):
    make(folder, file)
  assert file.read_bytes() == b"mine"


@pytest.mark.fault("bulk-damaged")
def test_a_worker_of_ray_makes_damaged_shards_again(folder, tmp_path):
  make(folder, tmp_path / "out")
  plan = plans.read_plan(tmp_path / "out")
  shard = tmp_path / "out" / plan.name(1)
  content = shard.read_bytes()
  shard.write_bytes(flipped(shard))
  worker = ray_engine.ShardWorker(str(tmp_path / "out"), plan.digest, MeanJob())
  worker({"shard": np.array([1])})
  assert shard.read_bytes() == content


def test_an_output_may_lie_below_the_input(folder):
  """A repeated command does not read the shards that it has written."""
  assert make(folder, folder / "out").made == 3
  assert make(folder, folder / "out").made == 0
  assert len(table(folder / "out")) == 23


@pytest.mark.fault("bulk-two-writers")
def test_two_writers_of_a_shard_do_not_spoil_it(folder, tmp_path):
  """Both write complete files; the last one stays."""
  output = tmp_path / "out"
  make(folder, output)
  expected = table(output)
  plan = plans.read_plan(output)
  model = MeanJob().open()
  schema = pa.schema([*shard_file.COMMON, *model.schema])

  def rows():
    # Another one begins and ends while this one writes.
    make_shards.make_shards(plan, output, model, [1])
    assert table(output) == expected
    raise BaseException("stopped")
    yield

  with pytest.raises(BaseException, match="^stopped$"):
    shard_file.write_shard(output, plan, 1, schema, rows())
  assert table(output) == expected
  assert not list(output.glob(".*.part"))


@pytest.mark.fault("bulk-two-writers")
@pytest.mark.parametrize("where", ["settle", "make_shards"])
def test_a_second_command_is_refused(folder, tmp_path, monkeypatch, where):
  """Also before the plan exists: two commands never write two plans."""
  module = {"settle": plans, "make_shards": make_shards}[where]
  begun, tried = getattr(module, where), []

  def second(*arguments):
    if not tried:
      tried.append(1)
      with pytest.raises(ConfigError, match="is writing there"):
        make(folder, tmp_path / "out", job=MeanJob(version=1))
    return begun(*arguments)

  monkeypatch.setattr(module, where, second)
  assert make(folder, tmp_path / "out").made == 3
  assert tried


@pytest.mark.fault("bulk-two-writers")
def test_the_lock_of_an_output_is_never_deleted(folder, tmp_path):
  """Otherwise two commands could each hold a lock of this name."""
  numbers = []
  for _ in range(2):
    make(folder, tmp_path / "out")
    numbers.append((tmp_path / "out" / "_plan" / ".lock").stat().st_ino)
  assert numbers[0] == numbers[1]


@pytest.mark.fault("bulk-disk-full")
def test_a_full_disk_ends_the_run(folder, tmp_path):
  """Finished shards stay, and the next run makes the rest."""
  output = tmp_path / "out"
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def full(plan, there, job, missing, count):
    model = job.open()
    make_shards.make_shards(plan, there, model, missing[:1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
      make_shards.make_shards(plan, there, model, missing[1:])
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  with pytest.raises(TrainingError, match="00001-of-00003.*cannot be written"):
    make(folder, output, engine=full)
  assert [p.name for p in output.glob("*part*")] == [
    "part-00000-of-00003.parquet"
  ]
  assert make(folder, output).made == 2
  assert [row["id"] for row in table(output)] == list(range(23))


@pytest.mark.fault("no-worker")
def test_shard_missing_after_the_engine_ends_is_an_error(folder, tmp_path):
  def elsewhere(plan, there, job, missing, count):
    (tmp_path / "elsewhere").mkdir()
    make_shards.make_shards(plan, tmp_path / "elsewhere", job.open(), missing)

  with pytest.raises(TrainingError, match="all workers share"):
    make(folder, tmp_path / "out", engine=elsewhere)


def test_a_plan_is_read_as_it_was_written(folder, tmp_path):
  seen = []

  def engine(plan, there, job, missing, count):
    found = plans.read_plan(there)
    assert found.digest == plan.digest
    assert found.facts == plan.facts
    seen.append(found)
    make_shards.make_shards(found, there, job.open(), missing)

  make(folder, tmp_path / "out", engine=engine)
  assert len(seen) == 1


@pytest.mark.fault("shard-order")
def test_rows_do_not_depend_on_which_shards_are_made_together(folder, tmp_path):
  batches = {}
  for name, order in (("one", [2, 0, 1]), ("each", None)):
    model = MeanJob().open()

    def engine(plan, there, job, missing, count, model=model, order=order):
      if order:
        make_shards.make_shards(plan, there, model, order)
      else:
        for shard in missing:
          make_shards.make_shards(plan, there, model, [shard])

    make(folder, tmp_path / name, engine=engine)
    batches[name] = sorted(model.batches)
  assert batches["one"] == batches["each"]
  assert table(tmp_path / "one") == table(tmp_path / "each")


@pytest.mark.fault("no-worker")
def test_more_cpus_than_a_cluster_here_has_are_refused(
  folder, tmp_path, monkeypatch
):
  """Before Ray starts: its workers would wait for a place."""
  monkeypatch.delenv("RAY_ADDRESS", raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: 3)
  engine = ray_engine.RayEngine(workers=2, worker_cpus=2)
  with pytest.raises(ConfigError, match="2 workers is 4 CPUs, .* has 3"):
    make(folder, tmp_path / "out", engine=engine)


@pytest.mark.fault("no-worker")
def test_a_shard_that_ends_every_worker_ends_the_command(folder, tmp_path):
  """The class that Ray Data calls, as a worker after the tenth."""
  output = tmp_path / "out"

  def engine(plan, there, job, missing, count):
    worker = ray_engine.ShardWorker(str(there), plan.digest, job)
    tries = there / "_plan" / f"{plan.name(1)}.tries"
    worker({"shard": np.array([0])})
    assert shard_file.errors_of(there, plan, 0) == 5
    tries.write_bytes(b".........")  # nine
    worker({"shard": np.array([1])})
    assert not tries.exists()
    (there / plan.name(1)).unlink()
    tries.write_bytes(b"..........")
    worker({"shard": np.array([1])})

  with pytest.raises(TrainingError, match="10 workers have died"):
    make(folder, output, engine=engine)
  assert make(folder, output).made == 2
  assert sorted(p.name for p in (output / "_plan").iterdir()) == [
    ".lock", "inputs.parquet", "plan.json",
  ]  # fmt: skip


@pytest.mark.fault("no-worker")
def test_a_worker_that_finds_another_plan_is_refused(folder, tmp_path):
  make(folder, tmp_path / "out")
  plan = plans.read_plan(tmp_path / "out")
  out = str(tmp_path / "out")
  ray_engine.ShardWorker(out, plan.digest, MeanJob())
  for digest, job in ((plan.digest, MeanJob(version=1)), ("0", MeanJob())):
    with pytest.raises(TrainingError, match="another plan or another model"):
      ray_engine.ShardWorker(out, digest, job)


# The first of the last batch, one within, and its last.
@pytest.mark.fault("passing-error")
@pytest.mark.parametrize(
  ("number", "name"),
  [
    (errno.EIO, "20.png"), (errno.ESTALE, "21.png"), (errno.ETIMEDOUT, "22.png")
  ],
)  # fmt: skip
def test_transient_read_error_ends_the_run_without_a_row(
  folder, tmp_path, monkeypatch, number, name
):
  """A disk or mount fails for a moment: the next run reads the image."""

  def failing(path, *arguments):
    if str(path).endswith(name):
      raise OSError(number, os.strerror(number))
    return open(path, *arguments)

  with monkeypatch.context() as context:
    context.setattr(preparation, "open", failing, raising=False)
    with pytest.raises(DataError, match=f"{name} cannot be read now"):
      make(folder, tmp_path / "out")
  summary = make(folder, tmp_path / "out")
  assert (summary.made, summary.errors) == (1, len(BROKEN))


@pytest.mark.fault("passing-error")
def test_deleted_image_becomes_an_error_row(folder, tmp_path):
  def engine(plan, there, job, missing, count):
    (folder / "20.png").unlink()
    make_shards.make_shards(plan, there, job.open(), missing)

  summary = make(folder, tmp_path / "out", engine=engine)
  assert summary.errors == len(BROKEN) + 1


@pytest.mark.fault("no-worker")
def test_a_worker_without_the_mount_of_the_input_is_refused(folder, tmp_path):
  make(folder, tmp_path / "out")
  digest = plans.read_plan(tmp_path / "out").digest
  folder.rename(tmp_path / "away")
  with pytest.raises(DataError, match="00.png existed when.*mounted"):
    ray_engine.ShardWorker(str(tmp_path / "out"), digest, MeanJob())


@pytest.mark.fault("shard-order")
def test_paths_do_not_depend_on_the_working_directory(
  folder, tmp_path, monkeypatch
):
  """Workers and resumed runs may have another one."""
  listed = tmp_path / "x.parquet"
  pq.write_table(pa.table({"path": ["00.png"]}), listed)
  columns = readers.Columns(root="images")
  monkeypatch.chdir(tmp_path)
  for i, source in enumerate(["images", "x.parquet"]):
    run_bulk(MeanJob(), [source], f"out{i}", columns=columns)
    monkeypatch.chdir(folder)
    plan = plans.read_plan(tmp_path / f"out{i}")
    model = MeanJob().open()
    make_shards.make_shards(plan, tmp_path / f"out{i}", model, [0])
    errors = shard_file.errors_of(tmp_path / f"out{i}", plan, 0)
    assert errors == (len(BROKEN), 0)[i]
    monkeypatch.chdir(tmp_path)
  again = run_bulk(MeanJob(), [str(folder)], "out0", columns=columns)
  assert again.made == 0
  with pytest.raises(DataError, match="--image_root.*is no folder"):
    run_bulk(MeanJob(), ["x.parquet"], "o", columns=readers.Columns(root="no"))


def test_data_set_readers_see_only_shards(folder, tmp_path):
  """pyarrow, Spark and others open the directory as a data set."""
  import pyarrow.dataset as ds

  make(folder, tmp_path / "out")
  files = ds.dataset(tmp_path / "out", format="parquet").files
  assert len(files) == 3
