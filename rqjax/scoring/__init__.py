"""Products with codes that are not decoded, which caches and indexes share."""
