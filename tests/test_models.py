"""Loading, placement and the text stages: what is refused before weights load, and what no neighbour may change."""

import json
import logging
import re
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, FluxTransformer2DModel
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import FLUX1_SCHEDULER, FLUX2_SCHEDULER, flux1_parts, flux2_parts, model_config
from transformers import CLIPTextConfig, CLIPTextModel, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel

from fluxbatch import tiny
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.models import Model, check_model, flux1, flux2, homes, load_model, loading
from fluxbatch.models.flux1 import Flux1
from fluxbatch.models.flux2 import Flux2
from fluxbatch.models.tokens import RandomTokenizer
from fluxbatch.records import Bucket


def flux1_model(**changes: Any) -> Flux1:
    cfg = model_config(**changes)
    return Flux1(**flux1_parts(), scheduler_config=FLUX1_SCHEDULER, cfg=cfg, true_cfg_scale=2.0)


def flux2_model(**changes: Any) -> Flux2:
    parts = flux2_parts(num_text_layers=27)
    cfg = model_config(family="flux2", name="flux2_klein_4b", **changes)
    return Flux2(**{**parts, "text_encoder": parts["text_encoder"].model}, scheduler_config=FLUX2_SCHEDULER, cfg=cfg)


# --- text -------------------------------------------------------------------------------------------------------------


def test_br12_only_the_prompt_that_t5_cannot_hold_is_truncated_and_nobody_warns(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = flux1_model(max_sequence_length=512)
    prompts = ["red " * (num_tokens - 1) for num_tokens in (5, 76, 300, 900)]  # a word each, and the end
    caplog.clear()
    capfd.readouterr()
    tokens = model.tokenize(prompts)
    assert tokens.truncated == (False, False, False, True)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
    for index, prompt in enumerate(prompts):
        alone = model.tokenize([prompt]).tensors
        assert all(torch.equal(alone[name][0], tensor[index]) for name, tensor in tokens.tensors.items())


@pytest.mark.parametrize(("num_tokens", "truncated"), [(511, False), (512, False), (513, True)])
def test_br12_truncated_means_more_tokens_than_fit(num_tokens: int, truncated: bool) -> None:
    assert flux1_model(max_sequence_length=512).tokenize(["red " * (num_tokens - 1)]).truncated == (truncated,)


def test_br12_klein_counts_its_chat_template() -> None:
    model = flux2_model(max_sequence_length=64)
    assert model.tokenize(["x", "x" * 64]).truncated == (False, True)


@pytest.mark.parametrize("make", [flux1_model, flux2_model])
def test_br14_an_embedding_does_not_depend_on_its_batch_mates(make: Callable[..., Model]) -> None:
    model = make(max_sequence_length=128)

    def embeds(*prompts: str) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in model.encode(model.tokenize(prompts).tensors).items()}

    alone = embeds("a cat")
    crowds = [["a dog", "", "two stars", "x", "y", "z", "red"], ["cat " * 500]]
    for crowd in crowds:
        among = embeds("a cat", *crowd)
        for name, tensor in alone.items():
            assert among[name].shape == tensor.shape
            torch.testing.assert_close(among[name], tensor, rtol=1e-5, atol=1e-5)
    assert alone["prompt_embeds"].shape[0] == 128


def test_random_tokenizer_gives_the_same_ids_in_every_process() -> None:
    tokenizer = RandomTokenizer(vocab_size=1000, eos_token_id=1, pad_token_id=0, model_max_length=6)
    encoded = tokenizer(["a red circle", "a " * 9], max_length=6)
    assert encoded.input_ids.tolist() == [[53, 677, 343, 1, 0, 0], [53, 53, 53, 53, 53, 1]]
    assert encoded.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert [bool(encoding.overflowing) for encoding in encoded.encodings] == [False, True]


# --- device and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_br24_each_dtype_works_on_a_cpu_and_is_logged(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fluxbatch")
    model = load_model(model_config(dtype=dtype, max_sequence_length=64), true_cfg_scale=2.0)
    assert model.dtype is getattr(torch, dtype)
    assert draw_one_step(model).isfinite().all()
    lines = [record.getMessage() for record in caplog.records if record.name == "fluxbatch"]
    gib = {"float32": "0.027", "bfloat16": "0.013", "float16": "0.013"}[dtype]
    told = f"transformer: FluxTransformer2DModel, 7.13 M parameters, {dtype} on cpu, {gib} GiB in "
    assert any(re.fullmatch(re.escape(told) + r"\d+\.\d s \(\d+\.\d\d GiB/s\)", line) for line in lines)
    assert {line.split(":")[0] for line in lines} == {"cpu", "transformer", "text_encoder", "text_encoder_2", "vae"}


