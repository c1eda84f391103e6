"""The platform of the code: what differs on a CPU or on Apple's devices, and what is made on the host."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rqjax.core.checks import is_traced

APPLE = ("METAL", "mps")
"""The platforms of jax-metal and jax-mps. Neither has Pallas; what else they lack is listed in tests/tools/apple.py."""

PLATFORM: ContextVar[str | None] = ContextVar("platform", default=None)
"""Platform to formulate for in the place of the actual one; functions compiled before stay as they are."""

CAPABILITY: ContextVar[str | None] = ContextVar("capability", default=None)
"""Compute capability of an NVIDIA GPU to formulate for in the place of the actual device's."""


def platform() -> str:
    """The platform to formulate for: "cpu", "gpu", "METAL", "mps" or another one of jax. It is that of
    `jax.default_device`, if that is set."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return PLATFORM.get() or getattr(device, "platform", device) or jax.default_backend()


def on_cpu() -> bool:
    return platform() == "cpu"


def on_gpu() -> bool:
    """Returns whether the code is for NVIDIA's or AMD's GPUs, where the host launches each operation of a program."""
    return platform() == "gpu"


def compute_capability() -> str | None:
    """Returns the compute capability of an NVIDIA GPU, as "9.0", or None for another device."""
    return CAPABILITY.get() or getattr(jax.devices()[0], "compute_capability", None)


def on_apple() -> bool:
    return platform() in APPLE


def made_on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `make`, which draws random numbers or factorizes matrices, on the CPU where the device is Apple's.

    Apple's random normals are slow, and there is neither QR nor eigenvectors. The result is moved to the device. Under
    jit and vmap, which cannot leave the device, it is made there.

    Raises:
      RuntimeError: jax has no CPU beside the device.
    """

    @functools.wraps(make)
    def run(*args, **options):
        if not on_apple() or any(map(is_traced, jax.tree.leaves((args, options)))):
            return make(*args, **options)
        cpu, token = _cpu(), PLATFORM.set("cpu")
        try:
            with jax.default_device(cpu):
                made = make(*_moved(args, cpu), **_moved(options, cpu))
        finally:
            PLATFORM.reset(token)
        return _moved(made, jax.devices()[0])

    return run


def plain_key(key: Array) -> Array:
    """Returns a random key to pass to a jitted function, on Apple's devices as its numbers. Typed keys are lowered with
    a constraint of their sharding, a custom call that jax-metal does not know (jax issue 16287)."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed and on_apple() else key


def _cpu() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        raise RuntimeError(f"jax needs a CPU beside {platform()}: set JAX_PLATFORMS={platform()},cpu") from None


def _moved(tree: PyTree, device: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf, tree)
