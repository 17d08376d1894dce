"""Settings: composed by Hydra, refused at the door with the key, the rule and the value."""

import dataclasses
from pathlib import Path

import pytest

from fluxbatch import config, config_rules, stop
from fluxbatch.compose import conf_folder, with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError
from fluxbatch.output import job
from fluxbatch.processes import ranks
from fluxbatch.storage.folder import RunFolder


def composed(*overrides: str) -> JobConfig:
    seen: list[JobConfig] = []

    def keep(cfg: JobConfig) -> int:
        config_rules.check(cfg)
        seen.append(cfg)
        return 0

    with_config(list(overrides), keep)
    return seen[0]


def test_manifest_model_and_output_dir_are_enough() -> None:
    cfg = composed("manifest.path=m.parquet", "model=flux1_dev", "output.dir=/tmp/x")
    assert (cfg.model.name, cfg.sampler.height, cfg.sampler.num_inference_steps) == ("flux1_dev", 1024, 28)


MODELS = sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_composes_and_passes_the_door(model: str) -> None:
    assert composed(f"model={model}", "manifest.path=m.parquet").model.name == model


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.dtpe=float16", "model.dtpe is not a setting; did you mean model.dtype?"),
        (
            "sampler.step=4",
            "did you mean sampler.num_inference_steps or sampler.step_cache or sampler.step_cache_order?",
        ),
        ("seed=4", "seed is not a setting; did you mean sampler.seed?"),
        ("guidance=4", "guidance is not a setting; did you mean model.guidance or sampler.guidance_scale?"),
        ("job=nightly", "job must be one of demo, got 'nightly'; one of your own is FOLDER/job/nightly.yaml, named by"),
        ("+model.foo=1", "model.foo is not a setting"),
        ("+foo=1", "foo is not a setting"),
        ("manifest.columns.promt=x", "manifest.columns.promt is not a setting"),
        ("model=nope", "model must be one of diffusers, flux1_dev"),
        ("plan.shard_size=many", "plan.shard_size must be a whole number, got 'many'"),
        ("sampler.seed=1.5", "sampler.seed must be a whole number, got '1.5'"),
        ("run.stage_timeout_s=-1", "run.stage_timeout_s must be a finite number of seconds >= 0 (0: no limit), got -1"),
        ("model.dtype=null", "model.dtype must be given, got null"),
        ("model.dtype=float8", "model.dtype must be one of float32, bfloat16, float16, got 'float8'"),
        ("model.text_encoder_dtype=float16", "must not be float16: T5 and Qwen3 overflow in it"),
        ("model.max_sequence_length=513", "model.max_sequence_length must be a whole number from 1 to 512, got 513"),
        ("plan.batch_size=0", "plan.batch_size must be auto or a whole number >= 1, got 0"),
        ("plan.batch_size=[", "plan.batch_size must be quoted for Hydra"),
        ("sampler.height=100", "sampler.height must be a multiple of 16 for tiny, got 100; nearest 96, 112"),
        ("sampler.height=8", "got 8; nearest 16"),
        ("sampler.height=4096", "sampler.height x sampler.width must be <= model.max_pixels=262144, got 4096x192"),
        ("sampler.guidance_scale=nan", "sampler.guidance_scale must be a finite number >= 0, got nan"),
        ("sampler.seed=18446744073709551616", "sampler.seed must be from -2^63 to 2^64-1"),
        ("output.quality=101", "output.quality must be a whole number from 1 to 100, got 101"),
        ("model.loras=${manifest}", "model.loras must name a file in each path, got ManifestConfig"),
        ("run.rank=1", "run.rank and run.world_size must be given together, got 1 and None"),
    ],
)
def test_a_wrong_setting_is_one_sentence_with_key_rule_and_value(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed("manifest.path=m.parquet", override)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.rank must be from 0 to"):
        composed("run.rank=2", "run.world_size=2")


HOSTILE = ["a, b", "x=y", "李明", "🙂", "a#b", "{x}", "a ${y}", "it's", "m (1).parquet", "~/x", "/data/run=3/m.parquet",
           "/d/a,b.parquet", "back\\slash\\", 'dou"ble', "\\'", "007", "1e-4", "on", "%"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_br42_paths_need_no_escaping(text: str) -> None:
    cfg = composed(f"manifest.path={text}", f"output.dir={text}")
    assert (cfg.manifest.path, cfg.output.dir) == (text, text)


@pytest.mark.parametrize("text", [*HOSTILE, "${y}", "[x]", "null"])
def test_br42_an_environment_variable_carries_any_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY_TEXT", text)
    assert composed("output.dir=${oc.env:ANY_TEXT}").output.dir in (text, int(text) if text.isdigit() else text)


def test_a_list_of_manifests_is_left_to_hydra() -> None:
    assert composed("manifest.path=[a.parquet,b.parquet]").manifest.path == ["a.parquet", "b.parquet"]


def test_br41_the_run_folder_is_never_a_timestamp_and_relative_paths_stand_on_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.output_dir(composed("job=demo")) == tmp_path / "outputs" / "demo"
    assert config.output_dir(composed("manifest.path=x/nightly.parquet")) == tmp_path / "outputs" / "nightly"


def test_every_setting_is_in_conf_and_has_a_comment_or_a_plain_name() -> None:
    """conf/<group>/ and the group's dataclass hold the same keys."""
    for group in dataclasses.fields(JobConfig):
        keys = {entry.name for entry in dataclasses.fields(group.default_factory)}  # type: ignore[arg-type]
        for path in (conf_folder() / group.name).glob("*.yaml"):
            lines = path.read_text().splitlines()
            found = {line.partition(":")[0] for line in lines if line and line[0].isalpha() and ":" in line}
            assert found <= keys, path
            assert group.name == "model" or found == keys, (path, keys ^ found)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, (2, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}, (0, 2, 0)),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_NTASKS": "1"}, (0, 1, 0)),
    ],
)
def test_ranks_come_from_torchrun_then_srun_then_nothing(environ: dict[str, str], expected: tuple[int, ...]) -> None:
    rank = ranks.resolve(config.RunConfig(), environ)
    assert (rank.index, rank.world_size, rank.local) == expected


