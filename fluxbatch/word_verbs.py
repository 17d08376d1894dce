"""The verbs that take words of their own instead of settings: what each is told, and what it answers."""

from __future__ import annotations

import difflib
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fluxbatch import config
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import EXIT_DISCREPANCY, EXIT_DONE, ConfigError
from fluxbatch.output import job
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.progress import data_size, one_line

Words = Mapping[str, str]
Answer = tuple[dict[str, Any], str, int]


@dataclass(frozen=True, slots=True)
class WordVerb:
    """`words` are the keys that it takes; one that ends in a dot takes any name behind it. Values are literal text."""

    words: tuple[str, ...]
    usage: str
    do: Callable[[Words], Answer]


def read_words(verb: str, arguments: list[str]) -> dict[str, str]:
    """`key=value` arguments by key; ConfigError for any other word, or one that is said twice."""
    known = VERBS[verb].words
    words: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not key=value; {verb} takes {', '.join(map(_shown, known))}")
        if key not in known and not any(word.endswith(".") and key.startswith(word) and key != word for word in known):
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {_shown(close[0])}?" if close else f"{verb} takes {', '.join(map(_shown, known))}"
            raise ConfigError(f"{key} is not a word of {verb}; {hint}")
        if key in words:
            raise ConfigError(f"{key} must be given once, got {words[key]!r} and {value!r}")
        words[key] = value
    return words


def _shown(word: str) -> str:
    return f"{word}NAME=" if word.endswith(".") else f"{word}="


def manifest(words: Words) -> Answer:
    """A file of prompts in, a checked Parquet manifest out."""
    from fluxbatch.manifest.make_manifest import make_manifest, read_order

    order = read_order(words)
    made = make_manifest(order)
    lines = [
        f"rows: {made.rows:,} (of {made.records:,} in {order.source or 'the template'})",
        f"columns: {', '.join(made.columns)}",
        *(f"  {_example(row)}" for row in made.examples),
        f"written: {order.target}",
        f"next: python -m fluxbatch plan manifest.path={order.target}",
    ]
    return {**asdict(made), "written": str(order.target)}, "\n".join(lines), EXIT_DONE


def _example(row: Mapping[str, Any]) -> str:
    others = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("id", "prompt") and value != "")
    return one_line(f"{row['id']}: {row['prompt']}" + (f" ({others})" if others else ""))


def show(words: Words) -> Answer:
    """The stored image of one row, in a file of its own."""
    from fluxbatch.output.one_row import columns_in_json, save_image, written_row

    folder, cfg = _run_folder(words)
    found = written_row(folder, words["id"])
    target = Path(words.get("to") or found.image_name).expanduser()
    save_image(target, found.image, image_format=cfg.output.image_format)
    row = columns_in_json(found.row)
    lines = [f"{name}: {one_line(str(value))}" for name, value in row.items() if value is not None]
    lines += [f"stored in: {found.file}", f"written: {target} ({data_size(len(found.image))})"]
    return {"row": row, "stored_in": str(found.file), "written": str(target)}, "\n".join(lines), EXIT_DONE


def render(words: Words) -> Answer:
    """One image again, out of the recorded settings, and whether its bytes are those that are stored."""
    from fluxbatch.output.one_row import NoImageError, save_image, written_row
    from fluxbatch.run import draw

    folder, cfg = _run_folder(words)
    found = written_row(folder, words["id"])
    [result] = draw(cfg, found.batch).results
    if result.failure or result.image is None:
        assert result.failure, "a result has an image or a failure"
        raise NoImageError(f"id {words['id']!r} fails now in {result.failure.stage}: {result.failure.message}")
    if words.get("to"):
        save_image(Path(words["to"]).expanduser(), result.image, image_format=cfg.output.image_format)
    equal = result.image == found.image
    answer = {"id": words["id"], "equal": equal, **_fingerprints(result.image, found.image)}
    lines = [
        f"bucket {found.batch.bucket.name}, {found.batch.plan.size} a launch, seed {found.row['seed']}",
        f"sha256 now: {answer['sha256_now']}",
        f"sha256 stored: {answer['sha256_stored']}",
        "equal: the bytes are those of the run" if equal else f"different: {_difference(result.image, found.image)}",
    ]
    if not equal:
        lines += [f"  {name} was {was}, is {now}" for name, was, now in _changed_versions(folder)]
        lines += [f"  {name} was {was}, is {now}" for name, was, now in _changed_settings(folder, cfg)]
    return answer, "\n".join(lines), EXIT_DONE if equal else EXIT_DISCREPANCY


