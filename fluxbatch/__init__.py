"""fluxbatch: an offline batch job runner for text-to-image models."""

__version__ = "0.1.0"
