"""The arrays of a row, made once and shared by every contender."""

import numpy as np

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
        self.kv_lens = None
        if row.kind == "padded":
            low = row.kv_len // 2
            lens = rng.integers(low, row.kv_len + 1, row.batch)
            lens[0] = row.kv_len
            self.kv_lens = lens.astype(np.int64)

    def _random(self, rng, heads, length, heads_first):
        axes = (heads, length) if heads_first else (length, heads)
        shape = (self.row.batch, *axes, self.row.width)
        out = aligned(shape, self.dtype)
        rng.standard_normal(out=out, dtype=self.dtype)
        return out

    def new_out(self):
        return aligned(self.q.shape, self.dtype)

    def bhtd(self, x, heads_first):
        return x if heads_first else x.transpose(0, 2, 1, 3)

    @property
    def q4(self):
        return self.bhtd(self.q, self.q_heads_first)

    @property
    def k4(self):
        return self.bhtd(self.k, self.kv_heads_first)

    @property
    def v4(self):
        return self.bhtd(self.v, self.kv_heads_first)
