"""Nunchaku's files: unpacked number by number, folded to ordinary weights, drawn on any device."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    Tensors,
    nunchaku,
    pack_awq,
    pack_codes,
    pack_low_rank,
    pack_micro_scales,
    pack_scales,
    svdquant,
    write,
)
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from test_checkpoint_refusals import refusal
from test_checkpoints import ROWS, settings
from test_dequantised_bits import e4m3, scrambled
from test_parity import distance, pixels
from tiny_models import loud
from torch import Tensor

from fluxbatch.models import load_model
from fluxbatch.models.checkpoints import svdquant as ours
from fluxbatch.models.checkpoints.recognise import recognise

SIZES = [(128, 128), (256, 512), pytest.param((4096, 4096), marks=pytest.mark.slow)]
# Of the bytes into which deepcompressor (commit 69f3473) packed the same numbers.
PACKED_DIGESTS = {
    ("codes", (128, 128)): "32bf1fb2c5305892",
    ("codes", (256, 512)): "6f95448a857c72bb",
    ("codes", (4096, 4096)): "28eab45648cbed17",
    ("awq", (128, 128)): "e32973bac8eef43d",
    ("awq", (256, 512)): "5ad2fb46e7ebc5df",
    ("awq", (4096, 4096)): "8b6834eec3cccd48",
    ("scales", (128, 128)): "efa6df0b81c6acd6",
    ("scales", (256, 512)): "3dc521566f306a72",
    ("scales", (4096, 4096)): "d2cbc94f7d9092bd",
    ("vector", (128, 128)): "bb1da78f6ef40711",
    ("vector", (256, 512)): "775a3af56baf7342",
    ("vector", (4096, 4096)): "eb7003fc5b2a59b3",
    ("micro scales", (128, 128)): "e210316a9e21c791",
    ("micro scales", (256, 512)): "efa1b3ed47a80c31",
    ("micro scales", (4096, 4096)): "fa8e7408ca37cec5",
    ("down", (128, 128)): "c51f16fd7fb8e851",
    ("down", (256, 512)): "58ad52fdcf53d772",
    ("down", (4096, 4096)): "4bf6cc73ff84d1f0",
    ("up", (128, 128)): "891e5e82beb5e953",
    ("up", (256, 512)): "d72738dc30d88904",
    ("up", (4096, 4096)): "eb2946f51829d158",
}


def numbers(kind: str, size: tuple[int, int]) -> Tensor:
    rows, columns = size
    if kind in ("codes", "awq"):
        return (scrambled(rows * columns, salt=1) % 16).view(size).int()
    if kind == "micro scales":
        return e4m3(rows, columns // 16, salt=2)
    shape = {"scales": (rows, columns // 64), "vector": (rows, 1), "down": (32, columns), "up": (rows, 32)}[kind]
    return scrambled(torch.Size(shape).numel(), salt=3).view(shape).bfloat16()


PACK = {
    "codes": pack_codes,
    "awq": pack_awq,
    "scales": pack_scales,
    "vector": pack_scales,
    "micro scales": pack_micro_scales,
    "down": lambda factor: pack_low_rank(factor, down=True),
    "up": lambda factor: pack_low_rank(factor, down=False),
}


def unpacked(kind: str, packed: Tensor, rows: int) -> Tensor:
    if kind == "codes":
        return ours.unpack_codes(packed)
    if kind == "awq":
        return ours.unpack_awq_codes(packed)
    if kind == "scales":
        return ours.unpack_scales(packed, rows=rows)
    if kind == "micro scales":
        return ours.unpack_micro_scales(packed, rows=rows)
    if kind == "vector":
        return ours.unpack_vector(packed.flatten())[:, None]
    return ours.unpack_low_rank(packed, down=kind == "down")


def digest(packed: Tensor) -> str:
    return hashlib.sha256(packed.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", SIZES)
def test_what_deepcompressor_packs_is_unpacked(kind: str, size: tuple[int, int]) -> None:
    values = numbers(kind, size)
    packed = PACK[kind](values)
    assert digest(packed) == PACKED_DIGESTS[kind, size]
    assert torch.equal(unpacked(kind, packed, size[0]).float(), values.float())


@pytest.mark.parametrize("fp4", [False, True], ids=["int4", "fp4"])
@pytest.mark.parametrize("after_gelu", [False, True])
@pytest.mark.parametrize("size", [(128, 128), (100, 80), (384, 1024)])
def test_a_folded_layer_computes_what_the_engine_computes(size: tuple[int, int], after_gelu: bool, fp4: bool) -> None:
    """`(x / smooth) @ (q * scales).T + x @ down @ up.T + bias`, after a GELU with x + 0.171875 in the first product."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(size, generator=generator), torch.randn(size[0], generator=generator)
    stored, meant, meant_bias = svdquant(weight, bias, fp4=fp4, after_gelu=after_gelu, seed=3)
    layer = ours.SvdQuant(stored, columns=size[1], after_gelu=after_gelu)
    assert layer.bias is not None
    torch.testing.assert_close(layer.rows(0, size[0]).double(), meant, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.bias[: size[0]].double(), meant_bias, rtol=1e-4, atol=1e-4)
    assert (meant - weight).norm() / weight.norm() < 0.15, "four bits"
    assert (meant_bias - bias).norm() / bias.norm() < 0.02, "the shift is taken out again"


