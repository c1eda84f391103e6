"""Experiments on GPUs."""
