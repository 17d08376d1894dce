"""`manifest`: what people have becomes what a job reads, or is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fluxbatch.command import run_command
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.manifest.make_manifest import Made, make_manifest, read_order


def make(tmp_path: Path, content: str | bytes | None = None, suffix: str = "csv", **words: str) -> Made:
    """`make(tmp_path, "...", columns__prompt="x")`: dots are double underscores, from and to are given."""
    words = {key.replace("__", "."): value for key, value in words.items()}
    if content is not None:
        path = tmp_path / f"in.{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        words |= {"from": str(path)}
    return make_manifest(read_order({"to": str(tmp_path / "out.parquet"), **words}))


def made(tmp_path: Path) -> list[dict[str, Any]]:
    return pq.read_table(tmp_path / "out.parquet").to_pylist()


def test_br03_a_csv_keeps_every_letter_of_ids_seeds_prompts_and_own_columns(tmp_path: Path) -> None:
    text = 'id,prompt,height,width,seed,sku\n007,"a ""red"" mug,\na hat",1024,768.0,18446744073709551615,00123\n'
    assert make(tmp_path, text + "\n008,猫,,,,2024-01-01\n").rows == 2
    first, second = made(tmp_path)
    assert first == {"id": "007", "prompt": 'a "red" mug,\na hat', "height": 1024, "width": 768, "seed": 2**64 - 1,
                     "sku": "00123"}  # fmt: skip
    assert second == {"id": "008", "prompt": "猫", "height": None, "width": None, "seed": None, "sku": "2024-01-01"}
    assert pq.read_schema(tmp_path / "out.parquet").field("seed").type == pa.uint64()


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_byte_order_mark_crlf_blank_lines_and_any_separator(tmp_path: Path, separator: str) -> None:
    text = "id,prompt\r\n\r\na,cat\r\n\r\nb,dog\r\n".replace(",", separator)
    make(tmp_path, b"\xef\xbb\xbf" + text.encode())
    assert made(tmp_path) == [{"id": "a", "prompt": "cat"}, {"id": "b", "prompt": "dog"}]


def test_text_json_lines_and_parquet_give_the_rows_that_they_hold(tmp_path: Path) -> None:
    make(tmp_path, "cat\r\n\r\ndog\n", "txt")
    assert made(tmp_path) == [{"id": "row-000000000", "prompt": "cat"}, {"id": "row-000000001", "prompt": "dog"}]
    make(
        tmp_path,
        '{"id": 7, "prompt": "cat", "when": "2024-01-01"}\n\n{"prompt": "dog", "id": 8, "seed": -5}\n',
        "jsonl",
    )
    assert made(tmp_path) == [{"id": "7", "prompt": "cat", "seed": None, "when": "2024-01-01"},
                              {"id": "8", "prompt": "dog", "seed": -5, "when": None}]  # fmt: skip
    table = pa.table({"caption": ["cat", "dog"], "tag": pa.array([1, None], pa.int8())})
    pq.write_table(table, tmp_path / "in.parquet")
    make(tmp_path, columns__prompt="caption", **{"from": str(tmp_path / "in.parquet")})
    assert made(tmp_path)[1] == {"id": "row-000000001", "prompt": "dog", "tag": None}
    assert pq.read_schema(tmp_path / "out.parquet").field("tag").type == pa.int8()


def test_seeds_sizes_and_lists_multiply_the_rows_and_every_id_is_another(tmp_path: Path) -> None:
    done = make(
        tmp_path, "id,product\nm,mug\nh,hat\n", template="a {product} on a {place}",
        values__place='[beach,"a desk, tidy"]', sizes="1024x1024,768x1344", seeds="3", values__guidance_scale="[3,4.5]",
    )  # fmt: skip
    rows = made(tmp_path)
    assert (done.records, done.rows, len(rows)) == (2, 48, 48)
    assert len({row["id"] for row in rows}) == 48
    assert rows[0] == {"id": "m-beach-3-1024x1024-s0", "prompt": "a mug on a beach", "height": 1024, "width": 1024,
                       "guidance_scale": 3.0, "seed": 0, "product": "mug", "place": "beach"}  # fmt: skip
    assert {(row["height"], row["width"]) for row in rows} == {(1024, 1024), (768, 1344)}
    assert rows[-1]["prompt"] == "a hat on a a desk, tidy"


def test_lists_alone_make_a_grid_without_a_file(tmp_path: Path) -> None:
    make(tmp_path, template="{a} {{on}} {b}", values__a="cat,dog", values__b="[mat,!!]", seeds="[7]")
    assert [(row["id"], row["prompt"], row["seed"]) for row in made(tmp_path)] == [
        ("cat-b1-s7", "cat {on} mat", 7), ("cat-b2-s7", "cat {on} !!", 7),
        ("dog-b1-s7", "dog {on} mat", 7), ("dog-b2-s7", "dog {on} !!", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "suffix", "words"),
    [
        ('id,prompt,height\na,"x\ny",64\n\nb,cat,1000\n', "csv",
         ["line 5: height must be a multiple of 16, got 1000", "992"]),
        ("id,prompt\na,x\nb,  \n", "csv", ["line 3: prompt must not be blank"]),
        ("id,prompt\na,x\nb,y\na,z\n", "csv", ["line 4: id must stand once, 'a' is that of line 2 too"]),
        ("id,prompt\na,x\nb,y,z\n", "csv", ["line 3: 3 values where the header has 2 columns"]),
        ('id,prompt\na,"x\n', "csv", ["line 2: not CSV"]),
        ("id,id\na,b\n", "csv", ["line 1: column id stands twice"]),
        ("id,text\na,b\n", "csv", ["no column prompt, only id, text", "columns.prompt="]),
        ("prompt,image\na,b\n", "csv", ["column image"]),
        ("prompt,height\na,tall\n", "csv", ["line 2: height must be a number, got 'tall'"]),
        ("prompt,num_inference_steps\na,1_0\n", "csv", ["line 2: num_inference_steps must be a number, got '1_0'"]),
        ("prompt,height\na,64.5\n", "csv", ["line 2: height must be an integer", "got 64.5"]),
        ("prompt,seed\na,1e3\n", "csv", ["line 2: seed must be an integer from -2^63 to 2^64-1, got '1e3'"]),
        ("prompt,guidance_scale\na,inf\n", "csv", ["line 2: guidance_scale must be a finite number >= 0, got inf"]),
        ("", "csv", ["every column must have a name"]),
        ("prompt\n", "csv", ["has no prompts"]),
        (b"prompt\nok\n\xff\n", "csv", ["line 3: text must be UTF-8"]),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "jsonl", ["line 2: prompt must be text, got 3"]),
        ('{"prompt": "a"}\nnope\n', "jsonl", ["line 2: not JSON"]),
        ('{"prompt": "a"}\n[1]\n', "jsonl", ["line 2: a line must be one JSON object"]),
        ('{"prompt": "a", "x": 1}\n{"prompt": "a", "x": "b"}\n', "jsonl", ["lines 1 to 2: column x"]),
        ('{"prompt": "\\ud800"}\n', "jsonl", ["line 1: prompt must be text that UTF-8 can write"]),
        ("not parquet", "parquet", ["not a whole Parquet file"]),
        ("x", "doc", ["from must end in one of .csv"]),
    ],
)  # fmt: skip
def test_br05_br08_a_bad_file_is_refused_with_its_line_and_nothing_is_written(
    tmp_path: Path, content: str | bytes, suffix: str, words: list[str]
) -> None:
    with pytest.raises(ManifestError) as refused:
        make(tmp_path, content, suffix)
    for word in words:
        assert word in str(refused.value)
    assert {path.name for path in tmp_path.iterdir()} == {f"in.{suffix}"}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"to": "out.csv"}, "to must name a file that ends in .parquet"),
        ({"seeds": "0"}, "seeds must be a number from 1"),
        ({"seeds": "1,x"}, "seeds must be integers"),
        ({"seeds": "1,1"}, "seeds must name each value once"),
        ({"sizes": "64"}, "sizes must be height x width"),
        ({"template": "{prompt.__class__}"}, "template names {prompt.__class__}"),
        ({"template": "{prompt!r}"}, "template must name columns"),
        ({"template": "{prompt:>10}"}, "template must name columns"),
        ({"template": "{"}, "braces in pairs"),
        ({"template": "{colour} {prompt}"}, "give it as a column or as values.colour"),
        ({"values.colour": "[red]"}, "values.colour must be used in template"),
        ({"values.prompt": "[red]"}, "values.prompt must be left out where"),
        ({"values.id": "[red]"}, "values.id must be left out"),
        ({"columns.promt": "x"}, "columns.promt must be one of"),
    ],
)
def test_a_senseless_word_is_one_sentence(tmp_path: Path, given: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, "id,prompt\na,x\n", **{key.replace(".", "__"): value for key, value in given.items()})
    assert word in str(refused.value)


def test_br01_a_column_that_is_null_at_first_takes_the_type_that_comes_later(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "x", "note": None}) for _ in range(9000)] + [
        '{"prompt": "y", "note": 1.5, "tag": "t"}'
    ]
    assert make(tmp_path, "\n".join(lines), "jsonl").rows == 9001
    assert made(tmp_path)[-1] == {"id": "row-000009000", "prompt": "y", "note": 1.5, "tag": "t"}


def test_a_fault_far_down_is_named_and_faults_are_counted(tmp_path: Path) -> None:
    lines = ["id,prompt,width", *(f"{n},x,{64 if n % 1000 else 65}" for n in range(20_000))]
    with pytest.raises(ManifestError) as refused:
        make(tmp_path, "\n".join(lines))
    assert "line 4002: width must be a multiple of 16, got 65" in str(refused.value)
    assert "20 faults in all; nothing was written" in str(refused.value)


def test_seeds_beside_a_seed_column_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeds must be left out where .* has a column seed"):
        make(tmp_path, "prompt,seed\na,1\n", seeds="2")


def test_the_command_says_what_it_wrote_and_the_plan_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.csv").write_text("id,prompt\na,a red circle\n")
    words = ["manifest", f"from={tmp_path}/p.csv", f"to={tmp_path}/m.parquet", "sizes=64x64", "seeds=2"]
    assert run_command(words) == 0
    said = capsys.readouterr().out
    assert "rows: 2 (of 1 in " in said and "columns: id, prompt, height, width, seed" in said
    assert "a-64x64-s0: a red circle" in said and f"plan manifest.path={tmp_path}/m.parquet" in said
    assert run_command([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert run_command(["plan", f"manifest.path={tmp_path}/m.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accepted"] == 2
    assert run_command(["manifest", "form=x"]) == 2
    assert "form is not a word of manifest; did you mean from=?" in capsys.readouterr().err
    assert run_command(["manifest", f"from={tmp_path}/none.csv", f"to={tmp_path}/m.parquet"]) == 3
