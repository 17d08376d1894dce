"""Where the embedded model lies: a FLUX.1 of 7 M parameters in diffusers' layout, weights in float16."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