def _changed_settings(folder: RunFolder, cfg: JobConfig) -> list[tuple[str, Any, Any]]:
    """What the recorded settings mean now and did not then: a LoRA file with another content."""
    stored = job.read_job(folder)
    changed = job.differences(stored["fingerprint"], cfg) if stored else {}
    return [(key, change["was"], change["is"]) for key, change in changed.items()]


def _run_folder(words: Words) -> tuple[RunFolder, JobConfig]:
    """The folder that `output.dir` names, composed as every verb does, and the settings recorded there."""
    for name in ("output.dir", "id"):
        if not words.get(name):
            raise ConfigError(f"{name} must be given, got nothing")
    folders: list[RunFolder] = []

    def keep(cfg: JobConfig) -> int:
        folders.append(RunFolder(config.output_dir(cfg)))
        return 0

    with_config([f"output.dir={words['output.dir']}"], keep)
    [folder] = folders
    stored = job.read_job(folder)
    if stored is None:
        raise ConfigError(f"output.dir must be a run folder (with a job.json), got {folder.root}")
    return folder, job.recorded_config(stored)


def _fingerprints(now: bytes, stored: bytes) -> dict[str, str]:
    return {"sha256_now": hashlib.sha256(now).hexdigest(), "sha256_stored": hashlib.sha256(stored).hexdigest()}


def _difference(now: bytes, stored: bytes) -> str:
    """How far apart the pixels are, for rounding is one thing and another picture is another."""
    try:
        pixels = [
            np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.int16) for content in (now, stored)
        ]
    except OSError:
        return "the stored bytes are no image"
    if pixels[0].shape != pixels[1].shape:
        return f"{pixels[0].shape} now, {pixels[1].shape} stored"
    gap = np.abs(pixels[0] - pixels[1])
    return f"{np.count_nonzero(gap)} of {gap.size} pixel values, by {gap.max()} of 255 at most"


def _changed_versions(folder: RunFolder) -> list[tuple[str, str | None, str | None]]:
    stored = (job.read_job(folder) or {}).get("versions", {})
    return [(name, stored.get(name), now) for name, now in job.versions().items() if stored.get(name) != now]


def publish(words: Words) -> Answer:
    """A complete run to the Hugging Face Hub."""
    from fluxbatch.output.publish import publish as publish_run

    for name in ("output.dir", "repo"):
        if not words.get(name):
            raise ConfigError(f"{name} must be given, got nothing")
    private = words.get("private", "true")
    if private not in ("true", "false"):
        raise ConfigError(f"private must be true or false, got {private!r}")
    folder = RunFolder(config.place(words["output.dir"], key="output.dir"))
    if job.read_job(folder) is None:
        raise ConfigError(f"output.dir must be a run folder (with a job.json), got {folder.root}")
    done = publish_run(folder, repo=words["repo"], private=private == "true")
    lines = [f"published: {done.rows:,} images", f"repo: {done.repo} ({'private' if done.private else 'public'})"]
    return asdict(done), "\n".join([*lines, f"address: {done.url}"]), EXIT_DONE


VERBS: dict[str, WordVerb] = {
    "publish": WordVerb(
        ("output.dir", "repo", "private"), "publish output.dir=outputs/mine repo=OWNER/NAME [private=false]", publish
    ),
    "show": WordVerb(("output.dir", "id", "to"), "show output.dir=outputs/mine id=ROW [to=picture.png]", show),
    "render": WordVerb(("output.dir", "id", "to"), "render output.dir=outputs/mine id=ROW [to=again.png]", render),
    "manifest": WordVerb(
        ("from", "to", "seeds", "sizes", "template", "values.", "columns."),
        "manifest from=prompts.csv|tsv|jsonl|txt|parquet to=prompts.parquet [columns.prompt=caption] "
        "[seeds=4 or seeds=[7,8]] [sizes=1024x1024,768x1344] "
        "[template='{product} on a {background}' values.background=[beach,desk]]",
        manifest,
    ),
}
