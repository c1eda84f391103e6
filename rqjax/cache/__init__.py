"""The compressed key-value cache, and attention to it."""
