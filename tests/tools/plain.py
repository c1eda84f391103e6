"""A plain cache: what the compressed one must agree with, token by token in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from rqjax.cache.append import DOMINANT


@jax.jit
def recoded(quantizer, x):
    """What becomes of vectors (batch, heads, unit, dim) that are encoded and decoded."""
    return quantizer.decode(quantizer.encode(x))


class PlainCache:
    """All tokens in full precision; those that the compressed cache holds as codes are recoded when they are read."""

    def __init__(self, cache):
        self.cache = jax.tree.map(np.array, cache)  # its options and quantizers
        batch, heads, _, dim = cache.exact_keys.shape
        self.keys, self.values = ([np.zeros((0, heads, dim), np.float32) for _ in range(batch)] for _ in range(2))

    def append(self, k, v, valid=None):
        for b in range(len(self.keys)):
            count = k.shape[1] if valid is None else int(valid[b])
            for tokens, x in ((self.keys, k), (self.values, v)):
                x = np.asarray(x)[b, k.shape[1] - count :].astype(self.cache.exact_keys.dtype)
                tokens[b] = np.concatenate([tokens[b], x.astype(np.float32)])

    def decoded(self, b):
        """Keys and values (time, heads, dim) of a sequence as attention sees them."""
        cache, result = self.cache, []
        first, length = cache.sinks, len(self.keys[b])
        coded = max(length - cache.sinks - cache.window, 0) // cache.unit * cache.unit
        for name, quantizer in (("keys", cache.key_quantizer), ("values", cache.value_quantizer)):
            x = getattr(self, name)[b].copy()
            if coded:
                part = x[first : first + coded]
                mean = np.zeros_like(x[0])
                if name == "keys" and cache.key_mean is not None:
                    begin = x[first : first + cache.window + cache.unit]
                    mean = begin.mean(0)
                    mean *= ((mean**2).sum(-1) > DOMINANT * (begin**2).sum(-1).mean(0))[:, None]
                units = (part - mean).reshape(-1, cache.unit, *x.shape[1:]).swapaxes(1, 2)
                again = np.stack([np.asarray(recoded(quantizer, jnp.asarray(unit)[None]))[0] for unit in units])
                x[first : first + coded] = again.swapaxes(1, 2).reshape(part.shape) + mean
            result.append(x)
        return result

    def attend(self, q, *, scale=None, mask=None, sliding_window=None, softcap=None, sink_logits=None):
        q = np.asarray(q, np.float64)
        out = np.zeros_like(q)
        scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
        for b in range(q.shape[0]):
            keys, values = (x.astype(np.float64) for x in self.decoded(b))
            length, heads = keys.shape[:2]
            where = np.arange(length) - (length - q.shape[1] + np.arange(q.shape[1]))[:, None]
            seen = where <= 0 if sliding_window is None else (where <= 0) & (where > -sliding_window)
            for h in range(q.shape[2]):
                group = h // (q.shape[2] // heads)
                scores = q[b, :, h] @ keys[:, group].T * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                allowed = seen
                if mask is not None:
                    full = np.broadcast_to(mask, (*q.shape[:1], q.shape[2], q.shape[1], mask.shape[-1]))
                    allowed = seen & full[b, h, :, :length]
                scores = np.where(allowed, scores, -np.inf)
                largest = np.max(scores, axis=1, keepdims=True, initial=-1e300)
                weights = np.exp(scores - largest) * allowed
                total = weights.sum(1, keepdims=True)
                if sink_logits is not None:
                    total = total + np.exp(sink_logits[h] - largest)
                out[b, :, h] = weights @ values[:, group] / np.where(total > 0, total, 1)
        return out


def error(a, b):
    """Relative to the whole of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
