"""Fused kernels: they register for operations, and nothing but `rqjax` itself imports them."""
