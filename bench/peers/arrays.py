"""The arrays of a row, made once and shared by every contender."""

import numpy as np

import shapes

NUMPY_TYPE = {"f32": np.float32, "f64": np.float64}


def aligned(shape, dtype):
    """Zeros at a multiple of 64 bytes, so that no contender is unlucky."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


class Arrays:
    """q, k and v of one row as they lie in memory, and an order of axes.

    `q`, `k`, `v` are the arrays in memory order; `bhtd(x, heads_first)` gives
    the (B, H, T, D) view of one of them without a copy.
    """

    def __init__(self, row, seed=1):
        self.row = row
        self.dtype = NUMPY_TYPE[row.dtype]
        self.q_heads_first = row.layout == "bhtd"
        self.kv_heads_first = row.layout in ("bhtd", "cache")
        rng = np.random.default_rng(seed)
        self.q = self._random(rng, row.heads, row.q_len, self.q_heads_first)
        self.k = self._random(rng, row.kv_heads, row.kv_len,
                              self.kv_heads_first)
        self.v = self._random(rng, row.kv_heads, row.kv_len,
                              self.kv_heads_first)
        if row.training:
            self.d_out = self._random(rng, row.heads, row.q_len,
                                      self.q_heads_first)
        self.kv_lens = None
        self.mask = None  # boolean, True = visible; sizes of 1 are broadcast
        if row.kind in ("padded", "keymask"):
            low = row.kv_len // 2
            lens = rng.integers(low, row.kv_len + 1, row.batch)
            lens[0] = row.kv_len
            self.kv_lens = lens.astype(np.int64)
        if row.kind == "keymask":
            keys = np.arange(row.kv_len)[None, None, None, :]
            self.mask = keys < self.kv_lens[:, None, None, None]
        if row.kind == "mask":
            shape = (row.batch, row.heads, row.q_len, row.kv_len)
            self.mask = rng.random(shape, np.float32) < 0.9

    def _random(self, rng, heads, length, heads_first):
        axes = (heads, length) if heads_first else (length, heads)
        shape = (self.row.batch, *axes, self.row.width)
        out = aligned(shape, self.dtype)
        rng.standard_normal(out=out, dtype=self.dtype)
        return out

    def sees(self, b, h, i):
        """Which keys query i sees: a slice, or booleans."""
        row, last = self.row, self.row.kv_len - self.row.q_len + i
        if row.kind == "window":
            return slice(max(0, last + 1 - shapes.WINDOW), last + 1)
        if row.kind == "causal":
            return slice(0, last + 1)
        if row.kind == "padded":
            return slice(0, int(self.kv_lens[b]))
        if self.mask is not None:
            m = self.mask
            return m[b, h % m.shape[1], i % m.shape[2]]
        return slice(0, row.kv_len)

    def causal_mask(self):
        """Booleans (Tq, Tk) of `causal` and `window`."""
        row = self.row
        i = np.arange(row.q_len)[:, None] + row.kv_len - row.q_len
        j = np.arange(row.kv_len)[None, :]
        seen = j <= i
        if row.kind == "window":
            seen &= j > i - shapes.WINDOW
        return seen

    def new_out(self):
        return aligned(self.q.shape, self.dtype)

    def new_gradients(self):
        """Arrays like q, k and v."""
        return [aligned(x.shape, self.dtype) for x in (self.q, self.k, self.v)]

    def bhtd(self, x, heads_first):
        return x if heads_first else x.transpose(0, 2, 1, 3)

    def bhtd_gradients(self, d_q, d_k, d_v):
        first = (self.q_heads_first, self.kv_heads_first, self.kv_heads_first)
        return [self.bhtd(x, f) for x, f in zip((d_q, d_k, d_v), first)]

    @property
    def d_out4(self):
        return self.bhtd(self.d_out, self.q_heads_first)

    @property
    def q4(self):
        return self.bhtd(self.q, self.q_heads_first)

    @property
    def k4(self):
        return self.bhtd(self.k, self.kv_heads_first)

    @property
    def v4(self):
        return self.bhtd(self.v, self.kv_heads_first)
