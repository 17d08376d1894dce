"""Transformers that come as one file: as Black Forest Labs, Comfy, ModelOpt or Nunchaku write them, quantised or not.

`recognise` decides what a file is, `names` which of its layers make which of ours, `nvfp4`, `fp8` and `svdquant` what
its numbers mean, `convert` fills diffusers' module. From then on it is a transformer like one from a folder. Nothing
here knows of prompts, text encoders or kernels.
"""
