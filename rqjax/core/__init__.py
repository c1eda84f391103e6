"""What everything rests on: the protocol, pytrees, checks, registries, platforms, and who computes an operation."""
