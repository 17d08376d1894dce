"""Publishing a run: only when asked, only what tells of the images, and no token in any file."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_report import Run, config, rows, start

from fluxbatch import word_verbs
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.output.publish import LEFT_OUT, PUBLISHED, publish


class FakeApi:
    def __init__(self, *, refuse: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._refuse = refuse

    def create_repo(self, repo_id: str, **kwargs: Any) -> None:
        self.asked.append(("create_repo", {"repo_id": repo_id, **kwargs}))
        if self._refuse:
            raise self._refuse

    def upload_folder(self, **kwargs: Any) -> Any:
        self.asked.append(("upload_folder", kwargs))
        return SimpleNamespace(repo_url="https://hub/datasets/me/night")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = start(tmp_path, rows(9), config(tmp_path))
    run.do(failing=["row 4/é.x"])
    run.report()
    run.folder.success.touch()
    run.folder.job.write_text("{}")
    return run


def test_a_complete_run_goes_up_as_a_private_dataset(run: Run) -> None:
    api = FakeApi()
    done = publish(run.folder, repo="me/night", private=True, api=api)
    assert (done.rows, done.url, done.private) == (8, "https://hub/datasets/me/night", True)
    (_, created), (_, uploaded) = api.asked
    assert created == {"repo_id": "me/night", "repo_type": "dataset", "private": True, "exist_ok": True}
    assert uploaded["folder_path"] == str(run.folder.root) and uploaded["repo_type"] == "dataset"
    assert not any("token" in kwargs for _, kwargs in api.asked)


def test_only_what_tells_of_the_images_goes_up(run: Run) -> None:
    (run.folder.data / ".tmp-x").touch()
    files = [path.relative_to(run.folder.root).as_posix() for path in run.folder.root.rglob("*") if path.is_file()]
    allowed = {file for file in files if any(fnmatch(file, pattern) for pattern in PUBLISHED)}
    sent = {file for file in allowed if not any(fnmatch(file, pattern) for pattern in LEFT_OUT)}
    assert {"README.md", "contact_sheet.png", "data/shard-00000.parquet", "rejected.parquet", "plan.parquet"} <= sent
    assert not any(file.startswith(("logs/", "locks/", "job", "report")) for file in sent)
    assert "data/.tmp-x" not in sent and any(file.startswith("failed/") for file in sent)


def test_an_incomplete_run_and_a_bad_name_are_refused_before_anything_is_asked(run: Run) -> None:
    api = FakeApi()
    for name in ("night", "me/", "https://hub/me/night", "me/night/more", ""):
        with pytest.raises(ConfigError, match="repo must be OWNER/NAME"):
            publish(run.folder, repo=name, private=True, api=api)
    run.folder.success.unlink()
    with pytest.raises(FluxbatchError, match="is not complete"):
        publish(run.folder, repo="me/night", private=True, api=api)
    assert not api.asked


def test_a_refusal_of_the_hub_is_one_error_with_its_words(run: Run) -> None:
    with pytest.raises(FluxbatchError, match="me/night was not published: 401, log in"):
        publish(run.folder, repo="me/night", private=True, api=FakeApi(refuse=PermissionError("401, log in")))


def test_the_verb_asks_for_its_words() -> None:
    with pytest.raises(ConfigError, match="repo must be given"):
        word_verbs.publish({"output.dir": "x"})
    with pytest.raises(ConfigError, match="private must be true or false"):
        word_verbs.publish({"output.dir": "x", "repo": "me/x", "private": "maybe"})
    with pytest.raises(ConfigError, match="token is not a word of publish"):
        word_verbs.read_words("publish", ["token=hf_secret"])
