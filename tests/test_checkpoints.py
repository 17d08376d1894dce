"""A transformer in one file: recognised from its header, dequantised bit for bit, drawn like the same weights plain."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    Tensors,
    bfl,
    comfy_metadata,
    fp8,
    fp8_values,
    nvfp4,
    nvfp4_values,
    quantised,
    write,
)
from diffusers import Flux2Transformer2DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file
from test_parity import pixels
from test_parity import request as row
from tiny_models import loud, model_config

from fluxbatch import tiny
from fluxbatch.config import ModelConfig
from fluxbatch.models import check_model, load_model, residency
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.checkpoints.names import groups
from fluxbatch.models.checkpoints.nvfp4 import Order
from fluxbatch.models.checkpoints.recognise import recognise
from fluxbatch.models.lora import Loras

ROWS = [row("a red circle", seed=1), row("two blue squares", seed=2)]
BLOCKS = ("double_blocks", "single_blocks")


def is_block(key: str) -> bool:
    return key.startswith(BLOCKS) and "_mod" not in key and "modulation" not in key


def settings(family: str, base: Path | None, **changes: Any) -> ModelConfig:
    known = {
        "flux1": {"family": "flux1", "name": "flux1_dev", "guidance": "embedded"},
        "flux2": {"family": "flux2", "name": "flux2_klein_4b", "guidance": "none"},
    }
    return model_config(**{**known[family], "base": base and str(base), **changes})


def state(base: Path) -> Tensors:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


def assert_file_draws_what_its_numbers_mean(
    path: Path, *, meant: Tensors, base: Path, family: str, dtype: str = "float32"
) -> None:
    """Against a file of plain numbers, whose own names are compared with diffusers' converter."""
    cfg = settings(family, base, path=str(path), dtype=dtype)
    check_model(cfg)
    ours = load_model(cfg, true_cfg_scale=2.0)
    plain = path.with_name("plain.safetensors")
    write(plain, meant)
    theirs = load_model(settings(family, base, path=str(plain), dtype=dtype), true_cfg_scale=2.0)
    want = dict(theirs._transformer.named_parameters())
    for name, parameter in ours._transformer.named_parameters():
        assert torch.equal(parameter, want[name]), name
    drawn, wanted = pixels(ours, ROWS), pixels(theirs, ROWS)
    assert all((a == b).all() for a, b in zip(drawn, wanted, strict=True))
    assert all(image.std() > 10 for image in wanted), "a flat picture proves nothing"


# --- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_a_bfl_file_draws_what_the_folder_draws(family: str, dtype: str, request: Any, tmp_path: Path) -> None:
    base = request.getfixturevalue(f"{family}_base")
    path = write(tmp_path / "model.safetensors", bfl(state(base), family=family))
    ours = load_model(settings(family, base, path=str(path), dtype=dtype), true_cfg_scale=2.0)
    folder = load_model(settings(family, None, path=str(base), dtype=dtype), true_cfg_scale=2.0)
    want = dict(folder._transformer.named_parameters())
    assert want.keys() == dict(ours._transformer.named_parameters()).keys()
    for name, parameter in ours._transformer.named_parameters():
        assert torch.equal(parameter, want[name]), name
    assert all((a == b).all() for a, b in zip(pixels(ours, ROWS), pixels(folder, ROWS), strict=True))


@pytest.mark.parametrize("labels", ["metadata", "tensors", "none"])
def test_a_comfy_nvfp4_file_of_flux2_draws_what_its_numbers_mean(
    labels: str, flux2_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fluxbatch")
    plain = bfl(state(flux2_base), family="flux2")
    kept = "double_blocks.0.txt_attn.qkv"  # as in klein-9b-nvfp4, whose two are not known
    stored, meant = quantised(plain, lambda key: is_block(key) and kept not in key, nvfp4, nvfp4_values)
    metadata = comfy_metadata(stored) if labels == "metadata" else None
    if labels == "tensors":
        label = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
        marked = [key.removesuffix("weight_scale_2") for key in stored if key.endswith("weight_scale_2")]
        stored |= {f"{key}comfy_quant": label.clone() for key in marked}
    path = write(tmp_path / "model.safetensors", stored, metadata)
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux2_base, family="flux2")
    told = "FLUX.2 under Black Forest Labs' names, layers: 16 plain, 9 NVFP4 (high nibble first, swizzled scales)"
    assert f"model.path={path}: {told}" in caplog.messages


