"""Which files are collected: those of the GPU kernels only where jax can express them."""

import hopper

collect_ignore = [] if hopper.has_kernels() else ["test_lowering.py"]
if not hopper.wheels():
    collect_ignore.append("test_compile.py")