def draw_one_step(model: Model) -> torch.Tensor:
    bucket = Bucket(32, 48, 1)
    noise = torch.randn(1, *model.noise_shape(height=32, width=48), generator=torch.Generator().manual_seed(0))
    embeds = model.encode(model.tokenize(["a red circle"]).tensors)
    flow = model.flow(embeds=embeds, guidance=torch.tensor([3.5]), bucket=bucket)
    return model.decode(flow(model.pack(noise.to(model.dtype)), 0), bucket=bucket)


def test_br13_beside_a_float16_transformer_text_encoders_and_vae_run_wider() -> None:
    placement = loading.place(model_config(dtype="float16"))
    assert placement.dtype is torch.float16
    assert (placement.text_encoder_dtype, placement.vae_dtype) == (torch.float32, torch.float32)
    wide = loading.place(model_config(dtype="float32", text_encoder_dtype="bfloat16", vae_dtype="bfloat16"))
    assert (wide.text_encoder_dtype, wide.vae_dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("has_bfloat16", "wide"), [(True, torch.bfloat16), (False, torch.float32)])
def test_br13_on_a_gpu_wider_is_bfloat16_where_it_has_that(
    has_bfloat16: bool, wide: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: has_bfloat16)
    placement = loading.place(model_config(dtype="float16", device="auto"))
    assert placement.device == torch.device("cuda:0")
    assert (placement.text_encoder_dtype, placement.vae_dtype) == (wide, wide)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_br24_cuda_without_cuda_is_refused_before_weights(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"model.device={device} needs a CUDA device"):
        check_model(model_config(device=device))


def test_br24_a_gpu_that_does_not_exist_is_refused_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"model.device=cuda:2 must be below cuda:2"):
        check_model(model_config(device="cuda:2"))


def test_br24_float16_is_refused_where_torch_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for Half')

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    with pytest.raises(ConfigError, match=r"model.dtype must be float32 or bfloat16 here, got float16"):
        check_model(model_config(dtype="float16"))


def test_regional_compile_on_a_cpu_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load_model(model_config(compile="regional"), true_cfg_scale=2.0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["model.compile=regional is for CUDA; the transformer runs uncompiled on cpu"]


# --- where a model lies -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.FOLDER, tmp_path / "model"))


def refusal(**changes: Any) -> str:
    """The one sentence of the error, said before a weight is read."""
    with pytest.raises(FluxbatchError) as error:
        check_model(model_config(**changes))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer_2/tokenizer.json",
        "text_encoder/config.json",
        "text_encoder_2/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_br44_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = refusal(path=str(folder))
    assert message.startswith(f"model.path={folder}: {name}")
    assert "is missing" in message


def test_br44_a_missing_shard_is_named(folder: Path) -> None:
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    whole.rename(whole.with_name("diffusion_pytorch_model-00001-of-00002.safetensors"))
    shards = {"a": whole.stem + "-00001-of-00002.safetensors", "b": whole.stem + "-00002-of-00002.safetensors"}
    index = whole.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": shards}))
    assert "transformer/diffusion_pytorch_model-00002-of-00002.safetensors is missing" in refusal(path=str(folder))


def test_a_folder_that_is_not_there_is_refused() -> None:
    assert refusal(path="/no/such/model") == (
        "model.path must be a folder or a hub id (org/name), got '/no/such/model': no such folder"
    )
    assert "model.path must name a folder or a hub id for flux1_dev" in refusal(name="flux1_dev", path=None)


def test_an_embedded_model_without_weights_says_how_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.FOLDERS, "tiny_flux2", tmp_path / "absent")
    with pytest.raises(ConfigError) as refused:
        check_model(model_config(name="tiny_flux2", family="flux2", guidance="none"))
    sentence = str(refused.value)
    assert sentence.startswith(f"model=tiny_flux2 has no weights in {tmp_path / 'absent'} yet: ")
    assert "fluxbatch.tiny.train --model flux2" in sentence and "fluxbatch.tiny.install" in sentence
    assert "\n" not in sentence


