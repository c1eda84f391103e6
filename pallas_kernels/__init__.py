"""Fused kernels, by device: arrays in, arrays out. A leaf package: it imports jax and never rqjax."""
