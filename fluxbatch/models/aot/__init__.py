"""Compiled ahead of time: a model's heavy parts as packages of machine code that a run loads and never makes.

A part is a module that repeats (a kind of transformer block) or is called once a launch (the VAE's decoder). Its
weights are arguments of its package, so that one package serves all blocks of a kind, in every checkpoint of the
architecture, and holds no weight. A package fits one launch shape: graphs for several were slower on a GPU.

`parts.py` names the parts and how each is called, `packages.py` keeps packages on disk, `build.py` makes them with
torch.export and AOTInductor, `linking.py` seals them, `forward.py` lets them stand in for the modules, `toolkit.py`
finds CUDA's headers.
"""
