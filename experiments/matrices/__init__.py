"""Experiments on matrices under a memory budget."""
