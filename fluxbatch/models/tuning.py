"""How the transformer is run: fused kernels or diffusers' modules, attention, compilation, precision.

What a machine cannot do is refused here, before a weight is read, or logged and left out. Knows nothing of where
weights lie.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, first_line
from fluxbatch.models import compile_cache, precision
from fluxbatch.models.aot.forward import install
from fluxbatch.models.aot.parts import Part, parts_of
from fluxbatch.models.eight_bit import EightBitLinear
from fluxbatch.models.fused.blocks import Blocks
from fluxbatch.models.loading import GIB, Placement
from fluxbatch.models.precision import PRECISIONS

logger = logging.getLogger("fluxbatch")

MAX_COMPILED_SHAPES = 256
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def use_fused(cfg: ModelConfig, placement: Placement) -> bool:
    """Whether the transformer and the VAE's decoder run on our fused operations.

    `auto`: on CUDA in half precision, or wherever products in 8 bits are asked for. ConfigError for what cannot be had.
    """
    precision.check(cfg, placement, precision.Machine.of(placement.device))
    if cfg.kernels == "fused" and cfg.compile != "off":
        raise ConfigError(f"model.compile must be off with model.kernels=fused, got {cfg.compile}: nothing is compiled")
    if cfg.compile == "aot" and cfg.quantization != "none":
        raise ConfigError(f"model.quantization must be none with model.compile=aot, got {cfg.quantization}")
    why_not = _why_not_fused(cfg, placement)
    if cfg.kernels == "fused" and why_not:
        raise ConfigError(f"model.kernels=fused needs {why_not}")
    if cfg.kernels == "fused" or PRECISIONS[cfg.quantization].activations is not None:
        return True
    can = cfg.compile == "off" and placement.device.type == "cuda" and not why_not
    return cfg.kernels == "auto" and cfg.quantization != "nvfp4" and can


def _why_not_fused(cfg: ModelConfig, placement: Placement) -> str | None:
    """What is missing for the kernels; on a CPU the same operations run in plain torch."""
    if placement.device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which comes with torch for CUDA"
    if placement.dtype not in KERNEL_DTYPES:
        return f"model.dtype=bfloat16 or float16, got {cfg.dtype}"
    if torch.cuda.get_device_capability(placement.device) < (8, 0):
        return f"a GPU of the Ampere generation or later, got {torch.cuda.get_device_name(placement.device)}"
    return None


def log_fused(blocks: Blocks, cfg: ModelConfig) -> None:
    weights = [weight for block in blocks.all() for weight in block.weights()]
    logger.info(
        "transformer: fused operations, attention %s, quantization %s, %.3f GiB of matrices",
        "cudnn" if blocks.cudnn_attention else "native",
        cfg.quantization,
        sum(weight.numel() * weight.element_size() for weight in weights) / GIB,
    )


def prepare_plain(transformer: Any, vae: Any, *, cfg: ModelConfig, placement: Placement) -> None:
    """Precision, attention back end and compilation of diffusers' own modules, which are on their device then."""
    _quantize_plain(transformer, cfg.quantization, placement.device)
    backend = _set_attention(transformer, cfg=cfg, placement=placement)
    told = (backend, cfg.quantization, cfg.compile)
    logger.info("transformer: diffusers' modules, attention %s, quantization %s, compile %s", *told)
    if cfg.compile == "aot":
        folder = compile_cache.packages_folder(cfg, os.environ)
        for part in ahead_of_time(transformer, vae, attention=backend, placement=placement):
            install(part, folder=folder, device=placement.device)
    elif cfg.compile == "regional" and placement.device.type == "cuda":
        # A graph a launch shape, never one for several: those are slower, and the default of 8 shapes is an error.
        torch._dynamo.config.recompile_limit = MAX_COMPILED_SHAPES
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    elif cfg.compile == "regional":
        logger.warning("model.compile=regional is for CUDA; the transformer runs uncompiled on %s", placement.device)


def _set_attention(transformer: Any, *, cfg: ModelConfig, placement: Placement) -> str:
    """Set it for every model: diffusers keeps the last choice for the whole process."""
    # Uncompiled, cuDNN's attention was the slower one on an H200 (180.7 against 172.5 ms a step of FLUX.1-dev).
    wanted = cfg.compile != "off" and cudnn_attention(transformer.config.attention_head_dim, placement)
    backend = "_native_cudnn" if wanted else "native"
    transformer.set_attention_backend(backend)
    return backend


