"""Caches whose sequences share pages of codes: the book on the host, and what it does to the pages on the device."""
