"""What each verb answers: a dictionary for scripts, words for a person, an exit code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fluxbatch import config, config_rules, model_folder
from fluxbatch.config import JobConfig
from fluxbatch.errors import EXIT_DISCREPANCY, EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from fluxbatch.lora_files import lora_paths
from fluxbatch.output import job
from fluxbatch.records import RowCounts
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.progress import counted

log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], str, int]
Verb = Callable[[JobConfig], Answer]


def run(cfg: JobConfig) -> Answer:
    """Do the job, or go on with it."""
    _require_manifest(cfg)
    cfg = _settled(cfg)
    counts, code = _run_here(cfg) if cfg.run.devices is None else _run_on_devices(cfg)
    folder = RunFolder(config.output_dir(cfg))
    words = [*_count_lines(counts), f"images: {folder.data}"]
    if cfg.run.plan_only:
        words += ["the plan stands; the same command without run.plan_only=true draws its rows"]
    elif counts.pending == 0:
        words += [f"contact sheet: {folder.contact_sheet}", f"report: {folder.report_html}"]
    else:
        words += [f"this rank's share is done; {counts.pending} rows are other ranks'"]
    return asdict(counts), "\n".join(words), code


def _run_here(cfg: JobConfig) -> tuple[RowCounts, int]:
    from fluxbatch.run import run_job

    return run_job(cfg)


def _run_on_devices(cfg: JobConfig) -> tuple[RowCounts, int]:
    from fluxbatch.processes.supervisor import supervise

    return supervise(cfg)


def plan(cfg: JobConfig) -> Answer:
    """What a run would do, from the manifest and what stands in the run folder. Writes nothing, loads no weights."""
    from fluxbatch import forecast

    _require_manifest(cfg)
    _warn_of_missing_model(cfg)
    lora_paths(cfg.model)
    cfg = _settled(cfg)
    answer = forecast.forecast(cfg, changed=_changed_settings(RunFolder(config.output_dir(cfg)), cfg))
    return answer, forecast.words(answer), answer["exit_code"]


def _changed_settings(folder: RunFolder, cfg: JobConfig) -> job.Differences:
    """Those for which a run makes all rows again. ConfigError where it refuses them."""
    from fluxbatch.plan.planfile import RunPlan
    from fluxbatch.planning import changed_settings

    stored = job.read_job(folder)
    changed = changed_settings(RunPlan.open(folder), stored, cfg) if stored else {}
    if cfg.run.on_change == "refuse":
        job.refuse_differences(folder, changed)
    return changed


def compile(cfg: JobConfig) -> Answer:
    """Make the packages that a run with model.compile=aot would launch. Reads no weights, draws nothing."""
    from fluxbatch.run import prepare_launches

    _require_manifest(cfg)
    cfg = _settled(replace(cfg, model=replace(cfg.model, compile="aot")))
    prepared = prepare_launches(cfg)
    made, found = ([str(package.path) for package in packages] for packages in (prepared.made, prepared.found))
    lines = [f"compiled: {len(made)}", *(f"  {path}" for path in made)]
    lines += [f"there already: {len(found)}", "for runs with model.compile=aot and otherwise the same settings"]
    return {"compiled": made, "found": found}, "\n".join(lines), EXIT_DONE


def status(cfg: JobConfig) -> Answer:
    """How far the run in `output.dir` is, from its files alone."""
    from fluxbatch.reports import report

    found = report.status(_existing(cfg))
    return found, report.status_words(found, now_s=time.time()), EXIT_DONE


def verify(cfg: JobConfig) -> Answer:
    """Whether every row is accounted for and every file is sound."""
    from fluxbatch.output.repair import repair as repair_folder
    from fluxbatch.output.verify import verify as verify_folder

    folder = _existing(cfg)
    counts, found = verify_folder(folder, decode=cfg.verify.decode)
    moved = repair_folder(folder, decode=cfg.verify.decode) if cfg.verify.repair and found else []
    if moved:
        counts, _ = verify_folder(folder, decode=False)
    answer: dict[str, Any] = {
        **asdict(counts),
        "discrepancies": [{**asdict(fault), "message": fault.message} for fault in found],
        "set_aside": [asdict(move) for move in moved],
    }
    lines = [*_count_lines(counts), f"discrepancies: {len(found)}"]
    lines += [f"  {fault.file}: {fault.fault if moved and fault.is_set_aside else fault.message}" for fault in found]
    lines += [f"set aside: {move.file} as {move.now}" for move in moved]
    lacks = _what_is_missing(folder, counts)
    lines += [f"incomplete: {lacks}"] if lacks else []
    answer["complete"] = not (lacks or found)
    if found or not counts.balanced:
        return answer, "\n".join(lines), EXIT_DISCREPANCY
    return answer, "\n".join(lines), EXIT_INTERRUPTED if lacks and cfg.verify.complete else EXIT_DONE


def _what_is_missing(folder: RunFolder, counts: RowCounts) -> str | None:
    """What an unfinished run lacks, in a sentence; None for a finished one."""
    if counts.pending:
        are, them = ("is", "it") if counts.pending == 1 else ("are", "them")
        return f"{counted(counts.pending, 'row')} {are} pending; the same run command makes {them}"
    if folder.success.exists():
        return None
    lacks = "the report and _SUCCESS are missing" if folder.plan().exists() else "there is no plan"
    return f"no row is pending, but {lacks}; the same run command goes on"


def report(cfg: JobConfig) -> Answer:
    """Make report.json, report.html, the contact sheet and the card again."""
    from fluxbatch.reports import report as reports

    folder = _existing(cfg)
    description = job.read_job(folder)
    assert description is not None, "_existing has seen it"
    written = reports.write_report(folder, job=description)
    return written, f"report: {folder.report_html}\ncontact sheet: {folder.contact_sheet}", EXIT_DONE


def bench(arguments: list[str]) -> int:
    """Measure something; it has words of its own, and its answer is printed as it comes. Returns the exit code."""
    from fluxbatch.bench.command import run_bench

    return run_bench(arguments)


VERBS: dict[str, Verb] = {
    "run": run,
    "plan": plan,
    "compile": compile,
    "status": status,
    "verify": verify,
    "report": report,
}


def _settled(cfg: JobConfig) -> JobConfig:
    """What the model's folder decides filled in, and checked like what a person wrote."""
    settled = model_folder.settled(cfg)
    config_rules.check(settled)
    return settled


def _require_manifest(cfg: JobConfig) -> None:
    if not cfg.manifest.path:
        raise ConfigError(
            "manifest.path must name a Parquet file, folder, glob, URL or list of them, got "
            f"{cfg.manifest.path or 'nothing'}; --help tells the verbs and the settings"
        )


def _warn_of_missing_model(cfg: JobConfig) -> None:
    path = cfg.model.path or ""
    if path.startswith(("/", "~", ".")) and not Path(path).expanduser().exists():
        log.warning("model.path %s: no such folder or file; a run would stop here", path)


def _existing(cfg: JobConfig) -> RunFolder:
    if not (cfg.output.dir or cfg.run.name or cfg.manifest.path):
        raise ConfigError("output.dir must name a run folder, got nothing")
    folder = RunFolder(config.output_dir(cfg))
    if job.read_job(folder) is None:
        raise ConfigError(f"output.dir must be a run folder (with a job.json), got {folder.root}")
    return folder


def _count_lines(counts: RowCounts) -> list[str]:
    return [f"{name}: {getattr(counts, name)}" for name in ("rows", "written", "failed", "rejected", "pending")]
