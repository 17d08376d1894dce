"""Manifests of every make: which rows are accepted, which are refused and why, which manifests cannot be used."""

import re
from decimal import Decimal
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fluxbatch.config import ManifestConfig
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.manifest.files import Manifest, open_manifest
from fluxbatch.records import Rejection, RowRules

RULES = {
    "height": 128, "width": 128, "num_inference_steps": 20, "guidance_scale": 3.5, "seed": 0, "size_multiple": 16,
    "max_pixels": 2**22, "max_side": 2**31 - 1, "size_policy": "reject", "allow_blank_prompts": False,
    "guidance": "embedded", "negative_prompts": True,
}  # fmt: skip


def write(path: Path, columns: dict | pa.Table, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def opened(path, **settings) -> Manifest:
    return open_manifest(ManifestConfig(path=path if isinstance(path, list) else str(path), **settings))


def check(manifest: Manifest, **rules) -> tuple[list[dict], list[Rejection]]:
    chunks = list(manifest.chunks(RowRules(**{**RULES, **rules})))
    return [row for c in chunks for row in c.accepted.to_pylist()], [r for c in chunks for r in c.rejected]


@pytest.fixture
def judge(tmp_path: Path):
    """Accepted rows and rejections of one file with these columns; ids a, b, c, ... unless given."""

    def judge(columns: dict, **rules) -> tuple[list[dict], list[Rejection]]:
        num_rows = len(next(iter(columns.values())))
        filled = {"id": [chr(97 + i) for i in range(num_rows)], "prompt": ["a cat"] * num_rows} | columns
        return check(opened(write(tmp_path / "m.parquet", filled)), **rules)

    return judge


def text_with_bytes(values: list[bytes]) -> pa.Array:
    """A string column as careless writers make it: the bytes are whatever they are."""
    _, offsets, data = pa.array(values, pa.binary()).buffers()
    return pa.StringArray.from_buffers(len(values), offsets, data)


def column(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def reasons(rejected: list[Rejection]) -> list[tuple[int, str, str]]:
    return [(r.row, r.column, r.reason) for r in rejected]


# Finding the files.


def test_a_folder_is_read_in_natural_order_without_hidden_names_and_folder_names_are_no_columns(tmp_path: Path):
    for name in ("part-10", "part-2", "year=2024/part-1", "_temporary/x", ".hidden", "sub/_x", "part-1.crc"):
        write(tmp_path / f"{name}.parquet", {"prompt": [name]})
    (tmp_path / "notes.txt").write_text("not a manifest")
    (tmp_path / "part-1.crc.parquet").unlink()
    manifest = opened(tmp_path)
    assert [str(Path(file).relative_to(tmp_path)) for file in manifest.files] == [
        "part-2.parquet", "part-10.parquet", "year=2024/part-1.parquet",
    ]  # fmt: skip
    rows, _ = check(manifest)
    assert column(rows, "prompt") == ["part-2", "part-10", "year=2024/part-1"]
    assert "extra" not in rows[0]


def test_a_glob_a_list_and_a_relative_path_name_the_same_files(tmp_path: Path, monkeypatch):
    first, second = (write(tmp_path / f"{name}.parquet", {"prompt": [name]}) for name in "ab")
    monkeypatch.chdir(tmp_path)
    files = [str(first), str(second)]
    assert opened("*.parquet").files == files
    assert opened([str(second), "a.parquet"]).files == files
    assert opened(["a.parquet", str(tmp_path)]).files == files


@pytest.mark.parametrize("name", ["a,b = [c]*{d}.parquet", "李明 ${x}#1.parquet", "it's 100%.parquet"])
def test_br42_a_name_that_exists_is_no_pattern(tmp_path: Path, name: str):
    path = write(tmp_path / "run=3" / name, {"prompt": ["a cat"]})
    assert opened(path).files == [str(path)]
    assert opened(path.parent).files == [str(path)]


def test_a_url_of_fsspec_opens(tmp_path: Path):
    fs = fsspec.filesystem("memory")
    for name in ("a", "b"):
        fs.pipe(f"/m/{name}.parquet", write(tmp_path / "m.parquet", {"prompt": [name]}).read_bytes())
    for url in ("memory://m", "memory://m/*.parquet"):
        manifest = opened(url)
        assert [file.rsplit("/", 1)[1] for file in manifest.files] == ["a.parquet", "b.parquet"]
        assert column(check(manifest)[0], "prompt") == ["a", "b"]


def test_a_saved_dataset_opens_through_datasets(tmp_path: Path):
    dataset = datasets.Dataset.from_dict({"caption": ["a", "b", "c"], "tag": [[1], [], None]})
    dataset.select([2, 0]).save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "two")
    rows, _ = check(opened(tmp_path / "plain", columns={"prompt": "caption"}))
    assert [(row["prompt"], row["extra"]["tag"]) for row in rows] == [("c", None), ("a", [1])]
    assert len(check(opened(tmp_path / "one", columns={"prompt": "caption"}))[0]) == 3
    with pytest.raises(ManifestError, match="splits train, test"):
        opened(tmp_path / "two", columns={"prompt": "caption"})


def test_what_is_no_manifest_is_refused_with_its_path(tmp_path: Path):
    whole = write(tmp_path / "whole.parquet", {"prompt": ["a cat"] * 1000})
    cut, empty, text = (tmp_path / f"{name}.parquet" for name in ("cut", "empty", "text"))
    cut.write_bytes(whole.read_bytes()[:-20])
    empty.touch()
    text.write_text("prompt\na cat\n")
    (tmp_path / "nothing").mkdir()
    for path in (cut, empty, text, tmp_path / "absent.parquet", tmp_path / "nothing", tmp_path / "no*.parquet"):
        with pytest.raises(ManifestError, match=re.escape(str(path))):
            opened(path)
    with pytest.raises(ManifestError, match="nosuch://x"):
        opened("nosuch://x/m.parquet")


def test_damage_inside_a_file_is_found_when_its_rows_are_read(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"prompt": [f"cat {i}" for i in range(1000)]}, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=r"m\.parquet"):
        check(opened(path))


