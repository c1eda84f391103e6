"""Experiments on quantizers."""
