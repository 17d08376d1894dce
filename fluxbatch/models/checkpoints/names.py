"""Which layers of a file make which layers of diffusers' transformers. Names only; no tensor.

Black Forest Labs' names: https://github.com/black-forest-labs/flux `model.py` and flux2 `model.py`. Nunchaku's:
deepcompressor `backend/nunchaku/convert.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

Table = dict[str, tuple[str, ...]]  # a layer of the file, and what its rows are, one under the other

TIME_EMBEDDERS = ("in_layer", "linear_1"), ("out_layer", "linear_2")
ATTENTION: Table = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "txt_attn.proj": ("attn.to_add_out",),
}
SINGLE_NORMS: Table = {"norm.query_norm": ("attn.norm_q",), "norm.key_norm": ("attn.norm_k",)}
SPLIT_QKV = (("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"), ("q", "k", "v"))
SWAPPED = "final_layer.adaLN_modulation.1"  # shift above scale; diffusers has scale above shift

TOP: dict[str, Table] = {
    "flux1": {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "final_layer.linear": ("proj_out",),
        SWAPPED: ("norm_out.linear",),
        **{f"time_in.{a}": (f"time_text_embed.timestep_embedder.{b}",) for a, b in TIME_EMBEDDERS},
        **{f"vector_in.{a}": (f"time_text_embed.text_embedder.{b}",) for a, b in TIME_EMBEDDERS},
        **{f"guidance_in.{a}": (f"time_text_embed.guidance_embedder.{b}",) for a, b in TIME_EMBEDDERS},
    },
    "flux2": {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "final_layer.linear": ("proj_out",),
        SWAPPED: ("norm_out.linear",),
        **{f"time_in.{a}": (f"time_guidance_embed.timestep_embedder.{b}",) for a, b in TIME_EMBEDDERS},
        **{f"guidance_in.{a}": (f"time_guidance_embed.guidance_embedder.{b}",) for a, b in TIME_EMBEDDERS},
    },
}
DOUBLE: dict[str, Table] = {
    "flux1": {
        **ATTENTION,
        "img_mod.lin": ("norm1.linear",),
        "txt_mod.lin": ("norm1_context.linear",),
        "img_mlp.0": ("ff.net.0.proj",),
        "img_mlp.2": ("ff.net.2",),
        "txt_mlp.0": ("ff_context.net.0.proj",),
        "txt_mlp.2": ("ff_context.net.2",),
    },
    "flux2": {
        **ATTENTION,
        "img_mlp.0": ("ff.linear_in",),
        "img_mlp.2": ("ff.linear_out",),
        "txt_mlp.0": ("ff_context.linear_in",),
        "txt_mlp.2": ("ff_context.linear_out",),
    },
}
SINGLE: dict[str, Table] = {
    "flux1": {
        **SINGLE_NORMS,
        "modulation.lin": ("norm.linear",),
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "linear2": ("proj_out",),
    },
    "flux2": {**SINGLE_NORMS, "linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)},
}
# FLUX.1 as Nunchaku writes it: QKV fused; the two halves of a single block's `proj_out` apart; the rest diffusers'.
NUNCHAKU_NORMS: Table = {f"norm_{name}": (f"attn.norm_{name}",) for name in ("q", "k", "added_q", "added_k")}
NUNCHAKU_DOUBLE: Table = {
    **NUNCHAKU_NORMS,
    "norm1.linear": ("norm1.linear",),
    "norm1_context.linear": ("norm1_context.linear",),
    "qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "qkv_proj_context": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "out_proj": ("attn.to_out.0",),
    "out_proj_context": ("attn.to_add_out",),
    "mlp_fc1": ("ff.net.0.proj",),
    "mlp_fc2": ("ff.net.2",),
    "mlp_context_fc1": ("ff_context.net.0.proj",),
    "mlp_context_fc2": ("ff_context.net.2",),
}
NUNCHAKU_SINGLE: Table = {
    "norm_q": ("attn.norm_q",),
    "norm_k": ("attn.norm_k",),
    "norm.linear": ("norm.linear",),
    "qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "mlp_fc1": ("proj_mlp",),
}
AFTER_GELU = "fc2"  # how the layers end whose input is a GELU's output
MODULATION_CHUNKS = {"norm.linear": 3, "norm1.linear": 6, "norm1_context.linear": 6}


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of the file, side by side in their columns, that are layers of the transformer, one under the other."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    halves_swapped: bool = False


def groups(
    modules: Collection[str], targets: Collection[str], *, family: str, naming: str, num_blocks: tuple[int, int]
) -> Iterator[Group]:
    """Every layer of the transformer (`targets`) once, with what it is made of. `num_blocks`: double and single."""
    if naming == "diffusers":
        found = _diffusers(targets)
    elif naming == "nunchaku":
        found = _nunchaku(targets, num_blocks=num_blocks)
    else:
        found = _bfl(family, modules, num_blocks=num_blocks)
    wanted = set(targets)
    return (group for group in found if wanted & set(group.targets))  # guidance embedders are not in every model


def _diffusers(targets: Collection[str]) -> Iterator[Group]:
    return (Group((name,), (name,)) for name in targets)


def _bfl(family: str, modules: Collection[str], *, num_blocks: tuple[int, int]) -> Iterator[Group]:
    for source, targets in TOP[family].items():
        yield Group((source,), targets, halves_swapped=source == SWAPPED)
    tables = (("double_blocks", "transformer_blocks", DOUBLE), ("single_blocks", "single_transformer_blocks", SINGLE))
    for (theirs, ours, table), count in zip(tables, num_blocks, strict=True):
        for index in range(count):
            for source, targets in table[family].items():
                names = tuple(f"{ours}.{index}.{target}" for target in targets)
                yield from _whole_or_split(f"{theirs}.{index}.{source}", names, modules)


def _whole_or_split(source: str, targets: tuple[str, ...], modules: Collection[str]) -> Iterator[Group]:
    """Queries, keys and values stand in one layer, or in three whose names differ from writer to writer."""
    if source.endswith(".qkv") and source not in modules:
        stem = source.removesuffix("qkv")
        for words in SPLIT_QKV:
            if stem + words[0] in modules:
                yield from (Group((stem + word,), (target,)) for word, target in zip(words, targets, strict=True))
                return
    yield Group((source,), targets)


def _nunchaku(targets: Collection[str], *, num_blocks: tuple[int, int]) -> Iterator[Group]:
    yield from _diffusers([name for name in targets if "transformer_blocks." not in name])
    for stem, table, count in zip(
        ("transformer_blocks", "single_transformer_blocks"), (NUNCHAKU_DOUBLE, NUNCHAKU_SINGLE), num_blocks, strict=True
    ):
        for block in (f"{stem}.{index}" for index in range(count)):
            for source, names in table.items():
                yield Group((f"{block}.{source}",), tuple(f"{block}.{name}" for name in names))
            if table is NUNCHAKU_SINGLE:
                yield Group((f"{block}.out_proj", f"{block}.mlp_fc2"), (f"{block}.proj_out",))


def modulation_chunks(name: str) -> int:
    """How many shifts, scales and gates a modulation of diffusers' names has."""
    return next(chunks for end, chunks in MODULATION_CHUNKS.items() if name.endswith(f".{end}"))