def test_the_digest_changes_with_the_files_and_with_the_choice_of_columns(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"prompt": ["a"], "tag": ["x"]})
    digests = [opened(path).digest, opened(path).digest, opened(path, drop_columns=["tag"]).digest]
    write(path, {"prompt": ["b"], "tag": ["x"]})
    digests.append(opened(path).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# Columns.


def test_columns_are_found_under_the_names_given(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"key": [7], "caption": ["a cat"], "h": [256]})
    rows, _ = check(opened(path, columns={"id": "key", "prompt": "caption", "height": "h", "width": None}))
    assert (rows[0]["id"], rows[0]["prompt"], rows[0]["height"], rows[0]["width"]) == ("7", "a cat", 256, 128)
    assert "extra" not in rows[0]


def test_a_wrong_mapping_is_refused_with_the_names_there_are(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"caption": ["a cat"], "n": [1]})
    with pytest.raises(ManifestError, match=r"manifest\.columns\.prompt=captoin.*caption, n"):
        opened(path, columns={"prompt": "captoin"})
    with pytest.raises(ConfigError, match=r"manifest\.columns\.promt must be one of id, prompt"):
        opened(path, columns={"promt": "caption"})
    with pytest.raises(ManifestError, match=r"no column prompt, only caption, n; .*manifest\.columns\.prompt="):
        opened(path)