def test_weights_of_another_kind_are_refused(folder: Path) -> None:
    assert "must be a Flux2KleinPipeline for model=klein" in refusal(family="flux2", name="klein", path=str(folder))
    assert "model.guidance must be embedded for the weights in" in refusal(guidance="none", path=str(folder))


def test_truncated_weights_end_in_one_sentence(folder: Path) -> None:
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(FluxbatchError, match=r"model.path=.*: vae cannot be loaded: .*"):
        load_model(model_config(path=str(folder)), true_cfg_scale=2.0)


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_weights_that_lack_a_tensor_are_refused_not_filled_with_noise(folder: Path, part: str) -> None:
    (weights,) = (folder / part).glob("*.safetensors")
    tensors = load_file(weights)
    del tensors[max(tensors)]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(FluxbatchError, match=f"{part} lacks .*tensors"):
        load_model(model_config(path=str(folder)), true_cfg_scale=2.0)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the tiny model as `somebody/tiny`, and no network at all."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise AssertionError("an outgoing request")

    cache = tmp_path / "hub"
    repository = cache / "models--somebody--tiny"
    shutil.copytree(tiny.FOLDER, repository / "snapshots" / "0123456789")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    return repository / "snapshots" / "0123456789"


def test_br44_a_cached_model_loads_without_an_outgoing_request(hub_cache: Path) -> None:
    cfg = model_config(path="somebody/tiny", max_sequence_length=64)
    assert homes.model_folder(cfg) == hub_cache
    assert load_model(cfg, true_cfg_scale=2.0).name == "tiny"


def test_br44_offline_the_missing_file_of_a_cached_model_is_named(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (hub_cache / "vae" / "config.json").unlink()
    assert "model.path=somebody/tiny: no such folder, the local cache" in refusal(path="somebody/tiny")
    assert "lacks vae/config.json, and HF_HUB_OFFLINE forbids the network" in refusal(path="somebody/tiny")
    assert "does not hold it" in refusal(path="somebody/else")


def test_br44_what_the_hub_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(cfg: Any, *, local_files_only: bool) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        raise OSError("401 Client Error: access to somebody/gated is restricted\nlog in first")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(homes, "_snapshot", snapshot)
    assert refusal(path="somebody/gated").endswith("401 Client Error: access to somebody/gated is restricted")
    assert asked == [True, False]


# --- klein ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def klein_folder(tmp_path: Path) -> Path:
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX2_SCHEDULER)
    Flux2KleinPipeline(**flux2_parts(), scheduler=scheduler, is_distilled=True).save_pretrained(tmp_path / "klein")
    return tmp_path / "klein"


def test_klein_reads_only_the_text_layers_it_uses(klein_folder: Path) -> None:
    cfg = model_config(family="flux2", name="flux2_klein_4b", guidance="none", path=str(klein_folder))
    stored = load_model(cfg, true_cfg_scale=2.0)
    parts = flux2_parts()
    whole = parts["text_encoder"].model
    tokens = stored.tokenize(["a red circle"]).tensors
    with torch.no_grad():
        states = whole(**tokens, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.stack([states[layer] for layer in (9, 18, 27)], dim=1).permute(0, 2, 1, 3).reshape(1, 48, -1)
    assert torch.equal(stored.encode(tokens)["prompt_embeds"], expected)
    assert len(stored._text_encoder.layers) == 27


def test_a_folder_that_names_its_text_layers_is_read_at_those(tmp_path: Path) -> None:
    """As diffusers reads it when its call is told so."""
    parts = flux2_parts(num_text_layers=7)
    parts["text_encoder"].config.text_encoder_out_layers = [2, 4, 6]
    pipeline = Flux2KleinPipeline(
        **parts, scheduler=FlowMatchEulerDiscreteScheduler(**FLUX2_SCHEDULER), is_distilled=True
    )
    pipeline.save_pretrained(tmp_path)
    cfg = model_config(family="flux2", name="flux2_klein_4b", guidance="none", path=str(tmp_path))
    stored = load_model(cfg, true_cfg_scale=2.0)
    tokens = stored.tokenize(["a red circle"]).tensors
    expected, _ = pipeline.encode_prompt("a red circle", max_sequence_length=48, text_encoder_out_layers=(2, 4, 6))
    assert torch.equal(stored.encode(tokens)["prompt_embeds"], expected)
    assert len(stored._text_encoder.layers) == 6


def test_klein_base_and_distilled_weights_are_not_confused(klein_folder: Path) -> None:
    sentence = refusal(family="flux2", name="flux2_klein_base_4b", guidance="classifier_free", path=str(klein_folder))
    assert sentence.startswith("model.guidance must be none for the weights in")


# --- random weights ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in settings, a few layers deep and narrow."""
    small = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 64}
    clip = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    narrow = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
    dev = flux1.RANDOM["flux1_dev"]
    flux1_small = {**dev, "transformer": {**dev["transformer"], **small, "pooled_projection_dim": 64}}
    klein = flux2.RANDOM["flux2_klein_4b"]
    klein_small = {
        "transformer": {**klein["transformer"], **small, "joint_attention_dim": 3 * 64},
        "text_encoder": {**klein["text_encoder"], "hidden_size": 64, "intermediate_size": 64, "head_dim": 8},
    }
    monkeypatch.setitem(flux1.RANDOM, "flux1_dev", flux1_small)
    monkeypatch.setitem(flux2.RANDOM, "flux2_klein_4b", klein_small)
    monkeypatch.setattr(flux1, "CLIP_L", {**flux1.CLIP_L, **clip})
    monkeypatch.setattr(flux1, "T5_XXL", {**flux1.T5_XXL, "d_model": 64, "d_ff": 64, "num_layers": 2, "num_heads": 2})
    monkeypatch.setattr(flux1, "VAE", {**flux1.VAE, **narrow})
    monkeypatch.setattr(flux2, "AutoencoderKLFlux2", lambda: type_of_vae(**narrow))


