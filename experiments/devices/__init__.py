"""Experiments on GPUs, TPUs and Apple's devices."""
