"""PyTorch on CPU: scaled_dot_product_attention, its kernel forced."""

import contextlib
import os

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import shapes

BACKENDS = {"math": SDPBackend.MATH}

KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
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


def variants(row):
    """What is tried for a row:

    flash   the tiled kernel, with enable_gqa for grouped heads; masks as the
            booleans they are
    add     flash with the mask made ready for it: numbers to be added
    math    the composite one, scores in memory
    expand  flash on keys and values repeated for each query head beforehand
    fold    flash, the heads of a group as queries of one head (decoding)
    compose matrix products and softmax, where there is no operator

    For gradients `expand` is part of the call, as they are summed over a group.
    """
    if row.training:
        # Several matrices of the size of the scores are kept for gradients.
        small = 4 * row.scores <= shapes.SCORES_AT_MOST
        names = ["flash"] + (["math"] if small else [])
        return names + (["expand"] if row.group > 1 else [])
    if row.kind == "softcap":
        return ["compose"]
    names = ["flash"]
    if row.kind in ("mask", "keymask", "window"):
        names.append("add")
    if row.scores <= shapes.SCORES_AT_MOST:
        names.append("math")
    if row.group > 1 and row.kv_bytes < 1 << 27:
        names.append("expand")
    if row.group > 1 and row.kind == "decode":
        names.append("fold")
    return names


class Contender:
    rival = "torch"
    seen = {}  # kernels by what decides about them

    def __init__(self, arrays, variant):
        row = arrays.row
        self.name = variant
        self.backend = BACKENDS.get(variant, SDPBackend.FLASH_ATTENTION)
        q, k, v = (
            torch.from_numpy(x) for x in (arrays.q4, arrays.k4, arrays.v4)
        )
        self.options = {}
        self.shape = tuple(q.shape)
        if variant == "fold":
            q = q.reshape(row.batch, row.kv_heads, row.group, row.width)
        elif variant == "expand":
            k, v = (x.repeat_interleave(row.group, 1) for x in (k, v))
        elif row.group > 1:
            self.options["enable_gqa"] = True
        if row.kind == "causal" and row.q_len == row.kv_len:
            self.options["is_causal"] = True
        elif row.is_causal or arrays.kv_lens is not None or \
                arrays.mask is not None:
            self.options["attn_mask"] = self._mask(row, arrays, q.dtype)
        self.args = (q, k, v)
        self.row = row
        self.kernels = self._kernels(row)

    def _mask(self, row, arrays, dtype):
        """Where a contender has no boolean one to share: additive, in q's
        type, which is what flash converts every other mask to."""
        if arrays.mask is not None:
            seen = torch.from_numpy(arrays.mask)
        elif row.is_causal:
            seen = torch.from_numpy(arrays.causal_mask())
        else:
            j = torch.arange(row.kv_len)[None, None, None, :]
            seen = j < torch.from_numpy(arrays.kv_lens)[:, None, None, None]
        if self.name == "flash" and row.kind in ("mask", "keymask", "window"):
            return seen
        mask = torch.zeros(seen.shape, dtype=dtype)
        return mask.masked_fill_(~seen, float("-inf"))

    def _compose(self):
        """Products for all heads of a group at once; in place where it can."""
        row, (q, k, v) = self.row, self.args
        q = q.reshape(row.batch, row.kv_heads, row.group * row.q_len,
                      row.width)
        scale, cap = row.width**-0.5, shapes.SOFTCAP

        def call():
            z = (q * (scale / cap)) @ k.transpose(-2, -1)
            return torch.softmax(z.tanh_().mul_(cap), -1) @ v

        return call

    def _kernels(self, row):
        """Names of the ATen kernels that one such call runs."""
        key = (self.backend, row.dtype, row.direction, *sorted(self.options))
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
        if self.name == "compose":
            return self._compose()
        call = torch.nn.functional.scaled_dot_product_attention
        (q, k, v), options = self.args, self.options
        return lambda: call(q, k, v, **options)

    def result(self):
        with self.active():
            return self.caller()().reshape(self.shape).numpy()


class Training(Contender):
    """Gradients by autograd: of a result that is there, or of a new one."""

    def __init__(self, arrays, variant):
        row = arrays.row
        self.name = variant
        self.backend = BACKENDS.get(variant, SDPBackend.FLASH_ATTENTION)
        self.row = row
        self.options = {}
        if row.group > 1 and variant != "expand":
            self.options["enable_gqa"] = True
        if row.kind == "causal":
            self.options["is_causal"] = True  # as many queries as keys
        self.leaves = tuple(
            torch.from_numpy(x).requires_grad_()
            for x in (arrays.q4, arrays.k4, arrays.v4)
        )
        self.d_out = torch.from_numpy(arrays.d_out4)
        self.kept = None
        self.kernels = self._kernels(row)

    @contextlib.contextmanager
    def active(self):
        with sdpa_kernel(self.backend):
            yield

    def _forward(self):
        q, k, v = self.leaves
        if self.name == "expand":
            row = self.row
            k, v = (
                x[:, :, None]
                .expand(-1, -1, row.group, -1, -1)
                .reshape(row.batch, row.heads, row.kv_len, row.width)
                for x in (k, v)
            )
        call = torch.nn.functional.scaled_dot_product_attention
        return call(q, k, v, **self.options)

    def caller(self):
        grad, leaves, d_out = torch.autograd.grad, self.leaves, self.d_out
        if self.row.direction == "both":
            return lambda: grad(self._forward(), leaves, d_out)
        if self.kept is None:
            self.kept = self._forward()
        out = self.kept
        return lambda: grad(out, leaves, d_out, retain_graph=True)

    def result(self):
        with self.active():
            return [x.numpy() for x in self.caller()()]


def contender(arrays, variant):
    kind = Training if arrays.row.training else Contender
    return kind(arrays, variant)
