"""Experiments on nearest neighbors."""