@pytest.mark.parametrize("labeled", [False, True])
def test_what_pads_sizes_to_16_is_cut_off(labeled: bool, flux2_base: Path, tmp_path: Path) -> None:
    """A width of 24: QKV of 72 rows and 24 columns stored as 80 and 32."""
    base = Path(shutil.copytree(flux2_base, tmp_path / "base"))
    config = json.loads((base / "transformer" / "config.json").read_text())
    narrow = {"num_attention_heads": 3, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 2, 2]}
    torch.manual_seed(4)
    transformer = Flux2Transformer2DModel.from_config({**config, **narrow})
    loud(transformer, gain=2.0).save_pretrained(base / "transformer")
    stored, meant = quantised(bfl(state(base), family="flux2"), is_block, nvfp4, nvfp4_values)
    assert stored["double_blocks.0.img_attn.qkv.weight"].shape == (80, 16)
    path = write(tmp_path / "model.safetensors", stored, comfy_metadata(stored) if labeled else None)
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=base, family="flux2")


def test_a_modelopt_nvfp4_file_with_split_qkv_draws_what_its_numbers_mean(flux2_base: Path, tmp_path: Path) -> None:
    """Diffusers' names, low nibble first, linear scales."""

    def spell(weight: torch.Tensor) -> Tensors:
        return nvfp4(weight, high_nibble_first=False, swizzled=False)

    def mean(words: Tensors) -> torch.Tensor:
        return nvfp4_values(words, high_nibble_first=False, swizzled=False)

    def in_blocks(key: str) -> bool:
        return "transformer_blocks" in key

    stored, meant = quantised(state(flux2_base), in_blocks, spell, mean)
    path = write(tmp_path / "model.safetensors", stored, {"quantization": "ModelOpt 0.47"})
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux2_base, family="flux2")


@pytest.mark.parametrize("words", ["q_proj k_proj v_proj", "to_q to_k to_v", "q k v"])
def test_split_qkv_under_bfl_names_is_read_too(words: str, flux2_base: Path, tmp_path: Path) -> None:
    plain = bfl(state(flux2_base), family="flux2")
    split = {key: tensor for key, tensor in plain.items() if ".qkv." not in key}
    for key, tensor in plain.items():
        if ".qkv." in key:
            for word, part in zip(words.split(), tensor.chunk(3), strict=True):
                split[key.replace("qkv", word)] = part.clone()
    stored, meant = quantised(split, is_block, fp8, fp8_values)
    path = write(tmp_path / "model.safetensors", stored)
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux2_base, family="flux2")


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_an_fp8_file_draws_what_its_numbers_mean(family: str, per_row: bool, request: Any, tmp_path: Path) -> None:
    base = request.getfixturevalue(f"{family}_base")
    plain = bfl(state(base), family=family)
    stored, meant = quantised(plain, is_block, lambda weight: fp8(weight, per_row=per_row), fp8_values)
    path = write(tmp_path / "model.safetensors", stored, comfy_metadata(stored))
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=base, family=family)


def test_a_legacy_scaled_fp8_file_draws_what_its_numbers_mean(flux1_base: Path, tmp_path: Path) -> None:
    plain = bfl(state(flux1_base), family="flux1")
    stored, meant = quantised(plain, is_block, lambda weight: fp8(weight, legacy=True), fp8_values)
    path = write(tmp_path / "model.safetensors", stored | {"scaled_fp8": torch.zeros(2)})
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux1_base, family="flux1")


