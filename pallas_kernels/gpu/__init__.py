"""Kernels for NVIDIA GPUs: Pallas Mosaic GPU, Hopper."""
