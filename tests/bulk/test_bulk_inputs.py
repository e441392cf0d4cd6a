"""List and read inputs: folders, files, Parquet, ArrayRecord."""

import json
import os

import fake_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memory_vit.bulk import readers
from memory_vit.bulk.input_files import take_inventory
from memory_vit.bulk.readers import Columns
from memory_vit.errors import DataError

PNG = fake_data.encode(fake_data.picture(7), "PNG")


def rows(inputs, numbers=None, columns=Columns()):  # noqa: B008
  found = take_inventory([str(path) for path in inputs], columns)
  numbers = range(found.images) if numbers is None else numbers
  return list(found.rows(numbers, columns))


def write(path, values, group=None, metadata=None):
  table = pa.table(values)
  if metadata:
    table = table.replace_schema_metadata(metadata)
  pq.write_table(table, path, row_group_size=group)
  return path


def test_a_folder_is_its_images_and_their_classes(tmp_path):
  fake_data.write_folder(tmp_path, {"b": ["2.png", "1.jpg"], "a": ["1.png"]})
  (tmp_path / "top.png").write_bytes(PNG)
  (tmp_path / ".hidden.png").write_bytes(PNG)
  (tmp_path / "notes.txt").write_text("no image")
  found = rows([tmp_path])
  assert [os.path.relpath(r.path, tmp_path) for r in found] == [
    "a/1.png", "b/1.jpg", "b/2.png", "top.png",
  ]  # fmt: skip
  assert [r.label for r in found] == ["a", "b", "b", None]
  assert [r.number for r in found] == [0, 1, 2, 3]


def test_files_of_many_images_are_found_by_the_same_walk(tmp_path):
  """Links to folders are followed; names with a leading "_" are skipped."""
  write(tmp_path / "top.parquet", {"image": [PNG]})
  for folder in ("elsewhere/deep", "data/_temporary", "data/.git"):
    (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / folder / "x.parquet", {"image": [PNG]})
  (tmp_path / "data" / "link").symlink_to("../elsewhere")
  (tmp_path / "data" / "circle").symlink_to(".")
  [found] = rows([tmp_path / "data"])
  assert "link/deep/x.parquet" in found.path


@pytest.mark.parametrize("kind", ["bytes", "struct", "path"])
def test_images_in_parquet(tmp_path, kind):
  (tmp_path / "1.png").write_bytes(PNG)
  column = {
    "bytes": [PNG, None],
    "struct": [{"bytes": PNG, "path": "one"}, {"bytes": None, "path": None}],
    "path": ["1.png", None],
  }[kind]
  path = write(
    tmp_path / "x.parquet", {"image": column, "label": ["cat", None]}
  )
  one, two = rows([path])
  if kind == "path":
    assert one.image == str(tmp_path / "1.png")
  else:
    assert one.image == PNG
  names = {"bytes": f"{path}#0", "struct": "one", "path": "1.png"}
  assert (one.path, one.label) == (names[kind], "cat")
  assert (two.image, two.path) == (None, f"{path}#1")
  assert two.reason == "the row has no image"


def _stored_as(values, kind):
  """A column of one of the types that Arrow has for the same values."""
  if pa.types.is_dictionary(kind):
    distinct = pa.array([v for v in values if v is not None], kind.value_type)
    places = [None if v is None else 0 for v in values]
    return pa.DictionaryArray.from_arrays(
      pa.array(places, kind.index_type), distinct
    )
  return pa.array(values, kind)


@pytest.mark.parametrize(
  "kind",
  [
    pa.large_binary(), pa.binary_view(), pa.binary(len(PNG)),
    pa.dictionary(pa.int32(), pa.binary()),
    pa.large_string(), pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())]),
    pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())]),
    pa.struct([
      ("bytes", pa.dictionary(pa.int32(), pa.binary())),
      ("path", pa.dictionary(pa.int32(), pa.string())),
    ]),
  ],
  ids=str,
)  # fmt: skip
def test_images_and_labels_of_every_type_of_arrow(tmp_path, kind):
  """As pandas (categories), Polars (views) and Spark write them."""
  (tmp_path / "1.png").write_bytes(PNG)
  if pa.types.is_struct(kind):
    parts = (("bytes", PNG), ("path", "1.png"))
    arrays = [_stored_as([v, None], kind.field(n).type) for n, v in parts]
    column, image = pa.StructArray.from_arrays(arrays, fields=[*kind]), PNG
  else:
    is_text = "string" in str(kind)
    column = _stored_as(["1.png" if is_text else PNG, None], kind)
    image = str(tmp_path / "1.png") if is_text else PNG
  labels = pa.array([b"cat", None], pa.binary_view())
  path = write(tmp_path / "x.parquet", {"image": column, "label": labels})
  one, two = rows([path])
  assert (one.image, one.label) == (image, "cat")
  assert (two.image, two.reason) == (None, "the row has no image")


def test_labels_have_the_names_that_hugging_face_states(tmp_path):
  stated = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
  path = write(
    tmp_path / "x.parquet",
    {"image": [PNG] * 3, "label": [1, 0, 5]},
    metadata={"huggingface": json.dumps(stated)},
  )
  assert [r.label for r in rows([path])] == ["dog", "cat", "5"]


