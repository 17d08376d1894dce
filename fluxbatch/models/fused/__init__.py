"""FLUX transformers and VAE decoders with fused kernels: the fast path on CUDA, beside diffusers' modules.

Rows are sequence-major: row `s * B + b` is token s of image b, text tokens first. Both streams of a double block are
then two slices of one matrix, the single blocks read all of it, and nothing is ever concatenated or split.

`kernels.py` holds the Triton kernels, `ops.py` the same operations in plain torch and the choice between them,
`linear.py` matrix products in half precision and FP8, `blocks.py` what FLUX.1 and FLUX.2 share, `flux1.py` and
`flux2.py` how diffusers' weights become that, `decoder.py` the VAE.

Legend: S tokens (text T, image L), B images, R = S * B rows, D width, H heads, N steps.
"""