def test_settings_overrule_the_environment_and_half_a_slurm_step_is_refused() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert ranks.resolve(config.RunConfig(rank=0, world_size=2), torchrun).world_size == 2
    with pytest.raises(ConfigError, match="SLURM_NTASKS=4 without a step"):
        ranks.resolve(config.RunConfig(), {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})


def test_deadlines_and_slurms_end_time() -> None:
    assert stop.seconds_left(None, {}) is None
    assert stop.seconds_left("+90", {}) == 90
    assert stop.seconds_left("2000-01-01T00:00:00+00:00", {}) < 0  # type: ignore[operator]
    assert stop.seconds_left(None, {"SLURM_JOB_END_TIME": "1000"}) < 0  # type: ignore[operator]
    for wrong in ("tomorrow", "2026-01-31T06:00:00"):
        with pytest.raises(ConfigError, match=r"run\.deadline must be"):
            stop.seconds_left(wrong, {})


def test_a_job_is_written_once_and_other_output_settings_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = job.open_job(folder, composed("model.dtype=float32"))
    assert job.open_job(folder, composed("plan.batch_size=2", "run.grace_s=1")) == first
    for override, key in [("model.dtype=bfloat16", "model.dtype"), ("output=folder", "output.kind"),
                          ("output.image_format=jpeg", "output.image_format")]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"{key} must be"):
            job.refuse_differences(folder, job.differences(first["fingerprint"], composed(override)))


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"which holds 'thesis\.tex'"):
        job.open_job(RunFolder(tmp_path), composed())


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b'{"valid": "json of something else"}', b"[1"])
def test_br35_an_unreadable_job_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.data.mkdir()
    folder.job.write_bytes(content)
    job.open_job(folder, composed())
    assert job.read_job(folder) is not None
    assert (tmp_path / "job.json.unreadable").read_bytes() == content


def test_no_password_of_a_url_stands_in_a_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    cfg = composed()
    cfg.manifest.path = ["s3://key:secret@bucket/m.parquet", "https://host/m?X-Amz-Signature=secret"]
    job.open_job(folder, cfg)
    assert "secret" not in folder.job.read_text()
    assert "bucket/m.parquet" in folder.job.read_text() and "https://host/m" in folder.job.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["foo"], "'foo' is not key=value; was a value with a space left without quotes?"),
        (["night.parquet"], "'night.parquet' is not key=value; did you mean manifest.path=night.parquet?"),
        (["--jsno"], "--jsno is not a flag; did you mean --json?"),
        (["--config-dir", "/nowhere", "job=demo"], "--config-dir must name a folder, got /nowhere"),
        (["output.image_format=png,jpeg"], "output.image_format must be one value, got png,jpeg; -m runs them"),
    ],
)
def test_a_stray_word_on_the_command_line_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(*arguments)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("manifest:\n  path: x\n", "must begin with the line `# @package _global_`"),
        ("# @package _global_\nmanifest:\n  pth: x\n", "manifest.pth is not a setting; did you mean manifest.path?"),
        ("# @package _global_\nmanifest: [x:\n  }\n", "nightly.yaml line 3 is not YAML"),
    ],
)
def test_a_wrong_job_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "nightly.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        composed("--config-dir", str(tmp_path), "job=nightly")
    assert sentence in str(refused.value)


def test_a_job_file_of_the_readme_composes(tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "nightly.yaml").write_text(readme.split("```yaml\n")[1].split("```")[0])
    cfg = composed("--config-dir", str(tmp_path), "job=nightly")
    assert (cfg.model.name, cfg.output.kind, cfg.run.name) == ("flux1_schnell", "webdataset", "nightly")


@pytest.mark.parametrize("override", ["sampler=null", "plan=-1", "plan=[1,2]"])
def test_a_group_that_is_no_group_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be composed|must be"):
        composed(override)


@pytest.mark.parametrize("environ", [{"RANK": "x"}, {"RANK": "5"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": ""}])
def test_launcher_variables_that_make_no_sense_are_refused(environ: dict[str, str]) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError):
        ranks.resolve(config.RunConfig(), torchrun | environ)


def test_numbers_beyond_all_sense_and_bytes_that_are_no_utf8_are_refused() -> None:
    for override in ("plan.shard_size=100000000000000000000", "sampler.num_inference_steps=9999999999"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            composed(override)
    with pytest.raises(ConfigError, match=r"output\.dir must be UTF-8"):
        composed("output.dir=/tmp/b\udcff")


@pytest.mark.parametrize("override", ["+manifest.path=nan", "+manifest.path=[a.parquet,7]", "+manifest.path={a: b}"])
def test_a_manifest_path_that_is_no_text_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"manifest\.path must be a path or a list of paths, got"):
        composed(override)


def test_br41_a_multirun_leaves_nothing_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    assert with_config(["-m", "plan.shard_size=10,20"], lambda cfg: seen.append(cfg.plan.shard_size) or 0) == 0
    assert seen == [10, 20]
    assert not list(tmp_path.iterdir())


def test_what_hydra_says_is_cut_where_it_prints_all_settings() -> None:
    with pytest.raises(ConfigError) as refused:
        composed("~={}")
    assert len(str(refused.value)) < 400