# --- whole files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(flux1_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.1 of width 64, as narrow as AWQ's groups allow."""
    folder = Path(shutil.copytree(flux1_base, tmp_path_factory.mktemp("wide") / "base"))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    torch.manual_seed(3)
    transformer = FluxTransformer2DModel.from_config({**config, "num_attention_heads": 4})
    loud(transformer, gain=2.0).save_pretrained(folder / "transformer")
    return folder


def state(base: Path) -> Tensors:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("fp4", [False, True], ids=["int4", "fp4"])
def test_a_nunchaku_file_draws_what_its_numbers_mean(fp4: bool, base: Path, tmp_path: Path) -> None:
    stored, meant = nunchaku(state(base), fp4=fp4)
    path = write(tmp_path / "svdq.safetensors", stored)
    plain = write(tmp_path / "plain.safetensors", meant)
    assert str(recognise(path)).startswith("FLUX.1 under Nunchaku's names, layers: ")
    drawn, wanted = (load_model(settings("flux1", base, path=str(file)), true_cfg_scale=2.0) for file in (path, plain))
    want = dict(wanted._transformer.named_parameters())
    for name, parameter in drawn._transformer.named_parameters():
        torch.testing.assert_close(parameter, want[name], rtol=1e-4, atol=1e-4, msg=name)
    pairs = list(zip(pixels(drawn, ROWS), pixels(wanted, ROWS), strict=True))
    assert [distance(a, b) for a, b in pairs] == pytest.approx([0, 0], abs=1)
    assert all(image.std() > 10 for _, image in pairs), "a flat picture proves nothing"


def test_a_nunchaku_file_is_near_its_model(base: Path) -> None:
    """The writer's own proof: it quantised these weights, and not others."""
    original = state(base)
    for fp4 in (False, True):
        _, meant = nunchaku(original, fp4=fp4)
        worst = max(float((meant[key] - original[key]).norm() / original[key].norm()) for key in original)
        assert 0.02 < worst < 0.3


def test_svdquant_of_other_sizes_is_refused(base: Path, tmp_path: Path) -> None:
    stored, _ = nunchaku(state(base), fp4=False)
    file = tmp_path / "svdq.safetensors"
    less = stored | {"transformer_blocks.0.qkv_proj.wscales": torch.zeros(1, 256, dtype=torch.bfloat16)}
    sentence = refusal(write(file, less), base)
    assert sentence.startswith(f"model.path must have weights of a known layout, got {file}: transformer_blocks.0.qkv")
    split = {key.replace("qkv_proj.", "attn.to_q."): tensor for key, tensor in stored.items()}
    assert "which lacks 2 of its layers, among them transformer_blocks.0.qkv_proj" in refusal(write(file, split), base)
