"""Vectors and texts to measure with."""
