"""Quantizers: pytrees with `encode`, `decode` and `dot`, small ones nested in big ones."""
