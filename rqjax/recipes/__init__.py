"""Quantizers by the names of papers."""