def test_comfys_file_for_everything_in_bare_fp8_draws_what_its_numbers_mean(flux1_base: Path, tmp_path: Path) -> None:
    """Prefixed, biases and norms in E4M3 too, no scales, text encoders and VAE beside it."""
    cast = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in bfl(state(flux1_base), family="flux1").items()}
    stored = {f"model.diffusion_model.{key}": tensor for key, tensor in cast.items()}
    others = {"vae.decoder.conv_in.weight": torch.zeros(3), "text_encoders.clip_l.logit_scale": torch.zeros(())}
    path = write(tmp_path / "model.safetensors", stored | others)
    meant = {key: tensor.float() for key, tensor in cast.items()}
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux1_base, family="flux1", dtype="bfloat16")


def test_a_mixed_file_without_input_scales_draws_what_its_numbers_mean(flux1_base: Path, tmp_path: Path) -> None:
    """As flux1-dev-nvfp4: MLPs in NVFP4, QKV in FP8; as flux2-dev-nvfp4-mixed: some layers without `input_scale`."""
    plain = bfl(state(flux1_base), family="flux1")
    stored, meant = quantised(plain, lambda key: "mlp" in key or "linear" in key[-15:], nvfp4, nvfp4_values)
    more, meant_more = quantised(plain, lambda key: "qkv" in key or "_mod" in key, fp8, fp8_values)
    fp8_layers = [key.removesuffix("weight") for key in plain if ".qkv.weight" in key or "_mod.lin.weight" in key]
    for layer in fp8_layers:
        del stored[f"{layer}weight"]
        stored |= {key: tensor for key, tensor in more.items() if key.startswith(layer)}
        meant[f"{layer}weight"] = meant_more[f"{layer}weight"]
    stored = {key: tensor for key, tensor in stored.items() if not key.endswith("img_mlp.0.input_scale")}
    path = write(tmp_path / "model.safetensors", stored, comfy_metadata(stored))
    assert recognise(path).order == Order(high_nibble_first=True, swizzled_scales=True)
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux1_base, family="flux1")


def test_awq_smoothing_of_the_input_is_folded_into_the_weight(flux2_base: Path, tmp_path: Path) -> None:
    plain = bfl(state(flux2_base), family="flux2")
    name = "single_blocks.0.linear1"
    stored, meant = quantised(plain, lambda key: name in key, nvfp4, nvfp4_values)
    smooth = torch.linspace(0.5, 2, 32)
    stored[f"{name}.pre_quant_scale"] = smooth
    meant[f"{name}.weight"] = meant[f"{name}.weight"] * smooth
    path = write(tmp_path / "model.safetensors", stored)
    assert_file_draws_what_its_numbers_mean(path, meant=meant, base=flux2_base, family="flux2")


