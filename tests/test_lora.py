"""LoRA: equal to what diffusers and peft fuse, before anything else is done to the weights; nothing passed over."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import bfl, write
from diffusers import Flux2KleinPipeline, FluxPipeline
from lora_files import DIFFUSERS_FLUX1, DIFFUSERS_FLUX2, STYLES, ai_toolkit, kohya_flux1, pair, peft, write_lora
from safetensors.torch import load_file
from test_checkpoints import ROWS, settings, state
from test_parity import assert_same_pictures, pixels, reference
from test_run import do, manifest, rows
from test_run import settings as job_settings
from torch import Tensor

from fluxbatch import word_verbs
from fluxbatch.config import LoraConfig, ModelConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models import check_model, load_model, lora
from fluxbatch.models.fused import ops
from fluxbatch.output import job
from fluxbatch.storage.folder import RunFolder

PIPELINES: dict[str, Any] = {"flux1": FluxPipeline, "flux2": Flux2KleinPipeline}


def using(base: Path, family: str, *files: tuple[Path, float], **changes: Any) -> ModelConfig:
    loras = [LoraConfig(str(path), weight) for path, weight in files]
    return settings(family, None, path=str(base), loras=loras, **changes)


def fused_by_diffusers(base: Path, family: str, *files: tuple[Path, float]) -> Any:
    pipeline = PIPELINES[family].from_pretrained(base)
    for number, (path, _) in enumerate(files):
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=f"a{number}")
    names = [f"a{number}" for number in range(len(files))]
    pipeline.set_adapters(names, [weight for _, weight in files])
    pipeline.fuse_lora(components=["transformer"], adapter_names=names)
    pipeline.unload_lora_weights()
    return pipeline


def weights(model: Any) -> dict[str, Tensor]:
    return dict(model._transformer.named_parameters())


def assert_equal_weights(ours: Any, pipeline: Any, base: Path) -> None:
    theirs, before = dict(pipeline.transformer.named_parameters()), state(base)
    changed = 0
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)
        changed += not torch.equal(weight, before[name])
    assert changed >= 2, "or there was nothing to compare"


# --- equal to diffusers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", list(STYLES))
def test_each_spelling_is_fused_as_diffusers_and_peft_fuse_it(style: str, request: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    family, make, metadata = STYLES[style]
    base = request.getfixturevalue(f"{family}_base")
    path = write_lora(tmp_path / "a.safetensors", make(), metadata)
    cfg = using(base, family, (path, 0.7))
    check_model(cfg)
    ours, theirs = load_model(cfg, true_cfg_scale=2.0), fused_by_diffusers(base, family, (path, 0.7))
    assert_equal_weights(ours, theirs, base)


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_pictures_with_two_loras_are_those_of_diffusers(family: str, request: Any, tmp_path: Path) -> None:
    torch.manual_seed(4)
    base = request.getfixturevalue(f"{family}_base")
    layers = {"flux1": DIFFUSERS_FLUX1, "flux2": DIFFUSERS_FLUX2}[family]
    files = [
        (write_lora(tmp_path / f"{n}.safetensors", peft(layers)), weight) for n, weight in (("a", 0.5), ("b", -1.2))
    ]
    ours = load_model(using(base, family, *files, kernels="fused"), true_cfg_scale=2.0)
    pipeline = fused_by_diffusers(base, family, *files)
    options = {"text_encoder_out_layers": (9, 18, 27)} if family == "flux2" else {}
    drawn = pixels(ours, ROWS)
    assert_same_pictures(drawn, [reference(pipeline, row, **options) for row in ROWS])
    plain = pixels(load_model(using(base, family), true_cfg_scale=2.0), ROWS)
    assert all((a != b).any() for a, b in zip(drawn, plain, strict=True))


# --- one rounding, before everything else -----------------------------------------------------------------------------

LAYER = "transformer_blocks.0.attn.to_out.0"


@pytest.fixture
def one_layer(tmp_path: Path) -> tuple[Path, Tensor]:
    """A file that changes one layer, and the change."""
    torch.manual_seed(5)
    tensors = pair(f"transformer.{LAYER}", 32, 32)
    up, down = tensors.values()
    return write_lora(tmp_path / "a.safetensors", tensors), up @ down


def test_a_change_is_added_in_float32_and_rounded_once(one_layer: tuple[Path, Tensor], flux1_base: Path) -> None:
    """The folder's weights are float32: its numbers, not their bfloat16 rounding, are what the change is added to."""
    path, change = one_layer
    ours = load_model(using(flux1_base, "flux1", (path, 0.6), dtype="bfloat16"), true_cfg_scale=2.0)
    stored = state(flux1_base)[f"{LAYER}.weight"]
    exact = stored + change * 0.6
    assert torch.equal(weights(ours)[f"{LAYER}.weight"], exact.bfloat16())
    assert not torch.equal(exact.bfloat16(), (stored.bfloat16() + change * 0.6).bfloat16()), "the test shows nothing"


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "fp8_weight_only"])
def test_a_change_is_fused_before_quantisation(
    quantization: str, from_file: bool, one_layer: tuple[Path, Tensor], flux1_base: Path, tmp_path: Path
) -> None:
    """Of a folder and of a checkpoint file: the quantised weight is that of the changed one."""
    path, change = one_layer
    cfg = using(flux1_base, "flux1", (path, 0.6), quantization=quantization, kernels="fused")
    if from_file:
        cfg.base, cfg.path = cfg.path, str(write(tmp_path / "m.safetensors", bfl(state(flux1_base), family="flux1")))
    model: Any = load_model(cfg, true_cfg_scale=2.0)
    held = model._fused.transformer.blocks.doubles[0].attention_out[1]
    changed = state(flux1_base)[f"{LAYER}.weight"] + change * 0.6
    wanted = ops.quantize_rows_plain(changed, held.weight.dtype)
    assert torch.equal(held.weight.float(), wanted.values.float())
    assert torch.equal(held.scales.t(), wanted.scales)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(tensors: dict[str, Tensor], base: Path, family: str, tmp_path: Path, **changes: Any) -> str:
    path = write_lora(tmp_path / "wrong.safetensors", tensors)
    with pytest.raises(ConfigError) as error:
        check_model(using(base, family, (path, 1.0), **changes))
    sentence = str(error.value)
    assert sentence.startswith("model.loras[0].path must ") and str(path) in sentence and "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 37, 32, words=("lora_up", "lora_down")),
            "of a text encoder",
        ),
        (pair("text_encoder.text_model.encoder.layers.0.mlp.fc1", 37, 32), "of a text encoder"),
        (pair("text_encoders.t5xxl.transformer.encoder.block.0.x", 8, 8), "of a text encoder"),
        ({"transformer.x_embedder.lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector is none"),
        ({"transformer.x_embedder.dora_scale": torch.ones(32)}, "dora_scale is none"),
        ({"lora_unet_double_blocks_0_img_mlp_0.diff_b": torch.ones(32)}, "diff_b is none"),
        ({"transformer.x_embedder.lokr_w1": torch.ones(4, 4)}, "lokr_w1 is none"),
        (pair("transformer.time_embed.linear", 32, 32), "time_embed.linear is no layer of it"),
        (pair("transformer.transformer_blocks.7.attn.to_q", 32, 32), "transformer_blocks.7.attn.to_q is no layer"),
        (pair("transformer.transformer_blocks.0.attn.to_k", 64, 32), "to_k is [32, 32], its change [64, 32]"),
        ({"transformer.transformer_blocks.0.attn.to_k.lora_A.weight": torch.ones(4, 32)}, "has no counterpart"),
        (
            {f"transformer.proj_out.{word}.weight": torch.ones(16, 16, 1, 1) for word in ("lora_A", "lora_B")},
            "are [16, 16, 1, 1] and [16, 16, 1, 1]",
        ),
        (
            {
                "transformer.proj_out.lora_A.weight": torch.ones(4, 32),
                "transformer.proj_out.lora_B.weight": torch.ones(16, 5),
            },
            "are [16, 5] and [4, 32]",
        ),
        (pair("lora_unet_double_blocks_0_img_attn_qkv", 96, 32, words=("lora_up", "lora_down")), "lora_unet_double"),
        (
            {key: torch.full_like(value, torch.nan) for key, value in pair("transformer.proj_out", 16, 32).items()},
            "hold finite numbers",
        ),
    ],
)
def test_one_tensor_that_cannot_be_applied_refuses_the_file_by_name(
    extra: dict[str, Tensor], told: str, flux1_base: Path, tmp_path: Path
) -> None:
    """Beside others that can: diffusers would have left it out with a line in a log."""
    assert told in refused(peft(DIFFUSERS_FLUX1) | extra, flux1_base, "flux1", tmp_path)


