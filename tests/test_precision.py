"""Precisions of the blocks: against plain references, in diffusers' modules, straight from files; what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import bfl, nvfp4, nvfp4_values, quantised, write
from test_checkpoints import ROWS, is_block, settings, state
from test_fused import relative_error
from test_parity import MIXED, pixels
from tiny_models import model_config
from torch import Tensor, nn

from fluxbatch.config import QUANTIZATIONS, ModelConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models import check_model, load_model, loading, residency, tuning
from fluxbatch.models import precision as precisions
from fluxbatch.models.eight_bit import EightBitLinear, dequantized
from fluxbatch.models.fused import ops
from fluxbatch.models.fused.linear import Linear, int8_product
from fluxbatch.models.fused.ops import Rows
from fluxbatch.models.precision import PRECISIONS, Machine

WEIGHT_ONLY = ["fp8_weight_only", "int8_weight_only"]


def layer(columns: int = 384, rows: int = 96, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias).requires_grad_(False)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_int8_products_are_those_of_whole_numbers(rows: int) -> None:
    x = torch.randint(-127, 128, (rows, 15360), dtype=torch.int8)  # FLUX.1's widest: float32 would round
    weight = torch.randint(-127, 128, (40, 15360), dtype=torch.int8)
    assert torch.equal(int8_product(x, weight).long(), x.long() @ weight.long().t())


@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_layer_is_its_scaled_whole_numbers_rounded_once(bias: bool) -> None:
    plain, x = layer(bias=bias).bfloat16(), torch.randn(20, 384)
    weight = ops.quantize_rows_plain(plain.weight.float(), torch.int8)
    rows = ops.quantize_rows_plain(x, torch.int8)
    assert weight.scales is not None and rows.scales is not None
    exact = (rows.values.double() @ weight.values.double().t()).float() * rows.scales * weight.scales.t()
    wanted = (exact if plain.bias is None else exact + plain.bias.float()).bfloat16()
    assert torch.equal(Linear.packed(plain, precision=PRECISIONS["int8"])(rows), wanted)


def test_int8_rows_are_within_half_a_step() -> None:
    values = torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]
    values[5] = 0
    rows = ops.quantize_rows_plain(values, torch.int8)
    assert rows.scales is not None
    assert ((rows.values * rows.scales - values).abs() <= 0.501 * rows.scales).all()
    assert rows.values.abs().amax(1).tolist() == [127] * 5 + [0] + [127] * 58


@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_only_layers_are_products_with_the_dequantised_weight(quantization: str, dtype: torch.dtype) -> None:
    """Both of our layers, with equal bits; the weight itself is rounded once."""
    held = PRECISIONS[quantization].weights
    assert held is not None
    plain, x = layer().to(dtype), torch.randn(20, 384).to(dtype)
    eight_bit = EightBitLinear.of(plain, held)
    weight = (eight_bit.weight.float() * eight_bit.scales).to(dtype)
    assert torch.equal(dequantized(eight_bit.weight, eight_bit.scales, dtype), weight)
    wanted = nn.functional.linear(x, weight, plain.bias)
    assert torch.equal(eight_bit(x), wanted)
    exact = plain(x)
    packed = Linear.packed(plain, precision=PRECISIONS[quantization])
    assert packed.weight.element_size() == 1
    assert torch.equal(packed(Rows(x)), wanted)
    assert 0 < relative_error(wanted, exact) < (0.04 if held is torch.float8_e4m3fn else 0.02)


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["fused", "diffusers"])
@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_weight_only_models_draw_nearly_the_same_picture(
    family: str, quantization: str, kernels: str, request: Any
) -> None:
    base = str(request.getfixturevalue(f"{family}_base"))
    exact, rounded = (
        load_model(settings(family, None, path=base, kernels=kernels, quantization=how), true_cfg_scale=2.0)
        for how in ("none", quantization)
    )
    for ours, theirs in zip(pixels(rounded, ROWS), pixels(exact, ROWS), strict=True):
        difference = abs(ours.astype(int) - theirs.astype(int))
        assert 0 < difference.mean() < 12, "or nothing was quantised"
        assert difference.max() < 255


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_weight_only_takes_the_blocks_matrices_and_nothing_else(family: str, request: Any) -> None:
    """In diffusers' modules: what the fused path packs, and what the memory forecast counts."""
    base = str(request.getfixturevalue(f"{family}_base"))
    cfg = settings(family, None, path=base, kernels="diffusers", quantization="int8_weight_only")
    transformer = load_model(cfg, true_cfg_scale=2.0)._transformer  # type: ignore[attr-defined]
    held = {name for name, module in transformer.named_modules() if isinstance(module, EightBitLinear)}
    plain = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    assert len(held) == {"flux1": 12 + 5, "flux2": 12 + 2}[family]
    assert all("norm" in name or "transformer_blocks" not in name for name in plain)
    shapes = residency._stored_shapes(cfg)["transformer"]
    counted = {
        name.removesuffix(".weight") for name, shape in shapes.items() if precisions.is_block_matrix(name, shape)
    }
    assert counted == held