def test_every_file_needs_a_prompt_column(tmp_path: Path):
    write(tmp_path / "a.parquet", {"prompt": ["a cat"]})
    write(tmp_path / "b.parquet", {"text": ["a dog"]})
    with pytest.raises(ManifestError, match=r"b\.parquet: no column prompt"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("prompt", pa.array([["a cat"]]), "list<"),
        ("prompt", pa.array([b"a cat"]), "binary"),
        ("id", pa.array([1.0]), "double"),
        ("height", pa.array(["512"]), "string"),
        ("seed", pa.array([True]), "bool"),
    ],
)
def test_br01_a_wrong_type_is_refused_with_file_column_and_type(tmp_path: Path, name, values, kind):
    path = write(tmp_path / "m.parquet", {"prompt": ["a cat"], name: values})
    with pytest.raises(ManifestError, match=rf"m\.parquet: column {name} must hold .*{kind}"):
        opened(path)


def test_br01_all_text_encodings_give_the_same_rows(tmp_path: Path):
    prompts = ["a cat", "a dog", "a cat", "ein Käfer"]
    found = []
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        values = pa.array(prompts).cast(kind)
        path = write(tmp_path / "m.parquet", {"id": values, "prompt": values, "tag": values, "negative_prompt": values})
        found.append(check(opened(path)))
    assert column(found[0][0], "prompt") == prompts
    assert all(rows == found[0] for rows in found)


def test_br01_a_column_that_is_all_null_in_the_first_file_loads(tmp_path: Path):
    nulls = pa.nulls(2)
    write(tmp_path / "0.parquet", {"prompt": ["a", "b"], "negative_prompt": nulls, "seed": nulls, "tag": nulls})
    write(tmp_path / "1.parquet", {"prompt": ["c"], "negative_prompt": ["d"], "seed": [5], "tag": ["e"], "more": [1]})
    rows, rejected = check(opened(tmp_path))
    assert not rejected
    assert column(rows, "negative_prompt") == [None, None, "d"]
    assert column(rows, "extra") == [{"tag": None, "more": None}] * 2 + [{"tag": "e", "more": 1}]


def test_other_columns_keep_their_types_through_all_files(tmp_path: Path):
    extras = {
        "half": pa.array([0.5, 2.0], pa.float16()),
        "span": pa.array([1, None], pa.duration("ns")),
        "when": pa.array([1, 2], pa.timestamp("ns", "Europe/Berlin")),
        "boxes": pa.array([[[1, 2]], None], pa.list_(pa.list_(pa.int16(), 2))),
        "raw": pa.array([b"\xff", b""]),
        "huge": pa.array([Decimal(1), None], pa.decimal256(60, 3)),
        "tag": pa.array(["x", "y"]).dictionary_encode(),
        "pair": pa.array([{"a": 1, "b": "x"}, None]),
    }
    write(tmp_path / "m.parquet", {"prompt": ["a", "b"], **extras})
    manifest = opened(tmp_path)
    [chunk] = manifest.chunks(RowRules(**RULES))
    kinds = {name: values.type for name, values in extras.items()} | {"tag": pa.string()}
    assert {field.name: field.type for field in chunk.accepted.schema.field("extra").type} == kinds
    for name, values in zip(kinds, chunk.accepted["extra"].combine_chunks().flatten(), strict=True):
        assert values.cast(kinds[name]).equals(extras[name].cast(kinds[name])), name


def test_other_columns_that_disagree_are_refused_with_the_file_and_can_be_left_out(tmp_path: Path):
    write(tmp_path / "a.parquet", {"prompt": ["a"], "tag": ["x"], "n": pa.array([1], pa.int32())})
    write(tmp_path / "b.parquet", {"prompt": ["b"], "tag": [3], "n": pa.array([2], pa.int64())})
    with pytest.raises(ManifestError, match=r"b\.parquet: .*tag.*manifest\.drop_columns"):
        opened(tmp_path)
    assert opened(tmp_path, drop_columns=["tag"]).extra_schema == pa.schema({"n": pa.int64()})


def test_other_columns_may_have_another_encoding_in_each_file(tmp_path: Path):
    for i, kind in enumerate((pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))):
        write(tmp_path / f"{i}.parquet", {"prompt": ["a"], "tag": pa.array(["x"]).cast(kind)})
    manifest = opened(tmp_path)
    assert manifest.extra_schema == pa.schema({"tag": pa.string()})
    assert column(check(manifest)[0], "extra") == [{"tag": "x"}] * 3