def test_alphas_for_some_layers_only_are_refused(flux1_base: Path, tmp_path: Path) -> None:
    """diffusers gives the others the commonest one."""
    tensors = peft(DIFFUSERS_FLUX1) | {"transformer.x_embedder.alpha": torch.tensor(2.0)}
    assert "alpha" in refused(tensors, flux1_base, "flux1", tmp_path)


def test_a_lora_of_the_other_family_is_refused(flux1_base: Path, flux2_base: Path, tmp_path: Path) -> None:
    assert "be a LoRA of FLUX.1" in refused(peft(DIFFUSERS_FLUX2), flux1_base, "flux1", tmp_path)
    assert "be a LoRA of FLUX.2" in refused(peft(DIFFUSERS_FLUX1), flux2_base, "flux2", tmp_path)
    assert "be a LoRA of FLUX.2" in refused(kohya_flux1(), flux2_base, "flux2", tmp_path)


def test_a_spelling_that_diffusers_drops_as_a_whole_is_refused(flux2_base: Path, tmp_path: Path) -> None:
    """It takes FLUX.2 files with `lora_down` for Kohya's, and those with Comfy's names for empty."""
    told = refused(ai_toolkit(("lora_up", "lora_down")), flux2_base, "flux2", tmp_path)
    assert "diffusion_model." in told and "matches no layer of it" in told


