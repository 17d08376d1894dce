"""What is refused before a weight is read: one sentence, with the key, the rule and the value."""

import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoint_files import Tensors, bfl, comfy_metadata, fp8, fp8_values, nvfp4, quantised, write
from test_checkpoints import is_block, settings, state

from fluxbatch.config import OUTPUT_AFFECTING
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.models import check_model, load_model, loading
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.checkpoints.recognise import recognise


def refusal(path: Path, base: Path | None, *, family: str = "flux1", **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_model(settings(family, base, path=str(path), **changes))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def flux1(flux1_base: Path) -> Tensors:
    return bfl(state(flux1_base), family="flux1")


@pytest.fixture
def flux2(flux2_base: Path) -> Tensors:
    return bfl(state(flux2_base), family="flux2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- files of another kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.bin"])
def test_a_pickle_is_never_opened(name: str, tmp_path: Path, flux1_base: Path) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"a": 1}))
    sentence = f"model.path must be a folder, a hub id or a .safetensors file, got {path}: pickles are never opened"
    assert refusal(path, flux1_base) == sentence


def test_a_pickle_under_another_name_is_never_opened(file: Path, flux1_base: Path) -> None:
    file.write_bytes(pickle.dumps({"a": list(range(100))}))
    sentence = f"model.path must be a safetensors file, got {file}: it does not begin with a safetensors header"
    assert refusal(file, flux1_base) == sentence


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}']
)
def test_a_file_without_a_header_is_refused(content: bytes, file: Path, flux1_base: Path) -> None:
    file.write_bytes(content)
    assert refusal(file, flux1_base).endswith("it does not begin with a safetensors header")


