"""What weights take, where they live, and that a text encoder streamed layer by layer gives the same bits."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
from tiny_models import model_config

from fluxbatch import config, run, tiny
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig, ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.models import Model, flux1, flux2, homes, load_model, loading, memory, residency
from fluxbatch.models.flux1 import Flux1
from fluxbatch.models.flux2 import Flux2, keep_first_layers
from fluxbatch.models.loading import Placement

CPU = torch.device("cpu")
BF16 = Placement(CPU, torch.bfloat16, torch.bfloat16, torch.bfloat16)
DEV = {"name": "flux1_dev", "dtype": "bfloat16", "random_weights": True}
KLEIN_9B = {"name": "flux2_klein_9b", "family": "flux2", "dtype": "bfloat16", "random_weights": True}


def needs(**settings: Any) -> residency.Footprint:
    cfg = model_config(**settings)
    if cfg.family == "flux1":
        shapes = residency._random_shapes(cfg, BF16, flux1._random)
        return residency.footprint(shapes, cfg=cfg, placement=BF16, text_encoder="text_encoder_2")
    shapes = residency._random_shapes(cfg, BF16, flux2._random)
    return residency.footprint(shapes, cfg=cfg, placement=BF16, text_encoder="text_encoder", num_layers=27)


def gb(gib: float) -> float:
    return gib * 2**30 / 1e9


# --- what weights take ------------------------------------------------------------------------------------------------


def test_the_weights_of_flux1_dev_take_what_they_are_known_to_take() -> None:
    dev = needs(**DEV)
    assert gb(dev.components["transformer"]) == pytest.approx(23.8, abs=0.05)
    assert gb(dev.components["text_encoder_2"]) == pytest.approx(9.5, abs=0.05)
    assert gb(dev.components["vae"]) == pytest.approx(0.17, abs=0.01)
    assert dev.window == pytest.approx(2 * dev.streamed / 24, rel=0.01), "two of 24 layers"
    float8 = needs(**DEV, quantization="fp8")
    assert gb(float8.components["transformer"]) == pytest.approx(15.3, abs=0.3)
    assert gb(float8.transformer_as_loaded) == pytest.approx(23.8, abs=0.05)


def test_the_weights_of_klein_9b_take_what_they_are_known_to_take() -> None:
    klein = needs(**KLEIN_9B)
    assert gb(klein.components["transformer"]) == pytest.approx(18.2, abs=0.05)
    assert gb(klein.components["text_encoder"]) == pytest.approx(11.7, abs=0.05)
    assert gb(needs(**KLEIN_9B, quantization="fp8").components["transformer"]) == pytest.approx(9.4, abs=0.1)


def test_stored_weights_are_counted_from_their_headers_without_layers_that_are_not_read(tmp_path: Path) -> None:
    parts = tiny_models.flux2_parts(num_text_layers=30)
    for name in ("text_encoder", "transformer", "vae"):
        parts[name].save_pretrained(tmp_path / name)
    cfg = model_config(family="flux2", path=str(tmp_path))
    shapes = {name: residency._component_shapes(tmp_path, name, stem)
              for name, stem in homes.LAYOUTS["flux2"].weights.items()}  # fmt: skip
    found = residency.footprint(shapes, cfg=cfg, placement=BF16, text_encoder="text_encoder", num_layers=27)
    used = keep_first_layers(parts["text_encoder"].model, 27)
    assert found.components["text_encoder"] * 2**30 == sum(p.numel() * 2 for p in used.parameters()) + 16 * 2
    assert found.components["transformer"] * 2**30 == sum(p.numel() * 2 for p in parts["transformer"].parameters())


def test_a_header_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x00\x01")
    with pytest.raises(FluxbatchError, match="vae cannot be loaded") as error:
        residency._component_shapes(tmp_path, "vae", "diffusion_pytorch_model")
    assert "\n" not in str(error.value)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "budget_gib", "windowed"),
    [
        (DEV, 125.0, False),
        (DEV, 40.0, False),  # 31.5 GiB of weights and room to work
        (DEV, 36.0, True),
        ({**DEV, "quantization": "fp8"}, 24.0, True),
        ({**DEV, "quantization": "fp8"}, 17.5, True),  # it is quantised on its way from the host
        ({**DEV, "quantization": "fp8"}, 40.0, False),
        ({**DEV, "residency": "windowed"}, 125.0, True),
        ({**DEV, "residency": "resident"}, 36.0, False),
        (KLEIN_9B, 40.0, False),
        ({**KLEIN_9B, "quantization": "fp8"}, 20.0, True),
    ],
)
def test_auto_streams_the_text_encoder_where_weights_and_room_to_work_do_not_fit(
    settings, budget_gib, windowed
) -> None:
    assert residency.is_windowed(model_config(**settings), needs(**settings), budget_gib=budget_gib) is windowed


def test_weights_beyond_the_budget_are_refused_with_what_they_need() -> None:
    cfg = model_config(**DEV, memory_budget_gib=20.0)
    with pytest.raises(ConfigError) as error:
        residency.is_windowed(cfg, needs(**DEV), budget_gib=20.0)
    assert str(error.value) == (
        "model.memory_budget_gib must be at least 23.5 for the weights of flux1_dev with model.residency=auto, got 20"
    )
    cfg = model_config(**DEV, residency="resident")
    with pytest.raises(
        ConfigError, match=r"at least 31\..* with model.residency=resident, got null, which is 28.0 here"
    ):
        residency.is_windowed(cfg, needs(**DEV), budget_gib=28.0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Any]]:
    """A GPU of 80 GiB of which 70 are free; the fractions that were enforced on it."""
    fractions: list[tuple[float, Any]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *told: fractions.append(told))
    return fractions


def test_the_budget_is_nine_tenths_of_what_is_free_or_as_told(card: list[tuple[float, Any]], caplog) -> None:
    assert memory.budget("cuda:0", wanted_gib=None).budget_gib == pytest.approx(63)
    limit = memory.budget("cuda:0", wanted_gib=24)
    with caplog.at_level(logging.INFO):
        memory.enforce(limit, torch.device("cuda:0"))
    assert card == [(0.3, torch.device("cuda:0"))]
    assert "Card, 80.0 GiB, 70.0 free, budget 24.0" in caplog.text


def test_a_budget_beyond_the_card_is_refused(card: list[tuple[float, Any]]) -> None:
    with pytest.raises(ConfigError) as error:
        memory.budget("cuda:0", wanted_gib=96.5)
    assert str(error.value) == "model.memory_budget_gib must be at most 80.0, the memory of cuda:0, got 96.5"


def test_on_a_gpu_the_choice_and_its_numbers_are_said(card: list[tuple[float, Any]], caplog) -> None:
    placement = dataclasses.replace(BF16, device=torch.device("cuda:0"))
    cfg = model_config(**DEV, memory_budget_gib=30)
    with caplog.at_level(logging.INFO):
        settled = residency.settle(cfg, placement, random=flux1._random, text_encoder="text_encoder_2")
    assert settled.windowed and settled.text_encoder_device == CPU and card
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weights")]
    assert line == (
        "weights: transformer 22.17, text_encoder 0.23, text_encoder_2 8.87, vae 0.16 GiB; residency windowed: "
        "23.52 GiB on the GPU, 8.63 on the host; budget 30.0 GiB"
    )


def test_residency_and_budget_are_no_part_of_the_fingerprint() -> None:
    plain, other = JobConfig(), JobConfig(model=ModelConfig(residency="windowed", memory_budget_gib=24.0))
    for cfg in (plain, other):
        cfg.model.name, cfg.model.family, cfg.model.guidance, cfg.output.kind = "tiny", "flux1", "embedded", "parquet"
    assert config.fingerprint(plain) == config.fingerprint(other)


# --- the stream -------------------------------------------------------------------------------------------------------


def flux1_model(*, windowed: bool) -> Model:
    parts = tiny_models.flux1_parts()
    placement = dataclasses.replace(BF16, windowed=windowed)
    residency.housed(parts["text_encoder_2"], parts["text_encoder_2"].encoder.block, placement)
    return Flux1(**parts, scheduler_config=tiny_models.FLUX1_SCHEDULER, cfg=model_config(), true_cfg_scale=2.0)


def flux2_model(*, windowed: bool) -> Model:
    parts = tiny_models.flux2_parts(num_text_layers=27)
    parts["text_encoder"] = parts["text_encoder"].model
    residency.housed(parts["text_encoder"], parts["text_encoder"].layers, dataclasses.replace(BF16, windowed=windowed))
    cfg = model_config(name="klein", family="flux2", guidance="none")
    return Flux2(**parts, scheduler_config=tiny_models.FLUX2_SCHEDULER, cfg=cfg)


@pytest.mark.parametrize("make", [flux1_model, flux2_model])
def test_a_streamed_text_encoder_gives_the_same_bits_again_and_again(make) -> None:
    resident, windowed = make(windowed=False), make(windowed=True)
    for prompts in (["a red cube", "seven words of a much longer prompt"], ["another", "pass"]):
        expected = resident.encode(resident.tokenize(prompts).tensors)
        found = windowed.encode(windowed.tokenize(prompts).tensors)
        assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_device_holds_two_layers_of_a_streamed_encoder_and_the_rest_of_it() -> None:
    encoder = tiny_models.qwen3(num_layers=27).model
    whole = sum(p.nbytes for p in encoder.parameters())
    layer = sum(p.nbytes for p in encoder.layers[0].parameters())
    residency.housed(encoder, encoder.layers, dataclasses.replace(BF16, windowed=True))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in encoder.parameters()}
    assert sum(storages.values()) <= whole - 25 * layer + 2 * 20 * residency.ALIGNMENT


def test_a_pass_that_broke_off_leaves_nothing_behind() -> None:
    encoder = tiny_models.t5().eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = encoder(ids)[0]
        residency.housed(encoder, encoder.encoder.block, dataclasses.replace(BF16, windowed=True))
        forward, encoder.encoder.block[1].forward = encoder.encoder.block[1].forward, None
        with pytest.raises(TypeError):
            encoder(ids)
        encoder.encoder.block[1].forward = forward
        assert torch.equal(encoder(ids)[0], expected)


@pytest.mark.parametrize("quantization", ["none", pytest.param("fp8", marks=pytest.mark.slow)])
def test_windowed_loads_to_the_host_what_leaves_it_later_and_draws_the_same_bytes(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, torch.device] = {}
    stored = loading.stored

    def spy(component: Any, folder: Path, **options: Any) -> Any:
        loaded[options["subfolder"]] = options["device"]
        return stored(component, folder, **options)

    monkeypatch.setattr(loading, "stored", spy)
    rows = [{"id": f"r{n}", "prompt": f"a {colour} circle"} for n, colour in enumerate(["red", "blue", "green"])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    data = {}
    for kind in ("resident", "windowed"):
        overrides = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/{kind}", "telemetry.progress=off",
                     "sampler.height=64", "sampler.width=64", "sampler.num_inference_steps=2",
                     f"model.residency={kind}", f"model.quantization={quantization}"]  # fmt: skip
        assert with_config(overrides, lambda cfg: run.run_job(cfg)[1]) == 0
        data[kind] = (tmp_path / kind / "data" / "shard-00000.parquet").read_bytes()
    assert data["resident"] == data["windowed"]
    assert loaded["text_encoder_2"] == CPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_streamed_embeddings_are_the_resident_ones_bit_for_bit(dtype: str) -> None:
    settings = {"dtype": dtype, "device": "cuda", "path": str(tiny.FOLDER), "max_sequence_length": 64}
    models = [load_model(model_config(**settings, residency=kind), true_cfg_scale=2.0)
              for kind in ("resident", "windowed")]  # fmt: skip
    for prompt in ("a red circle", "a blue square on the left"):
        resident, windowed = (
            model.encode({n: t.to(model.device) for n, t in model.tokenize([prompt] * 8).tensors.items()})
            for model in models
        )
        assert all(torch.equal(resident[name], windowed[name]) for name in resident)