def blueprint_parts(transformer: Any, vae: Any, *, cfg: ModelConfig, placement: Placement) -> list[Part]:
    """What `prepare_plain` would replace by packages, left as it is."""
    backend = _set_attention(transformer, cfg=cfg, placement=placement)
    return ahead_of_time(transformer, vae, attention=backend, placement=placement)


def ahead_of_time(transformer: Any, vae: Any, *, attention: str, placement: Placement) -> list[Part]:
    """The parts that packages are made of, in the form that they are compiled in."""
    transformer.fuse_qkv_projections()
    for block in transformer.transformer_blocks:
        _drop_unfused(block.attn)
    for block in transformer.single_transformer_blocks:
        _drop_unfused(block.attn)
    if placement.device.type == "cuda":
        turn_channels_last(vae.decoder)
    return parts_of(transformer, vae, attention=attention)


def turn_channels_last(module: nn.Module) -> None:
    """The weights of its convolutions. `module.to` does the same, but not to tensors without numbers."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            weight = layer.weight.detach().contiguous(memory_format=torch.channels_last)
            layer.weight = nn.Parameter(weight, requires_grad=False)


def _drop_unfused(attention: Any) -> None:
    """diffusers keeps the single projections beside the fused ones."""
    if getattr(attention, "fused_projections", False):
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            if hasattr(attention, name):
                delattr(attention, name)


def _quantize_plain(transformer: Any, quantization: str, device: torch.device) -> None:
    """The blocks' matrices, one block after another: quantised before the next one comes, they fit a small card."""
    if quantization == "none":
        return
    for kind in ("transformer_blocks", "single_transformer_blocks"):
        for number, block in enumerate(getattr(transformer, kind)):
            block.to(device)
            names = [name for name, module in block.named_modules() if _is_block_matrix(kind, number, name, module)]
            if quantization == "nvfp4":
                _pack_nvfp4(block, names)
                continue
            held = PRECISIONS[quantization].weights
            assert held is not None
            for name in names:
                layer = block.get_submodule(name)
                if isinstance(layer, nn.Linear):
                    block.set_submodule(name, EightBitLinear.of(layer, held))
    transformer.to(device)


def _is_block_matrix(kind: str, number: int, name: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return precision.is_block_matrix(f"{kind}.{number}.{name}.weight", tuple(module.weight.shape))


def _pack_nvfp4(block: nn.Module, names: list[str]) -> None:
    """By torchao, for Blackwell's tensor cores. Written against its documentation, and never run on such a card.

    https://docs.pytorch.org/ao/stable/api_reference/api_ref_quantization.html
    """
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
    from torchao.quantization import quantize_

    quantize_(block, NVFP4DynamicActivationNVFP4WeightConfig(), filter_fn=lambda _, name: name in names)


def cudnn_attention(head_dim: int, placement: Placement) -> bool:
    """cuDNN's attention, where it was measured and found right: Hopper, 128 wide heads, half precision."""
    device, dtype = placement.device, placement.dtype
    if device.type != "cuda" or head_dim != 128 or dtype is torch.float32:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        with unset_fake_temporarily(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            query = torch.zeros(1, 1, 128, head_dim, dtype=dtype, device=device)
            F.scaled_dot_product_attention(query, query, query)
    except RuntimeError as error:
        logger.warning("cuDNN attention cannot be used (%s); torch's own choice instead", first_line(error))
        return False
    return True


def plain_flow(
    transformer: Any, timesteps: Tensor, *, text: Tensor, **conditions: Any
) -> Callable[[Tensor, int], Tensor]:
    """The velocity of one launch by diffusers' own module; `conditions` are its further arguments."""

    def velocity(latents: Tensor, step: int) -> Tensor:
        return transformer(
            hidden_states=latents,
            timestep=timesteps[step].expand(latents.shape[0]).to(latents.dtype) / 1000,  # rounded first, as diffusers
            encoder_hidden_states=text,
            return_dict=False,
            **conditions,
        )[0]

    return velocity
