"""Caches whose sequences share pages of codes: the book on the host, and its operations on the device's pages."""