@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name not in ("none", "nvfp4")])
def test_a_file_in_four_bits_goes_straight_to_the_wanted_eight(
    quantization: str, flux2_base: Path, tmp_path: Path
) -> None:
    """Out of float32, not out of bfloat16 numbers; and the whole never stands in bfloat16."""
    stored, meant = quantised(bfl(state(flux2_base), family="flux2"), is_block, nvfp4, nvfp4_values)
    path = write(tmp_path / "model.safetensors", stored)
    cfg = settings("flux2", flux2_base, path=str(path), dtype="bfloat16", quantization=quantization)
    check_model(cfg)
    blocks = load_model(cfg, true_cfg_scale=2.0)
    packed = _single_inner(blocks)
    held = PRECISIONS[quantization].weights
    assert held is not None
    wanted = ops.quantize_rows_plain(meant["single_blocks.0.linear1.weight"].float(), held)
    assert wanted.scales is not None
    assert torch.equal(packed[0].float(), wanted.values.float())
    assert torch.equal(packed[1].flatten(), wanted.scales.flatten())


def _single_inner(model: Any) -> tuple[Tensor, Tensor]:
    if model._fused is None:
        held = model._transformer.single_transformer_blocks[0].attn.to_qkv_mlp_proj
        return held.weight, held.scales
    inner = model._fused.transformer.blocks.singles[0].inner
    return inner.weight, inner.scales


def test_a_row_keeps_its_bits_in_weight_only_modules_whatever_its_neighbours() -> None:
    cfg = model_config(kernels="diffusers", quantization="int8_weight_only", max_sequence_length=64)
    model, rows = load_model(cfg, true_cfg_scale=2.0), MIXED[:3]
    forth, back = pixels(model, rows), pixels(model, rows[::-1])[::-1]
    assert all((a == b).all() for a, b in zip(forth, back, strict=True))


def test_a_weight_only_layer_compiles_as_one_graph() -> None:
    eight_bit, x = EightBitLinear.of(layer(), torch.int8), torch.randn(4, 384)
    compiled = torch.compile(eight_bit, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), eight_bit(x))


# --- what a device can do ---------------------------------------------------------------------------------------------

TURING, AMPERE, ADA = Machine("T4", (7, 5)), Machine("A100", (8, 0)), Machine("L40S", (8, 9))
HOPPER, BLACKWELL, CPU = Machine("H200", (9, 0)), Machine("B200", (10, 0)), Machine("a CPU", None)


