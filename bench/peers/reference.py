"""The reference: the formula in a wider type, on sampled heads and rows.

float32 rows are checked against float64, float64 rows against long double
(80 bits on x86). No BLAS of NumPy's is called, so none of its threads wakes.
"""

import numpy as np
import torch

import shapes


def _sample(n, count):
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(np.int64))


def _row_f64(q, k, v, scale, cap):
    q, k, v = (torch.from_numpy(x).double() for x in (q, k, v))
    z = k @ q * scale
    if cap:
        z = cap * torch.tanh(z / cap)
    return (torch.softmax(z, 0) @ v).numpy()


def _row_long(q, k, v, scale, cap):
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    z = (k * q).sum(1) * np.longdouble(scale)
    if cap:
        z = cap * np.tanh(z / np.longdouble(cap))
    w = np.exp(z - z.max())
    return (w[:, None] * v).sum(0) / w.sum()


class Reference:
    def __init__(self, row, arrays):
        self.samples = []
        few = row.dtype == "f64"
        budget = 2e6 if few else 2e7  # numbers of k and v read
        cost = 2 * row.kv_len * row.width
        count = int(np.clip(budget / cost, 8, 512))
        heads = _sample(row.batch * row.heads, 4)
        rows = _sample(row.q_len, max(2, count // len(heads)))
        one = _row_long if few else _row_f64
        scale = row.width**-0.5
        cap = shapes.SOFTCAP if row.kind == "softcap" else 0
        group = row.heads // row.kv_heads
        for index in heads:
            b, h = divmod(int(index), row.heads)
            for i in rows:
                seen = arrays.sees(b, h, int(i))
                want = one(
                    arrays.q4[b, h, i],
                    arrays.k4[b, h // group][seen],
                    arrays.v4[b, h // group][seen],
                    scale,
                    cap,
                )
                self.samples.append((b, h, int(i), want))

    def errors(self, out4):
        """(largest, root mean square) absolute error of a (B,H,T,D) array."""
        largest, squares, count = 0.0, 0.0, 0
        for b, h, i, want in self.samples:
            diff = np.abs(out4[b, h, i].astype(want.dtype) - want)
            top = float(diff.max())
            if not top < np.inf:  # NaN as well
                return float("inf"), float("inf")
            largest = max(largest, top)
            squares += float((diff.astype(np.float64) ** 2).sum())
            count += diff.size
        return largest, (squares / count) ** 0.5
