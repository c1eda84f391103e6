"""A plain cache: what the compressed one must agree with, token by token in NumPy."""

import jax
import numpy as np

import rqjax


@jax.jit
def recoded(quantizer, x):
    """Decodes the codes of vectors (batch, heads, unit, dim)."""
    return quantizer.decode(quantizer.encode(x))


UNITS = 8
"""Vectors that one call recodes."""


class PlainCache:
    """All tokens of each sequence as attention sees them: in full precision, or recoded once the window passed them.

    Of the cache it takes the quantizers and the options; what these mean is written out here again.
    """

    def __init__(self, cache):
        self.cache = jax.tree.map(np.array, cache)
        batch, heads, _, dim = cache.exact_keys.shape
        self.value_dim = cache.value_quantizer.dim
        self.keys, self.values = ([np.zeros((0, heads, d), np.float32)] * batch for d in (dim, self.value_dim))
        self.newest = [(key, value) for key, value in zip(self.keys, self.values, strict=True)]
        """Keys and values of the last `append` in full precision."""
        self.coded = [0] * batch
        self.means = [None] * batch if cache.key_form.mean is None else list(self.cache.key_form.mean)

    def append(self, k, v=None, valid=None, mean=None):
        """Appends tokens; `mean` is what the compressed cache has, equal but for rounding, on which indices depend."""
        for b in range(len(self.keys)):
            count = k.shape[1] if valid is None else int(valid[b])
            before, skipped = len(self.keys[b]), k.shape[1] - count
            key = np.asarray(k)[b, skipped:]
            if self.cache.key_form.rope is not None:
                key = self._turned(key, before + np.arange(count))
            value = key[..., key.shape[-1] - self.value_dim :] if v is None else np.asarray(v)[b, skipped:]
            dtype = self.cache.exact_keys.dtype
            self.newest[b] = tuple(x.astype(dtype).astype(np.float32) for x in (key, value))
            for tokens, x in zip((self.keys, self.values), self.newest[b], strict=True):
                tokens[b] = np.concatenate([tokens[b], x])
            self._encode(b, None if mean is None else np.asarray(mean[b]))

    def truncate(self, lengths):
        """Cuts sequences. Tokens of a unit that is cut are in full precision again, as what they were recoded to."""
        cache = self.cache
        for b, length in enumerate(lengths):
            self.keys[b], self.values[b] = self.keys[b][:length], self.values[b][:length]
            whole = max(length - cache.sinks, 0) // cache.unit * cache.unit
            for tokens in (self.keys[b], self.values[b]):
                cut = tokens[cache.sinks + whole : cache.sinks + self.coded[b]]
                cut[:] = cut.astype(cache.exact_keys.dtype)
            self.coded[b] = min(self.coded[b], whole)

    def _encode(self, b, mean):
        cache, keys, values = self.cache, self.keys[b], self.values[b]
        end = max(len(keys) - cache.sinks - cache.window, 0) // cache.unit * cache.unit
        if end > 0 and self.coded[b] == 0 and cache.key_form.learned:
            self.means[b] = self._mean_of(keys[cache.sinks : cache.sinks + cache.window + cache.unit])
            if mean is not None:
                np.testing.assert_allclose(self.means[b], mean, atol=1e-4)
                self.means[b] = mean
        if end > self.coded[b]:
            passed = slice(cache.sinks + self.coded[b], cache.sinks + end)
            positions = np.arange(passed.start, passed.stop)
            x, mean = keys[passed], 0 if self.means[b] is None else self.means[b]
            if isinstance(cache.key_form, rqjax.BeforeRope):
                decoded = self._recoded(cache.key_quantizer, self._turned(x, -positions) - mean)
                coded = self._turned(decoded + mean, positions)
            else:
                if cache.key_form.rope is not None and self.means[b] is not None:
                    mean = self._turned(np.broadcast_to(mean, x.shape), positions)
                decoded = self._recoded(cache.key_quantizer, x - mean)
                coded = decoded + mean
            keys[passed] = coded
            if cache.values_in_keys:
                values[passed] = coded[..., -self.value_dim :]
            elif isinstance(cache.own_value_quantizer, rqjax.GivenKeys):
                quantizer = cache.own_value_quantizer
                given = self._predicted(quantizer, decoded)
                values[passed] = given + self._recoded(quantizer.inner, values[passed] - given)
            else:
                values[passed] = self._recoded(cache.value_quantizer, values[passed])
        self.coded[b] = max(self.coded[b], end)

    def _recoded(self, quantizer, x):
        """Tokens (time, heads, dim), whole units of them, as a number of units that needs few programs."""
        units = x.reshape(-1, self.cache.unit, *x.shape[1:]).swapaxes(1, 2)
        padding = np.zeros((-len(units) % UNITS, *units.shape[1:]), np.float32)
        pieces = np.concatenate([units, padding]).reshape(-1, UNITS, *units.shape[1:])
        found = np.concatenate([recoded(quantizer, np.float32(piece)) for piece in pieces])[: len(units)]
        return found.swapaxes(1, 2).reshape(x.shape)

    def _predicted(self, quantizer, keys):
        """Values (time, heads, dim) that decoded keys predict: a matrix times the keys of a group side by side."""
        return np.concatenate(
            [
                group.reshape(len(keys), -1) @ matrix
                for group, matrix in zip(
                    np.split(keys, len(quantizer.prediction), axis=1), quantizer.prediction, strict=True
                )
            ],
            axis=1,
        ).reshape(keys.shape)

    def _mean_of(self, keys):
        """Mean of the finite keys; without a rope only if it has three quarters of the energy."""
        if self.cache.key_form.rope is not None:
            keys = self._turned(keys, -self.cache.sinks - np.arange(len(keys)))
        keys = keys[np.isfinite(keys).all((1, 2))]
        if self.cache.key_form.rope is not None:
            return keys.mean(0)
        mean = keys.mean(0)
        return mean * ((mean**2).sum(-1) > 0.75 * (keys**2).sum(-1).mean(0))[:, None]

    def _turned(self, x, positions):
        """Turns by the plain rope: one frequency a plane, whose halves are the first and the last coordinates."""
        rope = self.cache.key_form.rope
        assert rope.kind == "default"
        count = int(x.shape[-1] * rope.share + 1e-6)
        angles = positions[:, None, None] * np.float32(rope.theta ** -(np.arange(0, count, 2) / count))
        left, right, rest = x[..., : count // 2], x[..., count // 2 : count], x[..., count:]
        cos, sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)

    def decoded(self, b):
        """Keys and values (time, heads, dim) of a sequence as attention sees them."""
        return self.keys[b], self.values[b]

    def attend(self, q, *, own=False, scale=None, mask=None, sliding_window=None, softcap=None, sink_logits=None):
        """Attends; with `own` the tokens of the last `append` are seen in full precision, coded or not.

        A sequence that had none then has no queries: its rows are 0.
        """
        q = np.asarray(q, np.float64)
        out = np.zeros((*q.shape[:3], self.value_dim))
        scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
        for b in range(q.shape[0]):
            keys, values = (x.astype(np.float64) for x in self.decoded(b))
            if own and not len(self.newest[b][0]):
                continue
            if own:
                for tokens, new in zip((keys, values), self.newest[b], strict=True):
                    tokens[len(tokens) - len(new) :] = new
            keys, values = (np.where(np.isfinite(x), x, 0) for x in (keys, values))  # which no query is to see
            length, heads = keys.shape[:2]
            positions = length - q.shape[1] + np.arange(q.shape[1])
            y = q[b] if self.cache.key_form.rope is None else self._turned(q[b], positions)
            where = np.arange(length) - positions[:, None]
            seen = where <= 0 if sliding_window is None else (where <= 0) & (where > -sliding_window)
            for h in range(q.shape[2]):
                group = h // (q.shape[2] // heads)
                scores = y[:, h] @ keys[:, group].T * scale
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
    """Relative error, by the norm of all of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
