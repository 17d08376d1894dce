"""What FLUX.2-klein's folders and diffusers' `Flux2KleinPipeline` take for given. Plain numbers; knows no tensors."""

from collections.abc import Mapping
from typing import Any

TEXT_ENCODER_LAYERS = (9, 18, 27)  # hidden states of Qwen3 that the transformer reads: the pipeline's default
SCHEDULER = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


def text_encoder_layers(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a folder's text_encoder/config.json. Klein's own say nothing; ours name them as the pipeline's call does."""
    return tuple(settings.get("text_encoder_out_layers", TEXT_ENCODER_LAYERS))
