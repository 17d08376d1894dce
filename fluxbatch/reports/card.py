"""README.md of a run folder: a dataset card with which `datasets.load_dataset(folder)` opens it, then words for people.

The YAML names the data files, so that plan, ledger, logs and report beside them are not taken for data. Parquet carries
its own types; a tar and a folder hold JSON, so there the YAML states them: guessed from the first rows, a column that
is null there could not hold anything later.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import yaml

from fluxbatch.output import writers
from fluxbatch.storage import folder

SIZE_CATEGORIES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")
MAX_BUCKETS = 12  # named in the card
DATA_FILES = {"parquet": "data/*.parquet", "webdataset": "data/*.tar", "folder": "data/**"}
ROW = {"parquet": "row", "webdataset": 'row["json"]', "folder": "row"}


def dataset_card(report: Mapping[str, Any], *, schema: pa.Schema) -> bytes:
    """The card of a run, from its report. `schema`: the columns of a written row (`writers.data_schema`)."""
    header = yaml.safe_dump(card_data(report, schema=schema), sort_keys=False, allow_unicode=True, width=120)
    return f"---\n{header}---\n\n{_words(report)}".encode()


def card_data(report: Mapping[str, Any], *, schema: pa.Schema) -> dict[str, Any]:
    """The card's YAML."""
    settings, written = report["settings"], report["written"]
    data: dict[str, Any] = {
        "license": settings["model"]["license"],
        "pretty_name": report["run"],
        "task_categories": ["text-to-image"],
        "tags": ["fluxbatch", "synthetic", "text-to-image", settings["model"]["name"]],
        "size_categories": [size_category(written)],
    }
    if settings["model"]["license"] == "other":  # the Hub wants a name for it
        data |= {"license_name": f"{settings['model']['name']}-license"}
    return data | _base_model(settings["model"]) | _data_files(settings["output"], schema, shards=report["shards"])


def _base_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """The Hub's link to the model, where its path is a name there and no folder here."""
    path = model["path"] or ""
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None
    return {"base_model": path} if is_hub_id and not model["random_weights"] else {}


def size_category(rows: int) -> str:
    """The Hub's word for a number of rows."""
    return SIZE_CATEGORIES[min(max(len(str(rows)) - 3, 0), len(SIZE_CATEGORIES) - 1)]


def _data_files(output: Mapping[str, Any], schema: pa.Schema, *, shards: int) -> dict[str, Any]:
    kind = output["kind"]
    paths: str | list[str] = DATA_FILES[kind]
    if shards > folder.SHARDS_TOGETHER and kind != "folder":
        paths = [DATA_FILES[kind], DATA_FILES[kind].replace("*", "shards-*/*")]
    config: dict[str, Any] = {
        "config_name": "default",
        "data_files": [{"split": "train", "path": paths}],
    }
    columns = [{"name": field.name, **json_feature(field.type)} for field in schema if field.name != "image"]
    if kind == "folder":
        checks = [{"name": "image_bytes", "dtype": "int64"}, {"name": "image_sha256", "dtype": "string"}]
        return {"configs": [{**config, "features": [{"name": "image", "dtype": "image"}, *columns, *checks]}]}
    if kind == "webdataset":
        image = {"name": writers.EXTENSION[output["image_format"]], "dtype": "image"}
        keys = [{"name": name, "dtype": "string"} for name in ("__key__", "__url__")]
        features = [image, {"name": "json", "struct": columns}, *keys]
        return {"configs": [config], "dataset_info": {"config_name": "default", "features": features}}
    return {"configs": [config]}


def json_feature(kind: pa.DataType) -> dict[str, Any]:
    """What a column of this type is once `writers.json_value` has written it, in the words of `datasets`."""
    if pa.types.is_dictionary(kind):
        return json_feature(kind.value_type)
    if pa.types.is_struct(kind):
        return {"struct": [{"name": field.name, **json_feature(field.type)} for field in kind]}
    if _is_list(kind):
        return {"list": json_feature(kind.value_type)}
    return {"dtype": _json_dtype(kind)}


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in (*tests, pa.types.is_large_list_view))


def _json_dtype(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) and kind != pa.uint64():  # readers of JSON take integers for int64
        return "int64"
    if pa.types.is_floating(kind) or pa.types.is_duration(kind):
        return "float64"
    return "null" if pa.types.is_null(kind) else "string"


