"""A decoder run layer by layer gives what the decoder gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import layered, models

CASES = {"qwen2-d64": "eden_8+turned", "gemma3-d256": "eden_8/bfloat16+pre_rope", "deepseek-r128": "eden_8"}


@pytest.mark.parametrize("name", CASES)
def test_layer_by_layer_is_chunk_by_chunk(name):
    """Sliding windows, keys before rotary positions, means that turn, latents; chunks longer than the window.

    Sums in another order turn single codes over, which at 8 bits move logits by some hundredths."""
    decoder, _ = models.load(name)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 192)), jnp.int32)
    caches = decoder.caches(CASES[name], jax.random.key(0), 2, 192, window=32, sinks=4, dtype=jnp.float32)
    step = jax.jit(functools.partial(type(decoder).__call__, decoder))
    logits, own = [], caches
    for start in range(0, 192, 48):
        out, own = step(tokens[:, start : start + 48], own)
        logits.append(out)
    found = decoder.logits(layered.cached(decoder, tokens, caches, 48))
    np.testing.assert_allclose(found, jnp.concatenate(logits, axis=1), atol=0.05)
    assert np.abs(found - jnp.concatenate(logits, axis=1)).mean() < 1e-3
    np.testing.assert_allclose(decoder.logits(layered.exact(decoder, tokens)), decoder(tokens)[0], atol=2e-3)