def test_whole_models_pickles_folders_and_missing_files_are_refused(flux1_base: Path, tmp_path: Path) -> None:
    assert "hold pairs of low-rank matrices" in refused(state(flux1_base), flux1_base, "flux1", tmp_path)
    torch.save({}, tmp_path / "a.pt")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "wrong.safetensors").read_bytes()[:-5])
    for name, why in (
        ("a.pt", "pickles are never opened"),
        ("none.safetensors", "no such file"),
        (".", "no such file"),
        ("cut.safetensors", "it is cut off"),
    ):
        with pytest.raises(ConfigError, match=r"model\.loras\[0\]\.path must be a .*safetensors file, got .*" + why):
            check_model(using(flux1_base, "flux1", (tmp_path / name, 1.0)))


# --- a job ------------------------------------------------------------------------------------------------------------


def test_an_altered_file_is_another_job_and_a_moved_one_is_not(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    path = write_lora(tmp_path / "a.safetensors", peft(DIFFUSERS_FLUX1))
    named = lambda path, weight=0.8: f"model.loras=[{{path:{path},weight:{weight}}}]"  # noqa: E731
    do(job_settings(tmp_path, named(path)))
    stored = json.loads((tmp_path / "run" / "job.json").read_text())
    assert stored["settings"]["model"]["loras"] == [{"path": str(path), "weight": 0.8}]
    [kept] = stored["fingerprint"]["model.loras"]
    assert kept["weight"] == 0.8 and len(kept["sha256"]) == 64
    assert "| LoRA | a.safetensors (0.8) |" in (tmp_path / "run" / "README.md").read_text()
    do(job_settings(tmp_path, named(path.rename(tmp_path / "b.safetensors"))))
    for other in (named(tmp_path / "b.safetensors", 0.9), "model.loras=[]"):
        with pytest.raises(ConfigError, match=r"model\.loras must be"):
            do(job_settings(tmp_path, other))
    tensors = load_file(tmp_path / "b.safetensors")
    write_lora(tmp_path / "b.safetensors", {key: tensor * 1.001 for key, tensor in tensors.items()})
    with pytest.raises(ConfigError, match=r"model\.loras must be"):
        do(job_settings(tmp_path, named(tmp_path / "b.safetensors")))
    cfg = job.recorded_config(stored)
    cfg.model.loras[0].path = str(tmp_path / "b.safetensors")
    [(key, was, now)] = word_verbs._changed_settings(RunFolder(tmp_path / "run"), cfg)
    assert key == "model.loras" and was == [kept] != now, "what render tells where the bytes differ"


def test_a_start_reads_a_file_once_to_know_it_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    path, read = write_lora(tmp_path / "a.safetensors", peft(DIFFUSERS_FLUX1)), []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file.name) or digest(file, kind))
    do(job_settings(tmp_path, f"model.loras=[{{path:{path}}}]"))
    assert read.count(str(path)) == 1


def test_the_recorded_settings_name_the_loras_again(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    path = write_lora(tmp_path / "a.safetensors", peft(DIFFUSERS_FLUX1))
    do(job_settings(tmp_path, f"model.loras=[{{path:{path}}}]"))
    cfg = job.recorded_config(json.loads((tmp_path / "run" / "job.json").read_text()))
    assert cfg.model.loras == [LoraConfig(str(path), 1.0)]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.loras=[{path:a.safetensors,wieght:1}]", "wieght is not a setting"),
        ("model.loras=[{weight:1}]", r"model.loras\[0\].path must be set"),
        ("model.loras=[{path:a.safetensors,weight:nan}]", "must have finite numbers as weights"),
        ("model.loras=[a.safetensors]", "model.loras"),
    ],
)
def test_misspelt_loras_are_refused_in_a_sentence(setting: str, sentence: str, tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    with pytest.raises(ConfigError, match=sentence):
        do(job_settings(tmp_path, setting))


def test_random_weights_take_no_lora(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    with pytest.raises(ConfigError, match=r"model\.loras must be empty with model.random_weights=true"):
        do(job_settings(tmp_path, "model.loras=[{path:a.safetensors}]", "model.random_weights=true"))


def test_a_file_without_loras_changes_nothing() -> None:
    weight = torch.randn(4, 4)
    assert torch.equal(lora.Loras().added("x", weight, first=0), weight)