@pytest.mark.parametrize("group", [1, 3, 7, 100])
def test_any_part_of_several_files_is_read(tmp_path, group):
  """For any row groups, also with files without rows."""
  contents = [f"{i}".encode() for i in range(50)]
  sizes = [20, 0, 1, 29]
  files, start = [], 0
  for i, size in enumerate(sizes):
    part = pa.array(contents[start : start + size], pa.binary())
    files.append(write(tmp_path / f"{i}.parquet", {"image": part}, group))
    start += size
  for numbers in (range(50), range(3, 22), range(19, 21), range(20, 50)):
    found = rows([tmp_path], numbers)
    assert [r.image for r in found] == [contents[i] for i in numbers]
    assert [r.number for r in found] == list(numbers)


@pytest.mark.fault("bad-bulk-input")
@pytest.mark.parametrize("bad", ["/etc/passwd", "../1.png", "a/../../1.png"])
def test_paths_in_parquet_do_not_lead_out_of_its_folder(tmp_path, bad):
  (tmp_path / "in").mkdir()
  path = write(tmp_path / "in" / "x.parquet", {"path": [bad, "ok.png"]})
  refused, read = rows([path])
  assert refused.image is None
  assert "not a path below" in refused.reason
  assert read.image == str(tmp_path / "in" / "ok.png")
  columns = Columns(root=str(tmp_path))
  absolute = write(path, {"path": [str(tmp_path / "1.png")]})
  assert rows([absolute], columns=columns)[0].image == str(tmp_path / "1.png")


def test_images_in_array_record(tmp_path):
  module = pytest.importorskip("array_record.python.array_record_module")
  path = tmp_path / "x.array_record-00000-of-00001"
  writer = module.ArrayRecordWriter(str(path), "group_size:1")
  contents = [fake_data.encode(fake_data.picture(i), "PNG") for i in range(40)]
  for content in contents:
    writer.write(content)
  writer.close()
  found = rows([path], range(5, 39))
  assert [r.image for r in found] == contents[5:39]
  assert found[0].path == f"{path}#5"


@pytest.mark.fault("bad-bulk-input")
def test_array_record_without_images_is_refused(tmp_path):
  module = pytest.importorskip("array_record.python.array_record_module")
  path = tmp_path / "x.array_record"
  writer = module.ArrayRecordWriter(str(path), "group_size:1")
  writer.write(b"\x0a\x05image")
  writer.close()
  with pytest.raises(
    DataError, match="first record is not an image file.*TFDS"
  ):
    rows([path])


@pytest.mark.fault("bad-bulk-input")
def test_unusable_inputs_are_refused(tmp_path):
  with pytest.raises(DataError, match="no such file or folder"):
    rows([tmp_path / "missing"])
  with pytest.raises(DataError, match="has no image"):
    rows([tmp_path])
  broken = tmp_path / "x.parquet"
  broken.write_bytes(b"PAR1 and no more")
  with pytest.raises(DataError, match="x.parquet cannot be read"):
    rows([broken])
  write(broken, {"number": [1]})
  with pytest.raises(DataError, match=r"is missing; the columns are \['n"):
    rows([broken])
  with pytest.raises(DataError, match="is of type int64"):
    rows([broken], columns=Columns(image="number"))
  for column in ([[1]], [{"bytes": PNG, "path": b"1"}], [{"path": "1.png"}]):
    write(broken, {"image": column})
    with pytest.raises(DataError, match=r"is of type .* hold the bytes of"):
      rows([broken])
  no_text = pa.array([b"\xff"]).view(pa.string())
  write(broken, {"image": [PNG], "label": no_text})
  with pytest.raises(DataError, match="x.parquet cannot be read"):
    rows([broken])
  write(broken, {"image": [PNG, PNG]})
  found = take_inventory([str(broken)], Columns())
  write(broken, {"image": [PNG]})
  with pytest.raises(DataError, match="has fewer rows than it had"):
    list(found.rows(range(2), Columns()))
  with pytest.raises(DataError, match="no column 'class': expected one of"):
    rows([broken], columns=Columns(label="class"))
  (tmp_path / "1.png").write_bytes(PNG)
  with pytest.raises(
    DataError, match="holds both image files and files of many"
  ):
    rows([tmp_path])


@pytest.mark.fault("bulk-changed")
def test_an_inventory_knows_changed_files(tmp_path):
  fake_data.write_folder(tmp_path, {"a": ["1.png", "2.png"]})

  def digest():
    return take_inventory([str(tmp_path)], Columns()).digest

  first = digest()
  assert digest() == first
  os.utime(tmp_path / "a" / "1.png", ns=(1, 1))
  assert digest() != first
  changed = digest()
  (tmp_path / "a" / "3.png").write_bytes(PNG)
  assert digest() != changed


def test_file_names_that_are_not_utf_8_are_read(tmp_path):
  name = os.fsencode(tmp_path) + b"/\xff\n.png"
  with open(name, "wb") as file:
    file.write(PNG)
  [row] = rows([tmp_path])
  assert os.fsencode(row.image) == name
  row.path.encode()  # can be written to Parquet
  assert readers.is_container(tmp_path / "x.array_record-00000-of-00010")