def test_a_column_that_stands_twice_is_refused(tmp_path: Path):
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["prompt", "tag", "tag"])
    with pytest.raises(ManifestError, match="column tag stands twice"):
        opened(write(tmp_path / "m.parquet", table))


@pytest.mark.parametrize(
    "name",
    ["image", "truncated", "requested_height", "requested_width", "file_name", "image_bytes", "image_sha256"],
)
def test_a_column_named_like_one_of_the_output_is_refused(tmp_path: Path, name: str):
    path = write(tmp_path / "m.parquet", {"prompt": ["a"], name: [1]})
    with pytest.raises(ManifestError, match=rf"column {name} .*manifest\.drop_columns=\[{name}\], or rename it"):
        opened(path)
    assert opened(path, drop_columns=[name]).num_rows == 1


@pytest.mark.parametrize("wrap", [lambda kind: kind, pa.list_, lambda kind: pa.struct({"a": kind})])
def test_a_column_of_maps_is_refused_and_can_be_left_out_or_cast(tmp_path: Path, wrap):
    path = tmp_path / "m.parquet"
    write(path, {"prompt": ["a"], "m": pa.nulls(1, wrap(pa.map_(pa.string(), pa.int64())))})
    with pytest.raises(ManifestError, match=r"column m must not hold maps.*drop_columns=\[m\].* list of structs"):
        opened(path)
    assert opened(path, drop_columns=["m"]).extra_schema == pa.schema([])
    pairs = wrap(pa.list_(pa.struct({"key": pa.string(), "value": pa.int64()})))
    assert opened(write(path, {"prompt": ["a"], "m": pa.nulls(1, pairs)})).extra_schema.names == ["m"]


def test_a_column_that_is_mapped_away_and_still_there_is_refused(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"prompt": ["a"], "caption": ["b"]})
    with pytest.raises(ManifestError, match="column prompt has the name"):
        opened(path, columns={"prompt": "caption"})


# Rows.


def test_ids_are_text_or_digits_and_neither_null_nor_blank(judge):
    rows, rejected = judge({"id": ["a b/ü\x00", None, " \t\u3000", ""], "prompt": ["x"] * 4})
    assert column(rows, "id") == ["a b/ü\x00"]
    assert reasons(rejected) == [(1, "id", "null_id"), (2, "id", "blank_id"), (3, "id", "blank_id")]
    rows, rejected = judge({"id": pa.array([2**64 - 1, None, 7], pa.uint64())})
    assert column(rows, "id") == ["18446744073709551615", "7"]
    assert reasons(rejected) == [(1, "id", "null_id")]


def test_rows_without_an_id_column_are_numbered_over_all_files(tmp_path: Path):
    write(tmp_path / "a.parquet", {"prompt": ["a", None, "c"]})
    write(tmp_path / "b.parquet", {"prompt": ["d"]})
    rows, rejected = check(opened(tmp_path))
    assert column(rows, "id") == ["row-000000000", "row-000000002", "row-000000003"]
    assert (rejected[0].id, rejected[0].row) == ("row-000000001", 1)


def test_prompts_must_be_there_and_say_something_unless_blank_ones_are_allowed(judge):
    prompts = {"prompt": [None, "", " \n\u00a0", "x", "\x00"]}
    rows, rejected = judge(prompts)
    assert column(rows, "prompt") == ["x", "\x00"]
    assert [r.reason for r in rejected] == ["null_prompt", "blank_prompt", "blank_prompt"]
    rows, rejected = judge(prompts, allow_blank_prompts=True)
    assert column(rows, "prompt") == ["", " \n\u00a0", "x", "\x00"]
    assert [r.reason for r in rejected] == ["null_prompt"]


