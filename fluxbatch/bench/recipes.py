"""diffusers' own pipelines on this model's components, and what users do to make them faster. Measures nothing.

The recipes are those of the libraries' own documents: huggingface/flux-fast and diffusers' optimisation guide (fused
QKV, channels-last and compiled VAE, regional compilation), torchao's row-wise FP8, cache-dit's static step mask.
cuDNN's attention stands in for FlashAttention 3, which is not on PyPI; fluxbatch uses the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, FluxPipeline
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from fluxbatch.config import ModelConfig
from fluxbatch.models import flux1, flux2, homes, loading, tuning
from fluxbatch.models.tokens import RandomTokenizer

QWEN3_LAYERS = 36  # diffusers runs all of them, and the head
FP8_MIN_FEATURES = 3072  # narrower linears lose by dynamic quantisation
UNFUSED = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
# flux-fast's settings; they make compiling some twenty times as slow.
INDUCTOR_FLAGS = {
    "conv_1x1_as_mm": True,
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "epilogue_fusion": False,
}


class PipelineTokenizer:
    """A `RandomTokenizer` as diffusers' pipelines call one, so that their text encoding is whole."""

    added_tokens_encoder: dict[str, int] = {}

    def __init__(self, tokenizer: RandomTokenizer) -> None:
        self._tokenizer = tokenizer
        self.model_max_length = tokenizer.model_max_length

    def __call__(self, text: str | Sequence[str], *, max_length: int | None = None, **_: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        longest = 1 + max(len(one.split()) for one in texts)
        encoded = self._tokenizer(texts, max_length=max_length or longest)
        return _Encoding(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, **options)

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def batch_decode(self, ids: Tensor) -> list[str]:
        return [f"{row.numel()} tokens" for row in ids]


class _Encoding(SimpleNamespace):
    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


def components(cfg: ModelConfig) -> dict[str, Any]:
    """As the family's diffusers pipeline takes them, stored or random, on the device; FLUX.2 with the whole Qwen3."""
    loading.quiet_libraries()
    loading.fix_cpu_threads(cfg)
    placement = loading.place(cfg)
    family = flux1 if cfg.family == "flux1" else flux2
    parts = (family._random if cfg.random_weights else family._stored)(cfg, placement)
    if cfg.family == "flux2":
        parts.pop("text_encoder")
        parts["text_encoder"] = _whole_qwen3(cfg, placement)
    return as_pipeline_takes(parts)


def as_pipeline_takes(parts: dict[str, Any]) -> dict[str, Any]:
    """A scheduler instead of its settings, and tokenizers that a pipeline can call."""
    taken: dict[str, Any] = {
        name: PipelineTokenizer(part) if isinstance(part, RandomTokenizer) else part for name, part in parts.items()
    }
    taken["scheduler"] = FlowMatchEulerDiscreteScheduler.from_config(dict(taken.pop("scheduler_config")))
    return taken


def _whole_qwen3(cfg: ModelConfig, placement: loading.Placement) -> Any:
    dtype, device = placement.text_encoder_dtype, placement.device
    if not cfg.random_weights:
        folder = homes.model_folder(cfg)
        return loading.stored(Qwen3ForCausalLM, folder, subfolder="text_encoder", dtype=dtype, device=device)
    settings = loading.random_config(flux2.RANDOM, cfg)["text_encoder"]
    tied = settings["hidden_size"] == 2560  # Qwen3-4B shares its embeddings with the head, Qwen3-8B does not
    whole = Qwen3Config(**{**settings, "num_hidden_layers": QWEN3_LAYERS, "tie_word_embeddings": tied})
    return loading.random(lambda: Qwen3ForCausalLM(whole), name="text_encoder", dtype=dtype, device=device)


def pipeline(cfg: ModelConfig, parts: dict[str, Any]) -> Any:
    """diffusers' pipeline of the family, its attention the default."""
    pipe: Any
    if cfg.family == "flux1":
        pipe = FluxPipeline(**parts)
    else:
        pipe = Flux2KleinPipeline(**parts, is_distilled=cfg.guidance == "none")
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.set_attention_backend("native")  # diffusers would keep the last choice of the whole process
    return pipe


def sharing_weights(module: Any) -> Any:
    """A copy of a module that holds the same parameters: it can be fused, quantised and compiled on its own."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, memo={id(tensor): tensor for tensor in tensors})


def lossless(pipe: Any) -> None:
    """The fastest known recipe that changes no arithmetic but its order. Compiles at the first calls."""
    fuse(pipe)
    compile_parts(pipe)


def torchao_fp8(pipe: Any) -> None:
    """The same with block linears in row-wise FP8, quantised on the fly. Needs torchao."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    fuse(pipe)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    quantize_(pipe.transformer, config, filter_fn=_wide_block_linear)
    compile_parts(pipe)


def cached_steps(pipe: Any, *, num_inference_steps: int) -> None:
    """The lossless recipe, and cache-dit's block cache under a fixed mask of steps: lossy, and the same for every row.

    With random weights a threshold would hit or miss by chance, so the mask is static: cache-dit's own "medium".
    """
    import cache_dit

    mask = cache_dit.steps_mask(total_steps=num_inference_steps, mask_policy="medium")
    config = cache_dit.DBCacheConfig(
        num_inference_steps=num_inference_steps,
        Fn_compute_blocks=1,
        max_warmup_steps=0,
        steps_computation_mask=mask,
        steps_computation_policy="static",
    )
    fuse(pipe)
    # It patches the pipeline's class; a class of its own keeps the other contestants' as they are.
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {})
    cache_dit.enable_cache(pipe, cache_config=config)
    compile_parts(pipe)


def fuse(pipe: Any) -> None:
    """Fused QKV projections, and the fastest attention that this GPU has in torch."""
    transformer = pipe.transformer
    transformer.fuse_qkv_projections()
    placement = loading.Placement(transformer.device, transformer.dtype, transformer.dtype, pipe.vae.dtype)
    if tuning.cudnn_attention(transformer.config.attention_head_dim, placement):
        transformer.set_attention_backend("_native_cudnn")


def compile_parts(pipe: Any) -> None:
    """Regional compilation of the blocks, a channels-last and compiled VAE decoder. One compilation a shape."""
    pipe.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    pipe.vae = copy.deepcopy(pipe.vae).to(memory_format=torch.channels_last)
    pipe.vae.decode = torch.compile(pipe.vae.decode, fullgraph=True, dynamic=False)


def _wide_block_linear(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear) or "blocks" not in name or "norm" in name:
        return False
    return module.in_features >= FP8_MIN_FEATURES and name.rpartition(".")[2] not in UNFUSED


def resident_bytes(pipe: Any) -> int:
    """Of all weights that the pipeline holds, each storage once, whoever else holds it too."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    tensors = (tensor for module in modules for tensor in [*module.parameters(), *module.buffers()])
    return sum({storage.data_ptr(): storage.nbytes() for t in tensors for storage in _storages(t)}.values())


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's: a quantised weight and its scales
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()