def test_the_embedded_model_needs_no_base(tmp_path: Path) -> None:
    (weights,) = (tiny.FOLDER / "transformer").glob("*.safetensors")
    cfg = model_config(path=str(weights), max_sequence_length=64)
    folder = model_config(max_sequence_length=64)
    ours, theirs = (load_model(c, true_cfg_scale=2.0) for c in (cfg, folder))
    assert all((a == b).all() for a, b in zip(pixels(ours, ROWS[:1]), pixels(theirs, ROWS[:1]), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": "fused"},
        {"kernels": "fused", "dtype": "bfloat16", "quantization": "fp8"},
        {"dtype": "bfloat16", "quantization": "fp8", "residency": "windowed"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int8_weight_only", "residency": "windowed"},
    ],
)
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_a_file_goes_on_like_a_folder(family: str, changes: dict[str, str], request: Any, tmp_path: Path) -> None:
    """Fused operations, eight bits made of the numbers in the file, text encoder layers on the host."""
    base = request.getfixturevalue(f"{family}_base")
    dtype = getattr(torch, changes.get("dtype", "float32"))  # a folder's wider numbers are rounded to it first
    rounded = {key: tensor.to(dtype) for key, tensor in state(base).items()}
    path = write(tmp_path / "model.safetensors", bfl(rounded, family=family))
    ours = load_model(settings(family, base, path=str(path), **changes), true_cfg_scale=2.0)
    folder = load_model(settings(family, None, path=str(base), **changes), true_cfg_scale=2.0)
    assert all((a == b).all() for a, b in zip(pixels(ours, ROWS), pixels(folder, ROWS), strict=True))


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_the_memory_of_a_file_is_foretold_as_that_of_the_folder(family: str, request: Any, tmp_path: Path) -> None:
    """From the header: four-bit weights will take what they take once dequantised."""
    base = request.getfixturevalue(f"{family}_base")
    stored, _ = quantised(bfl(state(base), family=family), is_block, nvfp4, nvfp4_values)
    path = write(tmp_path / "model.safetensors", stored)
    assert residency._stored_shapes(settings(family, base, path=str(path))) == residency._stored_shapes(
        settings(family, None, path=str(base))
    )


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_and_rows_are_those_of_diffusers_own_converters(tmp_path: Path) -> None:
    """Matrices of one column, each row with its own number; FLUX.1's converter knows the full width only."""
    width, head = 3072, 128
    rows = {"flux1": bfl(fake_flux1(width, head), family="flux1"), "flux2": bfl(fake_flux2(96, 16), family="flux2")}
    converters = {
        "flux1": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
        "flux2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    }
    for family, tensors in rows.items():
        path = write(tmp_path / f"{family}.safetensors", tensors)
        want = converters[family](dict(tensors))
        checkpoint = recognise(path)
        got = {key: torch.zeros_like(tensor) for key, tensor in want.items()}
        layers = dict.fromkeys(key.rpartition(".")[0] for key in got)
        found = groups(checkpoint.modules, layers, family=family, naming="bfl", num_blocks=(2, 2))
        for group in found:
            convert._fill(group, got, checkpoint, torch.device("cpu"), Loras())
        assert all(torch.equal(got[key], want[key]) for key in want)


def numbered(shapes: dict[str, int]) -> Tensors:
    """A column a layer, or a vector where its name says norm, each number once."""
    state: Tensors = {}
    for index, (layer, count) in enumerate(shapes.items()):
        column = torch.arange(count, dtype=torch.float32) + 1000.0 * index
        state[f"{layer}.weight"] = column if "attn.norm" in layer else column[:, None]
    return state


def fake_flux1(width: int, head: int) -> Tensors:
    shapes = {"x_embedder": width, "context_embedder": width, "proj_out": 64, "norm_out.linear": 2 * width}
    for part in ("timestep", "text", "guidance"):
        shapes |= {f"time_text_embed.{part}_embedder.linear_{n}": width for n in (1, 2)}
    for i in range(2):
        block = f"transformer_blocks.{i}."
        shapes |= {f"{block}{name}.linear": 6 * width for name in ("norm1", "norm1_context")}
        qkv = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        shapes |= {f"{block}attn.{name}": width for name in qkv}
        shapes |= {f"{block}attn.norm_{name}": head for name in ("q", "k", "added_q", "added_k")}
        for name in ("ff", "ff_context"):
            shapes |= {f"{block}{name}.net.0.proj": 4 * width, f"{block}{name}.net.2": width}
        block = f"single_transformer_blocks.{i}."
        shapes |= {f"{block}norm.linear": 3 * width, f"{block}proj_mlp": 4 * width, f"{block}proj_out": width}
        shapes |= {f"{block}attn.{name}": width for name in ("to_q", "to_k", "to_v")}
        shapes |= {f"{block}attn.norm_{name}": head for name in ("q", "k")}
    weights = numbered(shapes)
    biases = {key.replace("weight", "bias"): 0.5 + t[:, 0] for key, t in weights.items() if t.ndim == 2}
    return weights | biases


def fake_flux2(width: int, head: int) -> Tensors:
    shapes = {"x_embedder": width, "context_embedder": width, "proj_out": 64, "norm_out.linear": 2 * width}
    shapes |= {f"time_guidance_embed.timestep_embedder.linear_{n}": width for n in (1, 2)}
    shapes |= {f"double_stream_modulation_{name}.linear": 6 * width for name in ("img", "txt")}
    shapes |= {"single_stream_modulation.linear": 3 * width}
    for i in range(2):
        block = f"transformer_blocks.{i}."
        qkv = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        shapes |= {f"{block}attn.{name}": width for name in qkv}
        shapes |= {f"{block}attn.norm_{name}": head for name in ("q", "k", "added_q", "added_k")}
        for name in ("ff", "ff_context"):
            shapes |= {f"{block}{name}.linear_in": 6 * width, f"{block}{name}.linear_out": width}
        block = f"single_transformer_blocks.{i}."
        shapes |= {f"{block}attn.to_qkv_mlp_proj": 9 * width, f"{block}attn.to_out": width}
        shapes |= {f"{block}attn.norm_{name}": head for name in ("q", "k")}
    return numbered(shapes)


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import json, sys
from pathlib import Path
import torch
from diffusers import Flux2Transformer2DModel
from tiny_models import model_config
from fluxbatch.models import loading
from fluxbatch.models.checkpoints import convert

def memory(name):  # bytes; getrusage would count what the parent had when it forked
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024

cfg = model_config(family="flux2", name="flux2_klein_4b", guidance="none", dtype="bfloat16", path=sys.argv[1])
placement = loading.place(cfg)
convert.fit(Path(sys.argv[1]), cfg=cfg, folder=Path(sys.argv[2]))  # what it imports is not counted
before = memory("VmRSS")
module = convert.stored_transformer(None, cfg=cfg, folder=Path(sys.argv[2]), placement=placement)
sizes = [parameter.nbytes for parameter in module.parameters()]
print(json.dumps({"peak": memory("VmHWM") - before, "result": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "plain"])
def test_loading_takes_one_tensor_above_the_result(kind: str, tmp_path: Path) -> None:
    """A FLUX.2 of klein-4B's width and four blocks, 1.7 GiB in bfloat16."""
    config = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 24, "joint_attention_dim": 7680}
    with torch.device("meta"):
        skeleton = Flux2Transformer2DModel(**config, guidance_embeds=False)
    (tmp_path / "transformer").mkdir()
    skeleton.save_config(tmp_path / "transformer")
    plain = {key: torch.zeros(p.shape, dtype=torch.bfloat16) for key, p in skeleton.named_parameters()}
    stored: Tensors = {}
    for key, tensor in bfl(plain, family="flux2").items():
        stored |= spelled(key, tensor, kind)
    path = write(tmp_path / "model.safetensors", stored)
    code = [sys.executable, "-c", MEASURE, str(path), str(tmp_path)]
    done = subprocess.run(code, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    above = told["peak"] - told["result"]
    print(kind, {name: f"{size / 2**20:.0f} MiB" for name, size in {**told, "above": above}.items()})
    assert told["peak"] > 0.99 * told["result"]
    assert above < told["largest"] + 2**26


def spelled(key: str, tensor: torch.Tensor, kind: str) -> Tensors:
    if kind == "plain" or not is_block(key) or tensor.ndim == 1:
        return {key: tensor}
    layer, (rows, columns) = key.removesuffix("weight"), tensor.shape
    if kind == "fp8":
        return {key: tensor.to(torch.float8_e4m3fn), f"{layer}weight_scale": torch.ones(())}
    return {
        key: torch.zeros(rows, columns // 2, dtype=torch.uint8),
        f"{layer}weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{layer}weight_scale_2": torch.ones(()),
    }
