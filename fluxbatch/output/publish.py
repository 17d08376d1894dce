"""A finished run to the Hugging Face Hub as a dataset, when somebody asks for it. Changes nothing in the run folder.

The token is the one that `huggingface_hub` finds (HF_TOKEN, or a login); it is never a setting and never in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.output.ledger import Ledger, row_counts
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.objects import ObjectPath

# Only what tells of the images: no logs with host names, no settings with paths, no locks, no open batches.
PUBLISHED = ["README.md", "contact_sheet.png", "data/**", "failed/**", "ledger/**", "plan*.parquet", "rejected.parquet"]
LEFT_OUT = ["**/.tmp-*"]
REPO = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True)
class Published:
    """Where it is now, and how many rows of it."""

    repo: str
    url: str
    rows: int
    private: bool


def publish(folder: RunFolder, *, repo: str, private: bool, api: Any = None) -> Published:
    """Upload a complete run. `api` is a `huggingface_hub.HfApi` (tests give another).

    Raises ConfigError for a name that is none, and FluxbatchError for a run that is not complete or an upload that
    was refused.
    """
    if not REPO.fullmatch(repo):
        raise ConfigError(f"repo must be OWNER/NAME, got {repo!r}")
    if isinstance(folder.root, ObjectPath):
        raise ConfigError(f"output.dir must be on a disk to be published, got {folder.root}; copy the run there first")
    rows = _written_rows(folder)
    api = api or _api()
    try:
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=str(folder.root),
            allow_patterns=PUBLISHED,
            ignore_patterns=LEFT_OUT,
            commit_message=f"Upload {rows} images made with fluxbatch",
        )
    except Exception as error:  # no login, no right, no network: the library has an error of its own for each
        raise FluxbatchError(f"{repo} was not published: {error}") from error
    return Published(
        repo, str(getattr(done, "repo_url", "") or f"https://huggingface.co/datasets/{repo}"), rows, private
    )


def _written_rows(folder: RunFolder) -> int:
    plan = RunPlan.open(folder)
    if plan is None or not folder.success.exists():
        raise FluxbatchError(f"{folder.root} is not complete; run the same command again, then publish")
    counts = row_counts(folder, plan, Ledger.read(folder, plan.revisions))
    if not counts.written:
        raise FluxbatchError(f"{folder.root} holds no image, so there is nothing to publish")
    return counts.written


def _api() -> Any:
    from huggingface_hub import HfApi  # seconds: only where something is published

    return HfApi(library_name="fluxbatch")
