"""Planned rows that are others now: which, in which columns, by which settings, and whether a run may go on.

Decides for the run, which refuses or makes them again, and for `plan`, which tells. Writes nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError, FluxbatchError, ManifestError
from fluxbatch.manifest.files import Manifest
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.row_keys import RowKeys, quoted
from fluxbatch.plan.row_spool import RowSpool
from fluxbatch.records import RowRules

NAMED_EDITS = 20  # edited rows told with their columns
OTHERWISE = "run.on_change=redo makes them again, and another output.dir keeps both"
PLACES = ("row", "bucket", "batch", "shard", "slot", "fingerprint", "negative_pass", "shared_guidance")


def find_edits(
    keys: RowKeys, spool: RowSpool, plan: RunPlan, manifest: Manifest, rules: RowRules, cfg: JobConfig
) -> tuple[int, FluxbatchError | None]:
    """How many planned rows have other content now, and what a run ends with for it; None where it goes on."""
    keys.add_planned(plan)
    edited = keys.find_edited()
    if edited and cfg.run.on_change == "refuse":
        return edited, _edits_error(keys, spool, plan, manifest, rules, cfg)
    gone = [row_id for row_id, *_ in keys.edited_examples(NAMED_EDITS, rejected=True)]
    if gone:
        return edited, ManifestError(
            f"rows of the plan were edited so that they are rejected now (id {', '.join(map(quoted, gone))}), and "
            "run.on_change=redo cannot make them; mend them, or take them out of the manifest"
        )
    return edited, None


def _edits_error(
    keys: RowKeys, spool: RowSpool, plan: RunPlan, manifest: Manifest, rules: RowRules, cfg: JobConfig
) -> FluxbatchError:
    """Which rows were edited, and in which columns. Where their defaults are others, it is these settings that differ.

    As with all settings: they are mended first, and only then do rows count as edited.
    """
    number, examples = keys.num_edited(), keys.edited_examples(NAMED_EDITS)
    new = {row["id"]: row for row in spool.chosen(sorted(row for _, row, *_ in examples if row is not None))}
    by_columns: dict[str, list[str]] = {}
    for row_id, _, *at in examples:
        by_columns.setdefault(_edited_columns(plan, new.get(row_id), *at), []).append(quoted(row_id))
    told = ", ".join(f"{', '.join(ids)} ({columns})" for columns, ids in by_columns.items())
    ids = f"(id {told}{', ...' if number > len(examples) else ''})"
    changed = changed_rules(plan, rules, cfg)
    if changed:
        return ConfigError(f"{', '.join(changed)}: that changes {number} planned rows {ids}; {OTHERWISE}")
    place = "" if manifest.has_ids else "; without an id column a row is known by its place only"
    told = f"{number} planned rows were edited since {ids}{place}"
    return ManifestError(f"{told}; give them new ids, or: {OTHERWISE}")


def changed_rules(plan: RunPlan, rules: RowRules, cfg: JobConfig) -> list[str]:
    """The settings that gave rows their defaults and are others than when these were last compared with the plan.

    Key, old and new value.
    """
    before, now = (plan.planned or plan.files[-1].identity)["rules"], asdict(rules)
    return [
        f"{_key(name, cfg)} was {before[name]}, is {now[name]}"
        for name in now
        if name in before and before[name] != now[name]  # an older version's plan may lack a rule
    ]


def _edited_columns(plan: RunPlan, new: dict[str, Any] | None, shard: int, place: int) -> str:
    if new is None:
        return "rejected now"
    [old] = plan.rows(plan.first_shard(shard)).slice(place, 1).to_pylist()
    old, new = ({**row, **(row.get("extra") or {})} for row in (old, new))
    names = [name for name in old.keys() | new.keys() if name not in ("extra", *PLACES)]
    return ", ".join(sorted(name for name in names if old.get(name) != new.get(name))) or "content"


def _key(name: str, cfg: JobConfig) -> str:
    """The dotted key of a row rule."""
    group = next((group for group in ("sampler", "manifest", "model") if hasattr(getattr(cfg, group), name)), None)
    return f"{group}.{name}" if group else f"output.image_format's {name}"
