"""Experiments on nearest neighbours."""