@pytest.mark.parametrize(
    ("machine", "able"),
    [
        (TURING, {"none", *WEIGHT_ONLY}),
        (AMPERE, {"none", "int8", *WEIGHT_ONLY}),
        (ADA, {"none", "fp8", "int8", *WEIGHT_ONLY}),
        (HOPPER, {"none", "fp8", "int8", *WEIGHT_ONLY}),
        (BLACKWELL, set(QUANTIZATIONS)),
        (CPU, set(QUANTIZATIONS) - {"nvfp4"}),
    ],
)
def test_each_architecture_runs_what_it_can_and_is_named_in_refusing_the_rest(machine: Machine, able: set[str]) -> None:
    for quantization in QUANTIZATIONS:
        cfg = model_config(quantization=quantization, dtype="bfloat16")
        placement = loading.place(cfg)
        if quantization in able:
            if quantization != "nvfp4":  # it asks for torchao too
                precisions.check(cfg, placement, machine)
            continue
        with pytest.raises(ConfigError, match=f"on {machine.name}, got {quantization}: ") as refused:
            precisions.check(cfg, placement, machine)
        assert str(refused.value).startswith("model.quantization must be one of none, ")
        assert "\n" not in str(refused.value)


def test_nvfp4_elsewhere_says_what_becomes_of_nvfp4_files() -> None:
    with pytest.raises(ConfigError, match=r"Blackwell; NVFP4 files are unpacked to model.dtype or to fp8"):
        check_model(model_config(quantization="nvfp4"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kernels": "fused"}, "model.kernels must be auto or diffusers with model.quantization=nvfp4, got fused"),
        ({"dtype": "float32"}, "model.dtype must be bfloat16 with model.quantization=nvfp4, got float32"),
        ({}, "model.quantization=nvfp4 needs the package torchao: pip install 'fluxbatch\\[nvfp4\\]'"),
    ],
)
def test_nvfp4_on_blackwell_is_refused_where_it_cannot_work(
    changes: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisions.importlib.util, "find_spec", lambda name: None)
    cfg = model_config(**{"quantization": "nvfp4", "dtype": "bfloat16", **changes})
    with pytest.raises(ConfigError, match=sentence):
        precisions.check(cfg, loading.place(cfg), BLACKWELL)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("changes", [{"kernels": "diffusers"}, {"compile": "regional"}])
def test_products_in_eight_bits_are_refused_in_diffusers_modules(quantization: str, changes: dict[str, str]) -> None:
    cfg = model_config(quantization=quantization, **changes)
    with pytest.raises(ConfigError, match=f"model.quantization={quantization} needs model.kernels=auto or fused"):
        check_model(cfg)


def test_compiled_fp8_weights_are_refused_where_triton_cannot_read_them() -> None:
    cfg = model_config(quantization="fp8_weight_only", compile="regional", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"model\.compile must be off .* on A100, got regional: .* int8_weight_only"):
        precisions.check(cfg, loading.place(cfg), AMPERE)
    for machine in (ADA, HOPPER, CPU):
        precisions.check(cfg, loading.place(cfg), machine)


def test_weight_only_runs_on_diffusers_modules_where_nothing_else_is_asked_for() -> None:
    for quantization in WEIGHT_ONLY:
        cfg = model_config(quantization=quantization)
        assert tuning.use_fused(cfg, loading.place(cfg)) is False


@pytest.mark.parametrize(("quantization", "gib"), [("int8", 14.15), ("int8_weight_only", 14.15), ("nvfp4", 10.6)])
def test_the_forecast_of_memory_counts_what_is_held(quantization: str, gib: float) -> None:
    from fluxbatch.models.flux1 import _random

    cfg = ModelConfig(name="flux1_dev", family="flux1", guidance="embedded", random_weights=True)
    cfg.quantization = quantization
    placement = loading.place(model_config(dtype="bfloat16"))
    shapes = residency._random_shapes(cfg, placement, _random)
    needs = residency.footprint(shapes, cfg=cfg, placement=placement, text_encoder="text_encoder_2")
    assert needs.components["transformer"] == pytest.approx(gib, abs=0.1)