def test_br03_seeds_are_exact(judge):
    rows, rejected = judge({"seed": pa.array([9007199254740993, None, -(2**63)], pa.int64())})
    assert not rejected
    assert (rows[0]["seed"], rows[2]["seed"]) == (9007199254740993, -(2**63))
    assert 0 <= rows[1]["seed"] < 2**63
    assert column(judge({"seed": pa.array([2**64 - 1], pa.uint64())})[0], "seed") == [2**64 - 1]
    wide = [Decimal(seed) for seed in (2**64 - 1, -(2**63), 2**64, -(2**63) - 1)]
    rows, rejected = judge({"seed": pa.array([*wide, None, Decimal("0.5")], pa.decimal128(38, 1))})
    assert column(rows[:2], "seed") == [2**64 - 1, -(2**63)]
    assert reasons(rejected) == [(i, "seed", "bad_seed") for i in (2, 3, 5)]
    assert "18446744073709551616" in rejected[0].message


def test_br03_integers_that_went_through_float_are_taken_only_where_they_are_exact(judge):
    rows, rejected = judge({"height": [1024.0, float("nan"), 1024.5, None, float("inf"), -16.0]})
    assert column(rows, "height") == [1024, 128, 128]
    assert reasons(rejected) == [(2, "height", "bad_size"), (4, "height", "bad_size"), (5, "height", "bad_size")]
    assert "1024.5" in rejected[0].message
    rows, rejected = judge({"seed": [5.0, float("nan"), 0.5, 2.0**60]})
    assert rows[0]["seed"] == 5
    assert reasons(rejected) == [(2, "seed", "bad_seed"), (3, "seed", "bad_seed")]


def test_br03_guidance_is_a_finite_number_and_null_is_the_default(judge):
    rows, rejected = judge({"guidance_scale": pa.array([3.0, None, float("nan"), float("inf"), -1.0, 0.0])})
    assert column(rows, "guidance_scale") == [3.0, 3.5, 0.0]
    assert reasons(rejected) == [(i, "guidance_scale", "bad_guidance") for i in (2, 3, 4)]
    assert column(judge({"guidance_scale": [4]})[0], "guidance_scale") == [4.0]


def test_unsigned_sizes_beyond_any_limit_fail_their_row_and_null_is_the_default(judge):
    rows, rejected = judge({"height": pa.array([2**64 - 1, None, 256], pa.uint64())})
    assert column(rows, "height") == [128, 256]
    assert reasons(rejected) == [(0, "height", "bad_size")]


def test_steps_are_whole_numbers_from_one(judge):
    rows, rejected = judge({"num_inference_steps": pa.array([4, None, 0, -1, 2**40], pa.int64())})
    assert column(rows, "num_inference_steps") == [4, 20]
    assert [r.reason for r in rejected] == ["bad_steps"] * 3


def test_br05_invalid_utf8_fails_only_its_row(judge):
    prompts = ["👩‍🚀", "عربي\u202e", "e\u0301", "a\x00b", "x" * 200_000, "a\n\t\rb", *["a cat"] * 93]
    raw = [prompt.encode() for prompt in prompts]
    raw.insert(50, b"caf\xe9")
    rows, rejected = judge({"id": [f"{i:03}" for i in range(100)], "prompt": text_with_bytes(raw)})
    assert column(rows, "prompt") == prompts
    assert reasons(rejected) == [(50, "prompt", "invalid_utf8")]


def test_br05_invalid_utf8_in_any_column_fails_its_row(judge):
    bad = text_with_bytes([b"ok", b"\xff"])
    nested = pa.ListArray.from_arrays([0, 1, 2], bad)
    for name, values in {"id": bad, "negative_prompt": bad, "tag": bad, "tags": nested}.items():
        rows, rejected = judge({name: values, "prompt": ["x", "y"]})
        assert len(rows) == 1
        assert reasons(rejected) == [(1, name, "invalid_utf8")]
    assert judge({"id": bad})[1][0].id is None