def test_a_file_cut_off_is_refused(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    write(file, flux1)
    held = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(file, flux1_base).endswith(f"it is cut off: its header promises {held} bytes, it has {held - 100}")


def test_a_file_that_is_not_there_is_refused(file: Path, flux1_base: Path) -> None:
    sentence = f"model.path must be a folder, a hub id or a file, got {file}: no such file"
    assert refusal(file, flux1_base) == sentence


def test_a_lora_is_no_model(file: Path, flux1_base: Path) -> None:
    parts = {f"transformer_blocks.0.attn.to_q.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}
    sentence = (
        f"model.path must be a whole model, got {write(file, parts)}: a LoRA, with 2 tensors such as "
        "transformer_blocks.0.attn.to_q.lora_A.weight"
    )
    assert refusal(file, flux1_base) == sentence


def test_another_model_is_refused(file: Path, flux1_base: Path) -> None:
    write(file, {"blocks.0.attn.q.weight": torch.zeros(4, 4)})
    sentence = f"model.path must be a transformer of FLUX.1 or FLUX.2, got {file}, which holds blocks.0.attn.q"
    assert refusal(file, flux1_base) == sentence


def test_a_flux2_file_under_a_flux1_name_is_refused(file: Path, flux2: Tensors, flux1_base: Path) -> None:
    sentence = f"model.path must be of FLUX.1 for model=flux1_dev, got {write(file, flux2)}, which is of FLUX.2"
    assert refusal(file, flux1_base) == sentence


# --- tensors that do not fit ------------------------------------------------------------------------------------------


def test_missing_layers_are_named(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    """As schnell's file, which embeds no guidance, beside dev's folder."""
    less = {key: tensor for key, tensor in flux1.items() if not key.startswith("guidance_in")}
    sentence = (
        f"model.path must hold the whole transformer of model.base, got {write(file, less)}, which lacks 2 of its "
        "layers, among them guidance_in.in_layer"
    )
    assert refusal(file, flux1_base) == sentence


def test_other_layers_are_named(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    more = flux1 | {"double_blocks.1.img_attn.proj.weight": torch.zeros(32, 32)}
    sentence = (
        f"model.path must hold the transformer of model.base, got {write(file, more)}, which has 1 other layers, "
        "among them double_blocks.1.img_attn.proj"
    )
    assert refusal(file, flux1_base) == sentence


def test_other_sizes_are_named(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    wide = flux1 | {"img_in.weight": torch.zeros(32, 17)}
    assert refusal(write(file, wide), flux1_base).endswith(f"got {file}: img_in is [32, 17], not [32, 16]")
    no_bias = {key: tensor for key, tensor in flux1.items() if key != "img_in.bias"}
    assert refusal(write(file, no_bias), flux1_base) == (
        f"model.path must have a bias of 32 in img_in, got {file}, which has none"
    )


# --- layouts that are unknown or unclear ------------------------------------------------------------------------------


def test_an_unknown_layout_is_spelled_out(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    odd = flux1 | {"img_in.weight": torch.zeros(32, 16, dtype=torch.int8), "img_in.weight_scale": torch.ones(32)}
    sentence = (
        f"model.path must have weights of a known layout, got {write(file, odd)}: img_in has bias F32[32], "
        "weight I8[32, 16], weight_scale F32[32]"
    )
    assert refusal(file, flux1_base) == sentence


def nvfp4_file(file: Path, plain: Tensors, **changes: Any) -> tuple[Tensors, dict[str, str]]:
    stored, _ = quantised(plain, is_block, lambda weight: nvfp4(weight, **changes), lambda words: torch.zeros(1, 1))
    return stored, comfy_metadata(stored)


def test_comfys_labels_with_modelopts_name_are_unclear(file: Path, flux2: Tensors, flux2_base: Path) -> None:
    stored, labels = nvfp4_file(file, flux2)
    write(file, stored, labels | {"producer": "modelopt"})
    assert refusal(file, flux2_base, family="flux2") == (
        f"model.path must say how its NVFP4 is laid out, got {file}: its metadata names ModelOpt, its layers are "
        "labeled as Comfy's"
    )


def test_scales_of_the_other_order_are_unclear(file: Path, flux2: Tensors, flux2_base: Path) -> None:
    stored, _ = nvfp4_file(file, flux2, swizzled=False)
    sentence = refusal(write(file, stored), flux2_base, family="flux2")
    assert "its other signs say high nibble first, swizzled scales, and the scales of double_blocks.0" in sentence


def test_a_label_that_its_layer_denies_is_refused(file: Path, flux2: Tensors, flux2_base: Path) -> None:
    stored, labels = nvfp4_file(file, flux2)
    wrong = {key: text.replace("nvfp4", "mxfp8") for key, text in labels.items()}
    sentence = refusal(write(file, stored, wrong), flux2_base, family="flux2")
    assert sentence.endswith("double_blocks.0.img_attn.proj is labeled mxfp8 and spelled as NVFP4")
    layers = json.loads(labels["_quantization_metadata"])
    del layers["layers"]["single_blocks.0.linear1"]
    write(file, stored, {"_quantization_metadata": json.dumps(layers)})
    assert refusal(file, flux2_base, family="flux2").endswith("single_blocks.0.linear1 has no label")


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": []}', '{"layers": {"a": 1}}'])
def test_labels_that_are_no_labels_are_refused(text: str, file: Path, flux2: Tensors, flux2_base: Path) -> None:
    write(file, flux2, {"_quantization_metadata": text})
    assert refusal(file, flux2_base, family="flux2").startswith("model.path must label its layers in JSON, got")


@pytest.mark.parametrize("layer", ["weight_scale", "weight_scale_2"])
def test_nvfp4_without_one_of_its_scales_is_unknown(layer: str, file: Path, flux2: Tensors, flux2_base: Path) -> None:
    stored, _ = nvfp4_file(file, flux2)
    del stored[f"single_blocks.0.linear1.{layer}"]
    sentence = refusal(write(file, stored), flux2_base, family="flux2")
    assert sentence.startswith("model.path must have weights of a known layout")
    assert "single_blocks.0.linear1 has" in sentence


def test_scales_of_blocks_in_fp8_are_unknown(file: Path, flux1: Tensors, flux1_base: Path) -> None:
    stored, _ = quantised(flux1, is_block, fp8, fp8_values)
    stored["double_blocks.0.img_attn.proj.weight_scale"] = torch.ones(2, 2)
    assert "weight_scale F32[2, 2]" in refusal(write(file, stored), flux1_base)


# --- model.base -------------------------------------------------------------------------------------------------------


def test_a_file_needs_a_base(file: Path, flux1: Tensors) -> None:
    sentence = f"model.base must name a folder or a hub id for flux1_dev beside the file {write(file, flux1)}, got null"
    assert refusal(file, None) == sentence


def test_a_base_that_is_not_there_or_not_whole_is_named(file: Path, flux1: Tensors, tmp_path: Path) -> None:
    write(file, flux1)
    assert refusal(file, tmp_path / "none") == (
        f"model.base must be a folder or a hub id (org/name), got '{tmp_path}/none': no such folder"
    )
    (tmp_path / "empty").mkdir()
    assert refusal(file, tmp_path / "empty") == (
        f"model.base={tmp_path}/empty: model_index.json is missing in {tmp_path}/empty"
    )


def test_a_base_beside_a_folder_is_refused(flux1_base: Path) -> None:
    sentence = f"model.base must be null where model.path is no file, got {flux1_base}"
    assert refusal(flux1_base, flux1_base) == sentence


def test_a_base_needs_no_transformer_weights(file: Path, flux1: Tensors, flux1_base: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(flux1_base, tmp_path / "base"))
    (base / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    load_model(settings("flux1", base, path=str(write(file, flux1))), true_cfg_scale=2.0)
    (base / "transformer" / "config.json").unlink()
    assert "transformer/config.json is missing in" in refusal(file, base)


def test_of_a_base_on_the_hub_no_transformer_weights_are_fetched(
    file: Path, flux1: Tensors, flux1_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend([name, *allow_patterns])
        return str(flux1_base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    check_model(settings("flux1", Path("some/dev"), path=str(write(file, flux1))))
    assert asked[0] == "some/dev"
    assert [pattern for pattern in asked if pattern.startswith("transformer")] == ["transformer/config.json"]


def test_a_base_of_another_kind_is_refused(file: Path, flux2: Tensors, flux1_base: Path) -> None:
    sentence = refusal(write(file, flux2), flux1_base, family="flux2")
    assert (
        sentence == f"model.base={flux1_base} must be a Flux2KleinPipeline for model=flux2_klein_4b, got FluxPipeline"
    )


def test_a_file_that_shrinks_while_it_is_read_ends_in_one_sentence(
    file: Path,
    flux1: Tensors,
    flux1_base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = convert.recognise

    def shrunk(path: Path) -> Any:
        found = real(path)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return found

    write(file, flux1)
    monkeypatch.setattr(convert, "recognise", shrunk)
    cfg = settings("flux1", flux1_base, path=str(file))
    with pytest.raises(FluxbatchError, match=r"^model\.path=.*: it ends within .*$"):
        convert.stored_transformer(None, cfg=cfg, folder=flux1_base, placement=loading.place(cfg))


def test_the_base_is_of_the_jobs_fingerprint() -> None:
    assert "model.base" in OUTPUT_AFFECTING


def test_every_value_of_a_header_is_read_without_touching_the_weights(file: Path, flux2: Tensors) -> None:
    """The decision needs the header alone: the same from a file whose numbers are all gone."""
    stored, labels = nvfp4_file(file, flux2)
    write(file, stored, labels)
    told = str(recognise(file))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(content[: 8 + length] + bytes(len(content) - 8 - length))
    assert str(recognise(file)) == told
