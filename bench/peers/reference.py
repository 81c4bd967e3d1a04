"""The reference: the formula in a wider type, on sampled heads and rows; of
gradients on all rows of sampled groups of heads.

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
        return _summed((out4[b, h, i], want)
                       for b, h, i, want in self.samples)


def _summed(pairs):
    """(largest, root mean square) of the differences of pairs of arrays."""
    largest, squares, count = 0.0, 0.0, 0
    for got, want in pairs:
        diff = np.abs(got.astype(want.dtype) - want)
        top = float(diff.max())
        if not top < np.inf:  # NaN as well
            return float("inf"), float("inf")
        largest = max(largest, top)
        squares += float((diff.astype(np.float64) ** 2).sum())
        count += diff.size
    return largest, (squares / count) ** 0.5


def _head_f64(q, k, v, d_out, scale, seen):
    """d_q, and this head's parts of d_k and d_v."""
    q, k, v, d_out = (torch.from_numpy(x).double() for x in (q, k, v, d_out))
    z = q @ k.T * scale
    if seen is not None:
        z.masked_fill_(~torch.from_numpy(seen), -np.inf)
    w = torch.softmax(z, 1)
    dz = d_out @ v.T
    dz = w * (dz - (w * dz).sum(1, keepdim=True))
    return [x.numpy() for x in
            (dz @ k * scale, dz.T @ q * scale, w.T @ d_out)]


def _head_long(q, k, v, d_out, scale, seen):
    q, k, v, d_out = (x.astype(np.longdouble) for x in (q, k, v, d_out))
    scale = np.longdouble(scale)
    z = q @ k.T * scale
    if seen is not None:
        z[~seen] = -np.inf
    w = np.exp(z - z.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    dz = d_out @ v.T
    dz = w * (dz - (w * dz).sum(1, keepdims=True))
    return dz @ k * scale, dz.T @ q * scale, w.T @ d_out


class GradientReference:
    """All rows of d_q, d_k and d_v of some groups of heads."""

    def __init__(self, row, arrays):
        wide = row.dtype == "f64"
        one = _head_long if wide else _head_f64
        cost = row.group * row.q_len * row.kv_len * row.width
        budget = 4e7 if wide else 1e9
        count = int(np.clip(budget / cost, 1, 4))
        seen = arrays.causal_mask() if row.is_causal else None
        self.groups = []
        for index in _sample(row.batch * row.kv_heads, count):
            b, g = divmod(int(index), row.kv_heads)
            heads = range(g * row.group, (g + 1) * row.group)
            parts = [one(arrays.q4[b, h], arrays.k4[b, g], arrays.v4[b, g],
                         arrays.d_out4[b, h], row.width**-0.5, seen)
                     for h in heads]
            d_q, d_k, d_v = zip(*parts)
            self.groups.append((b, g, heads, d_q, sum(d_k), sum(d_v)))

    def errors(self, gradients):
        """(largest, root mean square) absolute error of d_q, d_k and d_v, each
        (B,H,T,D)."""
        got_q, got_k, got_v = gradients
        pairs = []
        for b, g, heads, d_q, d_k, d_v in self.groups:
            pairs += [(got_q[b, h], want) for h, want in zip(heads, d_q)]
            pairs += [(got_k[b, g], d_k), (got_v[b, g], d_v)]
        return _summed(pairs)


def reference(row, arrays):
    kind = GradientReference if row.training else Reference
    return kind(row, arrays)
