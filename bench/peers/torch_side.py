"""PyTorch on CPU: scaled_dot_product_attention, its kernel forced."""

import contextlib
import os

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}

KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math",
}


@contextlib.contextmanager
def quiet_stderr():
    """The profiler logs its start and stop there."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class Contender:
    """backend: flash or math; expand: give the group's K and V as views of
    stride 0 over the heads instead of asking for enable_gqa."""

    rival = "torch"
    seen = {}  # kernels by what decides about them

    def __init__(self, arrays, backend, expand=False):
        row = arrays.row
        self.name = backend + ("-expand" if expand else "")
        self.backend = BACKENDS[backend]
        q, k, v = (
            torch.from_numpy(x) for x in (arrays.q4, arrays.k4, arrays.v4)
        )
        self.options = {}
        group = row.heads // row.kv_heads
        if group > 1 and expand:
            k, v = (self._expand(x, group) for x in (k, v))
        elif group > 1:
            self.options["enable_gqa"] = True
        if row.kind == "causal" and row.q_len == row.kv_len:
            self.options["is_causal"] = True
        elif row.kind == "causal":
            self.options["attn_mask"] = self._bottom_right(row, q.dtype)
        elif row.kind == "padded":
            self.options["attn_mask"] = self._padding(row, arrays, q.dtype)
        self.args = (q, k, v)
        self.kernels = self._kernels(row)

    @staticmethod
    def _expand(x, group):
        b, h, t, d = x.shape
        x = x[:, :, None].expand(b, h, group, t, d)
        return x.reshape(b, h * group, t, d)

    @staticmethod
    def _bottom_right(row, dtype):
        """Additive, in q's type: what flash converts every other mask to."""
        i = torch.arange(row.q_len)[:, None]
        j = torch.arange(row.kv_len)[None, :]
        mask = torch.zeros(row.q_len, row.kv_len, dtype=dtype)
        hidden = j > i + (row.kv_len - row.q_len)
        return mask.masked_fill_(hidden, float("-inf"))

    @staticmethod
    def _padding(row, arrays, dtype):
        j = torch.arange(row.kv_len)[None, None, None, :]
        lens = torch.from_numpy(arrays.kv_lens)[:, None, None, None]
        mask = torch.zeros(row.batch, 1, 1, row.kv_len, dtype=dtype)
        return mask.masked_fill_(j >= lens, float("-inf"))

    def _kernels(self, row):
        """Names of the ATen kernels that one such call runs."""
        key = (self.backend, row.dtype, *sorted(self.options))
        if key not in self.seen:
            with quiet_stderr(), torch.profiler.profile() as profile:
                self.result()
            names = {event.key for event in profile.key_averages()}
            self.seen[key] = names & KERNELS
        return self.seen[key]

    @contextlib.contextmanager
    def active(self):
        with torch.inference_mode(), sdpa_kernel(self.backend):
            yield

    def caller(self):
        call = torch.nn.functional.scaled_dot_product_attention
        (q, k, v), options = self.args, self.options
        return lambda: call(q, k, v, **options)

    def result(self):
        with self.active():
            return self.caller()().numpy()
