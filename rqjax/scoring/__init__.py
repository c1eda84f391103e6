"""Products with codes that are not decoded, which caches and indexes share, and the layout of codes in a cache."""
