"""Nearest neighbors over codes."""
