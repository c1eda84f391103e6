"""Kernels for TPUs: Pallas Mosaic TPU."""
