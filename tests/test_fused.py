"""The fused operations compute what diffusers' and transformers' modules compute, on a CPU and by their kernels."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from test_parity import (
    MIXED,
    assert_same_pictures,
    flux1,
    flux1_pipeline,
    flux2,
    flux2_pipeline,
    pixels,
    reference,
    request,
)
from tiny_models import flux1_parts, flux2_parts, model_config
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

from fluxbatch.errors import ConfigError
from fluxbatch.models import load_model, loading, tuning
from fluxbatch.models.fused import ops
from fluxbatch.models.fused.decoder import FusedDecoder, attend
from fluxbatch.models.fused.flux1 import FusedFlux1
from fluxbatch.models.fused.flux2 import FusedFlux2
from fluxbatch.models.fused.linear import Linear, int8_product
from fluxbatch.models.fused.ops import Activation, Layout, Modulation, Rows
from fluxbatch.models.fused.qwen3 import fuse_layers
from fluxbatch.models.precision import EXACT, PRECISIONS

GPU = pytest.mark.gpu
CUDA = torch.cuda.is_available()
EIGHT_BIT = [torch.float8_e4m3fn, torch.int8]
QUANTIZED = ["fp8", "int8", "fp8_weight_only", "int8_weight_only"]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def numbers(rows: Rows) -> Tensor:
    return rows.values.float() * (1 if rows.scales is None else rows.scales)


# --- whole pictures ---------------------------------------------------------------------------------------------------


def fused_flux1(parts: dict[str, Any], *, quantization: str = "none") -> Any:
    parts = {**parts, "transformer": deepcopy(parts["transformer"]), "vae": deepcopy(parts["vae"])}
    fused = FusedFlux1.take_over(
        parts["transformer"],
        precision=PRECISIONS[quantization],
        cudnn_attention=False,
        device=torch.device("cpu"),
    )
    return flux1({**parts, "fused": fused, "decoder": FusedDecoder.of(parts["vae"])})


def test_fused_flux1_draws_what_diffusers_draws() -> None:
    parts = flux1_parts()
    pipeline = flux1_pipeline(parts)
    assert_same_pictures(pixels(fused_flux1(parts), MIXED), [reference(pipeline, row) for row in MIXED])


def test_fused_flux1_without_guidance_embedding_draws_what_diffusers_draws() -> None:
    parts = flux1_parts(guidance_embeds=False)
    pipeline = flux1_pipeline(parts)
    assert_same_pictures(pixels(fused_flux1(parts), MIXED[:3]), [reference(pipeline, row) for row in MIXED[:3]])


@pytest.mark.parametrize("negative_pass", [False, True])
def test_fused_flux2_draws_what_diffusers_draws(negative_pass: bool) -> None:
    parts = flux2_parts()
    pipeline = flux2_pipeline(parts, is_distilled=not negative_pass)
    theirs = [reference(pipeline, row, text_encoder_out_layers=(9, 18, 27)) for row in MIXED[:3]]
    model = flux2(parts)
    transformer, vae = deepcopy(parts["transformer"]), deepcopy(parts["vae"])
    model._fused = FusedFlux2.take_over(transformer, precision=EXACT, cudnn_attention=False, device=torch.device("cpu"))
    model._decode = FusedDecoder.of(vae)
    rows = MIXED[1:3] if negative_pass else MIXED[:3]
    assert_same_pictures(pixels(model, rows, negative_pass=negative_pass), theirs[-len(rows) :])


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_eight_bits_draw_nearly_the_same_picture_and_another_one_than_without(quantization: str) -> None:
    parts = flux1_parts()
    exact, rounded = (pixels(fused_flux1(parts, quantization=how), MIXED[:2]) for how in ("none", quantization))
    for ours, theirs in zip(rounded, exact, strict=True):
        difference = abs(ours.astype(int) - theirs.astype(int))
        assert difference.max() > 0, "nothing was quantised"
        assert difference.mean() < 4


def test_the_embedded_model_runs_on_fused_operations_and_in_fp8() -> None:
    plain = load_model(model_config(kernels="diffusers", max_sequence_length=32), true_cfg_scale=2.0)
    fused = load_model(model_config(kernels="fused", max_sequence_length=32), true_cfg_scale=2.0)
    float8 = load_model(model_config(quantization="fp8", max_sequence_length=32), true_cfg_scale=2.0)
    prompts = ("a red circle on a blue background", "two yellow stars on a blue background", "a purple cat in a meadow")
    rows = [request(prompt, seed=number, guidance=3.5) for number, prompt in enumerate(prompts)]
    theirs = pixels(plain, rows)
    assert_same_pictures(pixels(fused, rows), theirs)
    assert all(abs(a.astype(int) - b.astype(int)).mean() < 6 for a, b in zip(pixels(float8, rows), theirs, strict=True))


# --- a row and its neighbours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["none", *QUANTIZED])
def test_a_row_keeps_its_bits_whatever_its_neighbours_and_its_slot(quantization: str) -> None:
    model = fused_flux1(flux1_parts(), quantization=quantization)
    rows = MIXED[:3]
    forth, back = pixels(model, rows), pixels(model, rows[::-1])[::-1]
    assert all((a == b).all() for a, b in zip(forth, back, strict=True))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("into", EIGHT_BIT)
def test_a_broken_row_stays_broken_and_does_not_reach_its_neighbours_through_scales(
    into: torch.dtype, broken: float
) -> None:
    values = torch.randn(4, 32)
    values[1, 7] = broken
    clean = ops.quantize_rows_plain(values[[0, 2, 3]], into)
    rows = ops.quantize_rows_plain(values, into)
    assert not numbers(rows)[1].isfinite().all()
    assert torch.equal(numbers(rows)[[0, 2, 3]], numbers(clean))


def test_fp8_rows_are_within_its_rounding_and_a_row_of_zeros_stays_zero() -> None:
    values = torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]
    values[5] = 0
    error = (numbers(ops.quantize_rows_plain(values, ops.FLOAT8)) - values).abs()
    assert (error <= values.abs() * 2**-4 + values.abs().amax(1, keepdim=True) * 2**-10).all()  # 3 bits of mantissa
    assert not numbers(ops.quantize_rows_plain(values, ops.FLOAT8))[5].any()


def test_an_fp8_product_is_within_the_rounding_of_its_factors() -> None:
    layer = torch.nn.Linear(256, 64)
    x = torch.randn(32, 256)
    exact = layer(x)
    quantised = Linear.packed(layer, precision=PRECISIONS["fp8"])(ops.quantize_rows_plain(x, ops.FLOAT8))
    assert relative_error(quantised, exact) < 0.06


# --- the parts --------------------------------------------------------------------------------------------------------


def qwen3() -> Qwen3Model:
    torch.manual_seed(0)
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    return Qwen3Model(Qwen3Config(vocab_size=99, hidden_size=48, intermediate_size=80, num_hidden_layers=3, **settings))


@pytest.mark.parametrize("padded", [False, True])
def test_fused_qwen3_layers_give_the_same_hidden_states(padded: bool) -> None:
    model = qwen3().eval()
    ids = torch.randint(0, 99, (3, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 5:] = mask[1, 9:] = 0
    states = lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states  # noqa: E731
    with torch.no_grad():
        theirs = states()
        fuse_layers(model)
        ours = states()
    assert len(ours) == len(theirs) == 4
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))


def test_both_streams_of_the_first_rows_see_their_own_modulation() -> None:
    layout = Layout(text_tokens=1, image_tokens=1, batch=2)
    x = torch.tensor([[1.0, -1.0]] * 4)
    shift = torch.arange(4.0).view(2, 2, 1).expand(2, 2, 2)
    rows = ops.residual_modulate(x, None, None, Modulation(shift, torch.zeros(2, 2, 2), into=None), layout, eps=0.0)
    assert rows.values.tolist() == [[1.0, -1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 2.0]]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kernels": "fused", "compile": "regional"}, "model.compile must be off with model.kernels=fused"),
        ({"quantization": "fp8", "kernels": "diffusers"}, "model.quantization=fp8 needs model.kernels=auto or fused"),
        ({"quantization": "fp8", "compile": "regional"}, "model.quantization=fp8 needs"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_weights_load(
    settings: dict[str, str], sentence: str
) -> None:
    cfg = model_config(**settings)
    with pytest.raises(ConfigError, match=sentence):
        tuning.use_fused(cfg, loading.place(cfg))


def test_a_cpu_draws_by_diffusers_modules_unless_asked_otherwise() -> None:
    for kernels, expected in (("auto", False), ("diffusers", False), ("fused", True)):
        cfg = model_config(kernels=kernels)
        assert tuning.use_fused(cfg, loading.place(cfg)) is expected


# --- kernels against plain torch --------------------------------------------------------------------------------------


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a function in plain torch and by its kernels, on the same CUDA tensors."""

    def run(function: Any) -> tuple[Any, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_by_kernel", lambda tensor: False)
            plain = function()
        return plain, function()

    return run


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


LAYOUT = Layout(text_tokens=5, image_tokens=12, batch=3)
DTYPES = [torch.bfloat16, torch.float16]


@GPU
@pytest.mark.parametrize("into", [None, *EIGHT_BIT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3072, 4096, 72])
def test_kernel_residual_modulate(both: Any, width: int, dtype: torch.dtype, into: torch.dtype | None) -> None:
    x, y, mods = random(51, width, dtype=dtype), random(51, width, dtype=dtype), random(2, 3, 6, width, dtype=dtype)
    modulation = Modulation(mods[:, :, 0], mods[:, :, 1], into)
    for update in (y, None):
        plain, ours = both(lambda y=update: (z := x.clone(), ops.residual_modulate(
            z, y, mods[:, :, 2], modulation, LAYOUT, eps=1e-6)))  # fmt: skip
        assert relative_error(ours[0], plain[0]) < 1e-3
        assert relative_error(numbers(ours[1]), numbers(plain[1])) < 2e-3


@GPU
@pytest.mark.parametrize("num_heads", [24, 5])
def test_kernel_rotate_heads(both: Any, num_heads: int) -> None:
    qkv, norms, angles = random(51, 3 * num_heads * 128 + 40), random(2, 2, 128), random(17, 64, dtype=torch.float32)

    def rotated() -> Tensor:
        z = qkv.clone()
        ops.rotate_heads(z, norms, (angles.cos(), angles.sin()), LAYOUT, num_heads=num_heads, eps=1e-6)
        return z

    plain, ours = both(rotated)
    assert relative_error(ours, plain) < 1e-3
    assert torch.equal(ours[:, 2 * num_heads * 128 :], qkv[:, 2 * num_heads * 128 :]), "values stay"


@GPU
@pytest.mark.parametrize("into", [None, *EIGHT_BIT])
@pytest.mark.parametrize("kind", list(Activation))
def test_kernel_activate(both: Any, kind: Activation, into: torch.dtype | None) -> None:
    attention, wide = random(51, 384), random(51, 3 * 384 + 2 * 1152)
    mlp = {Activation.NONE: None, Activation.GELU: wide[:, 1152:2304], Activation.SWIGLU: wide[:, 1152:]}[kind]
    plain, ours = both(lambda: ops.activate(attention, mlp, kind, into=into))
    assert ours.values.shape == plain.values.shape
    assert relative_error(numbers(ours), numbers(plain)) < 2e-3


@GPU
@pytest.mark.parametrize("rows", [3, 17, 4608])
@pytest.mark.parametrize("biased", [False, True])
def test_kernel_of_int8_products_is_exact_in_whole_numbers(both: Any, rows: int, biased: bool) -> None:
    layer = torch.nn.Linear(384, 1152, bias=biased, device="cuda", dtype=torch.bfloat16)
    packed, x = Linear.packed(layer, precision=PRECISIONS["int8"]), random(rows, 384)
    eight = ops.quantize_rows_plain(x.float(), torch.int8)
    wanted = eight.values.double() @ packed.weight.double().t()
    assert torch.equal(int8_product(eight.values, packed.weight).double(), wanted)
    plain, ours = both(lambda: packed(eight))
    assert relative_error(ours, plain) < 2e-3


@GPU
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("into", EIGHT_BIT)
def test_kernels_keep_a_broken_row_broken(both: Any, into: torch.dtype, broken: float) -> None:
    attention = random(6, 384)
    attention[2, 7] = broken
    for rows in both(lambda: ops.activate(attention, None, Activation.NONE, into=into)):
        finite = numbers(rows).isfinite().all(dim=1)
        assert finite.tolist() == [True, True, False, True, True, True]


@GPU
@pytest.mark.parametrize("channels", [128, 256, 512])
def test_kernel_group_norm_with_and_without_bias_and_residual(both: Any, channels: int) -> None:
    image = lambda: random(2, channels, 33, 21).contiguous(memory_format=torch.channels_last)  # noqa: E731
    x, other, vectors = image() * 2 + 1, image(), random(3, channels)
    for residual in (None, other):
        for bias in (None, vectors[2]):
            plain, ours = both(lambda r=residual, b=bias: ops.group_norm(
                ops.group_sums(x, bias=b, residual=r, groups=32), *vectors[:2], groups=32, eps=1e-6, silu=True
            ))  # fmt: skip
            assert relative_error(ours, plain) < 5e-3
    up_plain, up = both(lambda: ops.upsample_twice(x))
    assert torch.equal(up, up_plain)


@GPU
def test_kernels_of_the_text_encoder_and_of_wide_attention(both: Any) -> None:
    x, y, weight = random(4, 7, 2560), random(4, 7, 2560), random(2560)
    plain, ours = both(lambda: ops.residual_rms(x, y, weight, eps=1e-6))
    assert all(relative_error(a, b) < 4e-3 for a, b in zip(ours, plain, strict=True))
    heads, norm, angles = random(2, 7, 8, 128), random(128), random(7, 64)
    table = torch.cat([angles, angles], dim=-1)
    plain, ours = both(lambda: (z := heads.clone(), ops.rotate_halves(z, norm, table.cos(), table.sin(), eps=1e-6)))
    assert relative_error(ours[0], plain[0]) < 4e-3
    plain, ours = both(lambda: ops.swiglu(x, y))
    assert relative_error(ours, plain) < 4e-3
    query, key, value = (random(2, 900, 512) for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert relative_error(attend(query, key, value), theirs) < 8e-3


@GPU
@pytest.mark.parametrize("quantization", ["none", *QUANTIZED])
def test_on_a_gpu_a_row_keeps_its_bits_and_half_precision_its_error(quantization: str) -> None:
    from fluxbatch.models.flux1 import RANDOM, FluxTransformer2DModel

    torch.manual_seed(0)
    settings = {**RANDOM["flux1_dev"]["transformer"], "num_layers": 2, "num_single_layers": 3}
    exact = FluxTransformer2DModel(**settings).eval().cuda()
    module = deepcopy(exact).bfloat16()
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(32.0), torch.arange(32.0)).cuda()
    inputs: dict[str, Any] = {"prompt_embeds": random(2, 512, 4096), "pooled": random(2, 768)}
    latents, guidance = random(2, 1024, 64), torch.tensor([3.5, 1.0], device="cuda")
    given = {"txt_ids": torch.zeros(512, 3, device="cuda"), "img_ids": places, "guidance": guidance}

    def theirs(model: Any, dtype: torch.dtype) -> Tensor:
        return model(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            pooled_projections=inputs["pooled"].to(dtype),
            timestep=torch.full((2,), 0.5, device="cuda", dtype=dtype),
            return_dict=False,
            **given,
        )[0]

    with torch.no_grad():
        reference_out, half_out = theirs(exact, torch.float32), theirs(module, torch.bfloat16)
        how = PRECISIONS[quantization]
        fused = FusedFlux1.take_over(module, precision=how, cudnn_attention=True, device=torch.device("cuda"))

        def ours(order: Tensor) -> Tensor:
            conditions = fused.conditions(
                **{name: tensor[order] for name, tensor in inputs.items()},
                guidance=guidance[order],
                timesteps=torch.tensor([500.0], device="cuda"),
                text_ids=given["txt_ids"],
                image_ids=places,
            )
            return fused.transformer.velocity(latents[order], 0, conditions)

        forth, back = ours(torch.tensor([0, 1])), ours(torch.tensor([1, 0]))
    assert torch.equal(forth, back.flip(0))
    own_error = relative_error(half_out, reference_out)
    assert relative_error(forth, reference_out) < (1.2 * own_error if quantization == "none" else own_error + 0.05)
