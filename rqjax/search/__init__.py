"""Nearest neighbours over codes."""