def test_br09_an_impossible_size_is_rejected_with_the_nearest_ones(judge):
    rows, rejected = judge({"height": [1080, 1072, 8, 0, -16, 100_000], "width": [1920, 1920, 8, 0, 16, 160]})
    assert column(rows, "height") == [1072]
    assert [r.reason for r in rejected] == ["bad_size"] * 5
    assert [r.message for r in rejected] == [
        "height must be a multiple of 16, got 1080; nearest 1072, 1088",
        "height must be >= 16, got 8; nearest 16",
        "height must be >= 16, got 0; nearest 16",
        "height must be >= 16, got -16; nearest 16",
        "height x width must be <= 4194304 pixels, got 100000x160; nearest 51200x80",
    ]


def test_br09_sizes_are_floored_on_request_and_both_are_recorded(judge):
    sizes = {"height": [1080, 1072, 1087, 15, 8, 0, 100_000], "width": [1920, 1920, 1920, 1024, 8, 0, 160]}
    rows, rejected = judge(sizes, size_policy="floor")
    assert {(row["height"], row["width"]) for row in rows} == {(1072, 1920)}
    asked = [(row["requested_height"], row["requested_width"]) for row in rows]
    assert asked == [(1080, 1920), (None, None), (1087, 1920)]
    assert [r.row for r in rejected] == [3, 4, 5, 6]


def test_br33_what_the_image_format_cannot_hold_is_known_while_planning(judge):
    rows, rejected = judge({"height": [16400, *[128] * 49], "width": [16] * 50, "id": range(50)}, max_side=16383)
    assert len(rows) == 49
    assert reasons(rejected) == [(0, "height", "bad_size")]
    assert "16383" in rejected[0].message


@pytest.mark.parametrize("guidance", ["embedded", "none"])
def test_a_negative_prompt_that_says_something_is_a_second_pass(judge, guidance):
    rows, _ = judge({"negative_prompt": ["blur", "", None, " "]}, guidance=guidance)
    assert column(rows, "negative_pass") == [True, False, False, False]


def test_classifier_free_guidance_above_one_is_a_second_pass(judge):
    rows, _ = judge({"guidance_scale": [4.0, 1.0, 0.5]}, guidance="classifier_free")
    assert column(rows, "negative_pass") == [True, False, False]


def test_a_negative_prompt_on_a_model_without_a_second_pass_is_rejected(judge):
    rows, rejected = judge({"negative_prompt": ["blur", "", None]}, negative_prompts=False)
    assert len(rows) == 2
    assert reasons(rejected) == [(0, "negative_prompt", "negative_prompt_unsupported")]


def test_a_row_with_many_faults_is_rejected_once_and_its_message_is_one_line(judge):
    rows, rejected = judge({"id": ["a\nb"], "prompt": [None], "height": [7], "seed": [0.5]})
    assert not rows
    assert reasons(rejected) == [(0, "prompt", "null_prompt")]
    assert "\n" not in rejected[0].message


# Derived seeds and fingerprints.


def test_a_derived_seed_depends_on_the_id_and_the_sampler_seed_alone(judge):
    rows, _ = judge({"id": ["x", "y"], "prompt": ["a", "b"]})
    turned, _ = judge({"id": ["y", "x"], "prompt": ["c", "d"], "seed": pa.nulls(2)})
    other, _ = judge({"id": ["x"]}, seed=1)
    assert column(rows, "seed") == column(turned, "seed")[::-1]
    assert len({*column(rows, "seed"), *column(other, "seed")}) == 3
    assert column(judge({"id": ["a cat"]})[0], "seed") == [6482821254300958548]  # a change here changes every image


