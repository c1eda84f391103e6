"""Fused kernels for NVIDIA GPUs: arrays in, arrays out. A leaf package: it imports jax and never rqjax."""
