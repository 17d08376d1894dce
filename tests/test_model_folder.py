"""What a pipeline's folder says of itself, and what is refused because of it: from its JSON files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_config import composed

from fluxbatch import config, config_rules, model_folder, verbs
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError
from fluxbatch.manifest.files import open_manifest
from fluxbatch.plan.planner import survey

SD3 = "StableDiffusion3Pipeline"
KL = {"block_out_channels": [128, 256, 512, 512]}
ONE = ["diffusers", "Anything"]
# Class: settings of the denoiser and of the VAE, as those of the published checkpoints, cut to what is read.
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    SD3: ("transformer", {"patch_size": 2, "in_channels": 16, "sample_size": 128}, KL),
    "StableDiffusionXLPipeline": ("unet", {"in_channels": 4, "sample_size": 128}, {**KL, "latent_channels": 4}),
    "SanaPipeline": (
        "transformer",
        {"patch_size": 1, "in_channels": 32, "sample_size": 32},
        {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32},
    ),
    "PixArtSigmaPipeline": ("transformer", {"patch_size": 2, "in_channels": 4, "sample_size": 128}, KL),
    "QwenImagePipeline": (
        "transformer",
        {"patch_size": 2, "in_channels": 64, "guidance_embeds": False},
        {"temperal_downsample": [False, True, True], "z_dim": 16},
    ),
    "ZImagePipeline": ("transformer", {"all_patch_size": [2], "in_channels": 16}, {**KL, "latent_channels": 16}),
    "FluxPipeline": (
        "transformer",
        {"patch_size": 1, "in_channels": 64, "guidance_embeds": True},
        {**KL, "latent_channels": 16},
    ),
    "SanaSprintPipeline": (
        "transformer",
        {"patch_size": 1, "in_channels": 32, "sample_size": 32, "guidance_embeds": True},
        {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32},
    ),
    "Flux2KleinKVPipeline": ("transformer", {"in_channels": 128}, {**KL, "latent_channels": 32}),
}


def write(folder: Path, name: str, **index: Any) -> Path:
    part, denoiser, vae = FOLDERS.get(name, FOLDERS[SD3])
    parts = {part: ONE, "vae": ONE, "scheduler": ONE}
    for sub, settings in ((part, denoiser), ("vae", vae), ("scheduler", {"shift": 3.0})):
        (folder / sub).mkdir(parents=True, exist_ok=True)
        file = "scheduler_config.json" if sub == "scheduler" else "config.json"
        (folder / sub / file).write_text(json.dumps(settings))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, **parts, **index}))
    return folder


def settled(folder: Path | str, *overrides: str) -> JobConfig:
    cfg = model_folder.settled(
        composed("manifest.path=m.parquet", "model=diffusers", f"model.path={folder}", *overrides)
    )
    config_rules.check(cfg)
    return cfg


@pytest.mark.parametrize(
    ("name", "multiple", "side", "steps", "guidance", "scale", "batch_size"),
    [
        (SD3, 16, 1024, 28, "classifier_free", 7.0, "auto"),
        ("StableDiffusionXLPipeline", 8, 1024, 50, "classifier_free", 5.0, "auto"),
        ("SanaPipeline", 32, 1024, 20, "classifier_free", 4.5, "auto"),
        ("PixArtSigmaPipeline", 16, 1024, 20, "classifier_free", 4.5, "auto"),
        ("QwenImagePipeline", 16, 1024, 50, "classifier_free", 4.0, 1),
        ("ZImagePipeline", 16, 1024, 50, "classifier_free", 5.0, 1),
        ("FluxPipeline", 16, 1024, 28, "embedded", 3.5, 1),
        ("SanaSprintPipeline", 32, 1024, 2, "embedded", 4.5, 1),
        ("Flux2KleinKVPipeline", 16, 1024, 4, "refused", 0.0, 1),
    ],
)
def test_sizes_guidance_and_defaults_follow_from_the_folder(
    tmp_path: Path, name: str, multiple: int, side: int, steps: int, guidance: str, scale: float, batch_size: int | str
) -> None:
    cfg = settled(write(tmp_path, name))
    assert (cfg.model.size_multiple, cfg.sampler.height, cfg.sampler.width) == (multiple, side, side)
    assert (cfg.sampler.num_inference_steps, cfg.sampler.guidance_scale) == (steps, scale)
    assert (cfg.model.guidance, cfg.plan.batch_size) == (guidance, batch_size)


def test_what_a_person_says_goes_before_the_pipelines_own(tmp_path: Path) -> None:
    said = ("sampler.height=512", "sampler.num_inference_steps=9", "sampler.guidance_scale=0", "plan.batch_size=4")
    cfg = settled(write(tmp_path, SD3), *said, "model.max_sequence_length=128")
    assert (cfg.sampler.height, cfg.sampler.width, cfg.sampler.num_inference_steps) == (512, 1024, 9)
    assert (cfg.sampler.guidance_scale, cfg.plan.batch_size, cfg.model.max_sequence_length) == (0.0, 4, 128)


def test_another_scheduler_or_another_class_is_another_model(tmp_path: Path) -> None:
    def fingerprint() -> Any:
        return config.fingerprint(settled(tmp_path))["model.pipeline"]

    before = fingerprint() if write(tmp_path, SD3) else None
    assert before.startswith("StableDiffusion3Pipeline ") and fingerprint() == before
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0, "_diffusers_version": "0.1"}')
    assert fingerprint() == before, "a version that wrote the file is no setting"
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"shift": 1.0}')
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("name", "override", "sentence"),
    [
        (SD3, "model.dtype=float16", "model.dtype must be bfloat16 or float32 for model=diffusers"),
        (SD3, "model.kernels=fused", "model.kernels must be auto or diffusers for model=diffusers"),
        (SD3, "model.quantization=fp8", "model.quantization must be none for model=diffusers"),
        (SD3, "model.compile=regional", "model.compile must be off for model=diffusers"),
        (SD3, "model.residency=windowed", "model.residency must be auto or resident"),
        (SD3, "model.random_weights=true", "model.random_weights must be false"),
        (SD3, "model.base=/x", "model.base must be null for model=diffusers, got /x"),
        (SD3, "model.loras=[{path: a.safetensors}]", "model.loras must be [] for model=diffusers, got "),
        (SD3, "sampler.step_cache=medium", "sampler.step_cache must be off for model=diffusers, got medium"),
        (SD3, "sampler.height=1000", "must be a multiple of 16 for diffusers, got 1000; nearest 992"),
        ("SanaPipeline", "sampler.width=1008", "must be a multiple of 32 for diffusers, got 1008; nearest 992, 1024"),
        (SD3, "sampler.guidance_scale=-2", "sampler.guidance_scale must be a finite number >= 0"),
        ("QwenImagePipeline", "plan.batch_size=4", "plan.batch_size must be 1 or auto for QwenImagePipeline, got 4"),
        ("StableDiffusionXLPipeline", "model.max_sequence_length=77", "must be 0, got 77: the call of"),
        ("Flux2KleinKVPipeline", "sampler.guidance_scale=4", "sampler.guidance_scale must not be given, got 4"),
        (SD3, "model.pipeline=SD4", "model.pipeline must be StableDiffusion3Pipeline "),
        ("StableDiffusionXLImg2ImgPipeline", "", "must be a pipeline from text to images: "),
        ("WanPipeline", "", "must be a pipeline from text to images: "),
        ("NoSuchPipeline", "", "NoSuchPipeline is no pipeline of the diffusers that is installed here"),
    ],
)
def test_a_setting_that_the_pipeline_does_not_take_is_refused(
    tmp_path: Path, name: str, override: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(write(tmp_path, name), *filter(None, [override]))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"_class_name": ["my_code", "MyPipeline"]}, "code that comes with a model is never run"),
        ({"_class_name": "x; import os"}, "_class_name must be a pipeline of diffusers"),
        ({"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}, "a black picture is never written"),
        ({"vae": [None, None]}, "cannot be drawn here: it has no vae"),
        ({"transformer": None}, "cannot be drawn here: it has no transformer or unet"),
    ],
)
def test_a_folder_that_cannot_be_drawn_is_refused(tmp_path: Path, index: dict[str, Any], sentence: str) -> None:
    write(tmp_path, SD3, **index)
    with pytest.raises(ConfigError) as refused:
        settled(tmp_path)
    assert sentence in str(refused.value)


def test_no_folder_at_all_is_one_sentence(tmp_path: Path) -> None:
    for path, sentence in (("null", "got null"), (tmp_path / "gone", "no such folder"), (tmp_path, "is missing in")):
        with pytest.raises(ConfigError, match=sentence):
            settled(path)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def surveyed(tmp_path: Path) -> Callable[..., Any]:
    def of(name: str, rows: list[dict[str, Any]]) -> Any:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
        cfg = settled(write(tmp_path / name, name))
        cfg.manifest.path = str(tmp_path / "m.parquet")
        return survey(open_manifest(cfg.manifest), config.row_rules(cfg), cfg)

    return of


def test_rows_of_one_launch_have_one_guidance(surveyed: Callable[..., Any]) -> None:
    rows = [{"prompt": "a", "guidance_scale": scale} for scale in (7.0, 4.5, None, 1.0)]
    counts = surveyed(SD3, rows).counts
    assert {bucket.name: number for bucket, number in counts.items()} == {
        "1024x1024-28-cfg-g7.0": 2,
        "1024x1024-28-cfg-g4.5": 1,
        "1024x1024-28-g1.0": 1,
    }


def test_a_row_that_names_what_the_call_does_not_take_is_rejected(surveyed: Callable[..., Any]) -> None:
    rows = [
        {"prompt": "a", "guidance_scale": 4.0, "negative_prompt": None},
        {"prompt": "a", "guidance_scale": None, "negative_prompt": "dull"},
        {"prompt": "a", "guidance_scale": None, "negative_prompt": None},
    ]
    found = surveyed("Flux2KleinKVPipeline", rows)
    assert found.rejected == {"guidance_unsupported": 1, "negative_prompt_unsupported": 1}
    assert [bucket.name for bucket in found.counts] == ["1024x1024-4"]
    assert surveyed("SanaSprintPipeline", rows).rejected == {"negative_prompt_unsupported": 1}


def test_a_negative_prompt_that_would_be_dropped_is_rejected(surveyed: Callable[..., Any]) -> None:
    rows = [{"prompt": "a", "guidance_scale": scale, "negative_prompt": "dull"} for scale in (1.0, 4.0)]
    assert surveyed("StableDiffusionXLPipeline", rows).rejected == {"negative_prompt_unused": 1}
    assert surveyed("FluxPipeline", rows).rejected == {}, "there the guidance is embedded, and the second pass apart"


# --- the command ------------------------------------------------------------------------------------------------------


def test_nothing_of_a_pipeline_is_compiled_ahead(tmp_path: Path) -> None:
    cfg = composed("manifest.path=m.parquet", "model=diffusers", f"model.path={write(tmp_path, SD3)}")
    with pytest.raises(ConfigError, match=r"model\.compile must be off for model=diffusers, got aot"):
        verbs.compile(cfg)


def test_plan_reads_the_folder_without_torch_or_diffusers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "guidance_scale": [4.0, None]}), tmp_path / "m.parquet")
    write(tmp_path / "sd3", SD3)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['diffusers'] = sys.modules['transformers'] = None;"
        "from fluxbatch.__main__ import main; main()"
    )
    settings = [f"manifest.path={tmp_path}/m.parquet", f"model.path={tmp_path}/sd3", f"output.dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--json", "model=diffusers", *settings], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = [bucket["name"] for bucket in json.loads(done.stdout)["buckets"]]
    assert names == ["1024x1024-28-cfg-g7.0", "1024x1024-28-cfg-g4.0"]
    assert not (tmp_path / "run").exists()