def test_a_fingerprint_tells_any_edit_and_nothing_else(judge):
    columns = {
        "id": ["a"], "prompt": ["p"], "negative_prompt": ["n"], "height": [256], "width": [128], "seed": [1],
        "num_inference_steps": [4], "guidance_scale": [2.0], "tag": ["t"], "list": [[1, 2]], "when": [1.5],
    }  # fmt: skip
    edits = {
        "id": "b", "prompt": "pn", "negative_prompt": None, "height": 128, "width": 256, "seed": 2, "when": -1.5,
        "num_inference_steps": 5, "guidance_scale": 2.5, "tag": None, "list": [12],
    }  # fmt: skip

    def fingerprint(changed: dict) -> str:
        return judge(changed)[0][0]["fingerprint"]

    before = fingerprint(columns)
    edited = {
        name: fingerprint({**columns, name: pa.array([value], pa.array(columns[name]).type)})
        for name, value in edits.items()
    }
    assert len({before, *edited.values()}) == len(edits) + 1
    assert fingerprint(dict(reversed(columns.items()))) == before
    assert fingerprint({**columns, "new": pa.nulls(1)}) == before
    bare = {"prompt": ["p"]}
    assert fingerprint({**bare, "first": pa.nulls(1)}) == fingerprint(bare), "of a manifest without columns of its own"
    assert fingerprint({**bare, "first": [""]}) != fingerprint(bare)
    assert fingerprint({**columns, "height": [256.0]}) == before


def test_neighbouring_fields_do_not_run_into_each_other(judge):
    rows, _ = judge({
        "id": ["a", "a|b", "x", "x", "y", "y"], "prompt": ["b|c", "c", "p", "p", "p", "p"],
        "negative_prompt": [None, None, None, "~", None, None],
        "s": [None, None, None, None, "v1:t:w", "v"], "t": [None, None, None, None, None, "w"],
    })  # fmt: skip
    assert len(set(column(rows, "fingerprint"))) == 6


def test_chunks_do_not_change_what_is_found(tmp_path: Path, monkeypatch):
    prompts = [f"cat {i}" if i % 7 else None for i in range(100)]
    path = write(tmp_path / "m.parquet", {"prompt": prompts, "tag": range(100)}, row_group_size=9)
    whole = check(opened(path))
    monkeypatch.setattr("fluxbatch.manifest.files.CHUNK_ROWS", 11)
    assert len(list(opened(path).chunks(RowRules(**RULES)))) > 9
    assert check(opened(path)) == whole


def test_br06_long_prompts_make_smaller_chunks(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fluxbatch.manifest.files.CHUNK_BYTES", 10_000)
    long = [f"{i} " + "x" * 1000 for i in range(100)]
    path = write(tmp_path / "m.parquet", {"prompt": long, "unused": [b"y" * 10_000] * 100}, use_dictionary=False)
    chunks = list(opened(path, drop_columns=["unused"]).chunks(RowRules(**RULES)))
    assert max(chunk.accepted.num_rows for chunk in chunks) in (9, 10)


def test_br06_rows_are_read_only_when_they_are_asked_for(tmp_path: Path):
    path = write(tmp_path / "m.parquet", {"prompt": ["a"] * 10})
    manifest = opened(path)
    assert manifest.num_rows == 10
    path.unlink()
    with pytest.raises(ManifestError, match="cannot be read"):
        check(manifest)


def test_a_row_is_located_in_its_file(tmp_path: Path):
    write(tmp_path / "a.parquet", {"prompt": ["a"] * 3})
    write(tmp_path / "b.parquet", {"prompt": pa.array([], pa.string())})
    write(tmp_path / "c.parquet", {"prompt": ["a", None]})
    manifest = opened(tmp_path)
    assert manifest.locate(4) == "row 4 (c.parquet, row 1)"
    assert check(manifest)[1] == [Rejection(4, "row-000000004", "prompt", "null_prompt", "prompt must not be null")]


def test_an_index_that_pandas_wrote_is_no_column_of_the_manifest(tmp_path):
    table = pa.table({"id": ["a"], "prompt": ["x"], "__index_level_0__": [7], "price": [1.5]})
    pq.write_table(table, tmp_path / "m.parquet")
    assert open_manifest(ManifestConfig(path=str(tmp_path / "m.parquet"))).extra_schema.names == ["price"]
