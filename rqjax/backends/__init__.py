"""Kernels of devices: which operations they compute for which nests of quantizers, and why not for others.

Each device is a module with a table of its kernels: `hopper` (NVIDIA GPUs), `tpu`, `mlx` (Apple GPUs). Another device
can `register` its own table from anywhere.
"""

from rqjax.backends import hopper as hopper, mlx as mlx, tpu as tpu
from rqjax.backends.finders import Entry as Entry, register as register