type_of_vae = flux2.AutoencoderKLFlux2


@pytest.mark.parametrize(("name", "family"), [("flux1_dev", "flux1"), ("flux2_klein_4b", "flux2")])
def test_random_weights_are_finite_ordinary_and_the_same_in_every_process(
    small_full_size: None, name: str, family: str
) -> None:
    cfg = model_config(name=name, family=family, dtype="bfloat16", random_weights=True)
    first = load_model(cfg, true_cfg_scale=2.0)
    torch.rand(7)  # another process has used its generator otherwise
    again = load_model(cfg, true_cfg_scale=2.0)
    image = draw_one_step(first)
    assert image.dtype is torch.bfloat16
    assert image.isfinite().all()
    assert 1e-3 < image.float().abs().mean() < 100
    assert torch.equal(image, draw_one_step(again))
    assert torch.get_default_dtype() is torch.float32


def test_random_weights_of_a_model_without_built_in_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.random_weights=true has full-size settings for flux1_dev"):
        load_model(model_config(random_weights=True), true_cfg_scale=2.0)


def billions(build: Callable[[], torch.nn.Module]) -> float:
    with torch.device("meta"):
        return round(sum(parameter.numel() for parameter in build().parameters()) / 1e9, 3)


def test_random_weights_have_the_sizes_of_the_real_models() -> None:
    dev = flux1.RANDOM["flux1_dev"]["transformer"]
    assert billions(lambda: FluxTransformer2DModel(**dev)) == 11.901
    assert billions(lambda: CLIPTextModel(CLIPTextConfig(**flux1.CLIP_L))) == 0.123
    assert billions(lambda: T5EncoderModel(T5Config(**flux1.T5_XXL))) == 4.762
    assert billions(lambda: flux1.AutoencoderKL(**flux1.VAE)) == 0.084
    for name, transformer, encoder in [("flux2_klein_4b", 3.876, 3.114), ("flux2_klein_base_9b", 9.079, 5.832)]:
        settings = flux2.RANDOM[name]
        assert billions(lambda s=settings: flux2.Flux2Transformer2DModel(**s["transformer"])) == transformer
        assert billions(lambda s=settings: Qwen3Model(Qwen3Config(**s["text_encoder"]))) == encoder


# --- schedules --------------------------------------------------------------------------------------------------------


def test_br19_threads_that_ask_for_schedules_of_mixed_steps_each_get_their_own() -> None:
    model = flux1_model()
    steps = [4, 28, 1, 50] * 100
    with ThreadPoolExecutor(8) as pool:
        schedules = list(pool.map(lambda n: model.schedule(Bucket(64, 64, n)), steps))
    assert [len(schedule.timesteps) for schedule in schedules] == steps
    assert model.schedule(Bucket(64, 64, 4)) is model.schedule(Bucket(64, 64, 4))
