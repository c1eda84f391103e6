"""Experiments on caches, without a model."""