def _words(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    counts = [[state, f"{report[state]:,}"] for state in ("rows", "written", "failed", "rejected", "pending")]
    sections = [
        f"# {_plain(report['run'])}",
        f"Images made with fluxbatch {report['version']} and the model {_plain(_model(settings['model']))}.",
        _loading(settings["output"]) if report["written"] else "No image was written, so there is nothing to load.",
        "## Rows\n\n" + _table(["state", "rows"], counts),
        _known_failures(report),
        "## How they were made\n\n" + _made(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _model(model: Mapping[str, Any]) -> str:
    if model["random_weights"]:
        return f"{model['name']} (random weights)"
    name = model.get("pipeline") or model["name"]
    return f"{name} ({model['path']})" if model["path"] else name


def _loading(output: Mapping[str, Any]) -> str:
    kind = output["kind"]
    row, image = ROW[kind], writers.EXTENSION[output["image_format"]] if kind == "webdataset" else "image"
    return (
        "## Loading\n\n```python\nimport datasets\n\n"
        'dataset = datasets.load_dataset("path/to/this/folder", split="train")\n'
        f'row = dataset[0]\nprint({row}["id"], {row}["prompt"], row["{image}"].size)\n```\n\n'
        "`plan.parquet` says for each row which shard it is in. `ledger/` has the SHA-256 of each file."
    )


def _known_failures(report: Mapping[str, Any]) -> str:
    reasons = report["failed_by_reason"] | report["rejected_by_reason"]
    if not reasons:
        return ""
    found = [[reason, f"{rows:,}", report["examples"][reason]] for reason, rows in reasons.items()]
    where = "Each of these rows is in `failed/` or `rejected.parquet`, with its reason."
    return f"## Known failures\n\n{_table(['reason', 'rows', 'for example'], found)}\n\n{where}"


def _made(report: Mapping[str, Any]) -> str:
    settings, versions = report["settings"], report["versions"]
    model, sampler, output = settings["model"], settings["sampler"], settings["output"]
    facts = [
        ["model", f"{_model(model)}" + (f", revision {model['revision']}" if model["revision"] else "")],
        ["licence of the model", model["license"]],
        ["sampler", _sampler(settings)],
        ["step cache", _step_cache(sampler)],
        ["weights", f"{model['dtype']}, quantization {model['quantization']}"],
        ["LoRA", ", ".join(f"{_file_name(lora['path'])} ({lora['weight']:g})" for lora in model.get("loras", ()))],
        ["rows without a size", f"{sampler['height']}x{sampler['width']} (height x width)"],
        ["rows without steps or guidance", f"{sampler['num_inference_steps']} steps, {sampler['guidance_scale']:g}"],
        ["rows without a seed", f"derived from seed {sampler['seed']} and the id by SHA-256, and recorded"],
        ["image files", f"{output['image_format']}" + _quality(output)],
        ["rows by height x width - steps", _buckets(report["buckets"])],
        ["software", ", ".join(f"{name} {version}" for name, version in versions.items() if version)],
    ]
    return _table(["", ""], [fact for fact in facts if fact[1]])


def _sampler(settings: Mapping[str, Any]) -> str:
    """How latents become an image, as the model's family does it."""
    guided = {"embedded": "guidance embedded", "classifier_free": "classifier-free guidance", "none": "no guidance"}
    return (
        f"Euler steps of the flow ODE, {guided[settings['model']['guidance']]}; noise drawn on the CPU from each seed"
    )


def _step_cache(sampler: Mapping[str, Any]) -> str:
    """Said only where it was used: pictures are then not those of the exact sampler."""
    schedule = sampler.get("step_cache", "off")
    if schedule == "off":
        return ""
    return f"{schedule}, order {sampler['step_cache_order']}: the other steps are extrapolated, an approximation"


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    more = f", and {len(buckets) - MAX_BUCKETS} more" if len(buckets) > MAX_BUCKETS else ""
    return ", ".join(f"{found['bucket']}: {found['rows']:,}" for found in buckets[:MAX_BUCKETS]) + more


def _quality(output: Mapping[str, Any]) -> str:
    return "" if output["image_format"] == "png" else f", quality {output['quality']}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text from elsewhere on one line, so that Markdown and HTML read nothing but text in it."""
    flat = html.escape(" ".join(str(text).split())[:300], quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
