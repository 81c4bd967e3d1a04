#!/usr/bin/env python3
"""Write the golden vectors of tests/golden from PyTorch.

requirements: torch==2.13.0 numpy

Run:  python3 tests/make_golden.py     (writes beside itself, same bytes
always: all inputs come from seeded generators)

Every case is made twice, in float64 and in float32. The layout of what is
written is described in tests/golden/README.md. PyTorch's empty rows, causal
alignment and mask polarities are those of the calls used here; they are
written down in each case.txt in the words of attn.h, never left to a default.
"""

import os
import shutil
import zlib

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
TYPES = {"f64": (np.float64, torch.float64), "f32": (np.float32, torch.float32)}

torch.set_num_threads(1)
# The fast path of nn.MultiheadAttention does not honour all its arguments.
torch.backends.mha.set_fastpath_enabled(False)


def rng_of(name):
    """One generator a case, so that adding a case moves no other."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def four(a):
    """The shape of an attn_tensor: leading sizes of 1 are added."""
    return a.reshape((1,) * (4 - a.ndim) + a.shape)


def write(name, lines, tensors):
    folder = os.path.join(HERE, name)
    os.makedirs(folder)
    for role, value in tensors.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy()
        np.save(os.path.join(folder, role + ".npy"),
                np.ascontiguousarray(four(value)))
    with open(os.path.join(folder, "case.txt"), "w") as f:
        for line in lines:
            f.write(line + "\n")
        f.write("tensors " + " ".join(tensors) + "\n")


def draw(rng, shape, dtype, factor=1.0):
    return torch.from_numpy((rng.standard_normal(shape) * factor)
                            .astype(TYPES[dtype][0]))


# Attention ----------------------------------------------------------------


def make_mask(rng, kind, shape, dtype):
    """A mask that leaves every row at least one key (column 0)."""
    hidden = rng.random(shape) < 0.4
    if shape[-1] > 1:
        hidden[..., 0] = False
    if kind == "keep":
        return torch.from_numpy(~hidden)
    values = rng.standard_normal(shape)
    values[hidden] = -np.inf
    return torch.from_numpy(values.astype(TYPES[dtype][0]))


def sdpa(name, B, Hq, Hkv, Tq, Tk, D, Dv, masks=None, causal=False,
         scale=None, factor=1.0, empty_row=False):
    for dtype in TYPES:
        rng = rng_of(name)
        q = draw(rng, (B, Hq, Tq, D), dtype, factor)
        k = draw(rng, (B, Hkv, Tk, D), dtype, factor)
        v = draw(rng, (B, Hkv, Tk, Dv), dtype)
        lines = ["op sdpa", "dtype " + dtype]
        tensors = {"q": q, "k": k, "v": v}
        mask = None
        if masks:
            kind, shape = masks
            mask = make_mask(rng, kind, shape, dtype)
            if empty_row:
                mask[..., Tq // 2, :] = False if kind == "keep" else -np.inf
            tensors["mask0"] = mask.numpy().astype(
                np.uint8 if kind == "keep" else TYPES[dtype][0])
            lines.append("mask %s mask0" % kind)
        if causal:
            lines.append("causal top_left")
        if scale is not None:
            lines.append("scale %s" % float(scale).hex())
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=Hq != Hkv)
        assert torch.isfinite(out).all(), name
        tensors["out"] = out
        # Not results of the call above, but the same formula in PyTorch.
        z = q @ k.repeat_interleave(Hq // Hkv, 1).transpose(-1, -2)
        z = z * (D ** -0.5 if scale is None else scale)
        if mask is not None:
            z = (z.masked_fill(~mask, -np.inf) if mask.dtype == torch.bool
                 else z + mask)
        if causal:
            z = z.masked_fill(~torch.ones(Tq, Tk, dtype=torch.bool).tril(),
                              -np.inf)
        tensors["lse"] = torch.logsumexp(z, -1, keepdim=True)
        if Tq * Tk <= 100:
            tensors["weights"] = torch.nan_to_num(torch.softmax(z, -1))
        write(name + "_" + dtype, lines, tensors)


# What changes the scores or the rules -------------------------------------
#
# PyTorch has these as functions that flex_attention calls for each score. The
# formulas are written out here, and where flex_attention can express a case
# its result is compared with them before anything is written.


def alibi_slopes(H):
    """Of the paper, for a power of two of heads."""
    return torch.tensor([2.0 ** (-8.0 * (h + 1) / H) for h in range(H)],
                        dtype=torch.float64)


def documents(rng, B, T, most):
    """Numbers of documents one after the other, some of them one row long."""
    lengths = [rng.integers(1, most + 1, T) for _ in range(B)]
    return np.stack([np.repeat(np.arange(T), n)[:T] for n in lengths])


def by_flex(q, k, v, score_mod, mask_mod):
    """The same numbers from flex_attention, in its eager mode on the CPU."""
    from torch.nn.attention.flex_attention import (create_block_mask,
                                                   flex_attention)
    B, H, Tq, _ = q.shape
    mask = create_block_mask(mask_mod, B, H, Tq, k.shape[2], device="cpu")
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask,
                          enable_gqa=True)


def scored(name, B, Hq, Hkv, Tq, Tk, D, Dv, causal=None, align="top_left",
           window=None, softcap=None, alibi=False, sinks=False, segments=0,
           blocks=None, added=False, factor=1.0):
    for dtype in TYPES:
        rng = rng_of(name)
        q = draw(rng, (B, Hq, Tq, D), dtype, factor)
        k = draw(rng, (B, Hkv, Tk, D), dtype, factor)
        v = draw(rng, (B, Hkv, Tk, Dv), dtype)
        lines = ["op sdpa", "dtype " + dtype]
        tensors = {"q": q, "k": k, "v": v}
        align = causal or align
        apart = (torch.arange(Tq)[:, None] - torch.arange(Tk)[None, :] +
                 (Tk - Tq if align == "bottom_right" else 0))
        visible = torch.ones(B, Hq, Tq, Tk, dtype=torch.bool)
        if causal:
            lines.append("causal " + causal)
            visible &= apart >= 0
        elif window or alibi:
            lines.append("align " + align)
        if window:
            lines.append("window %d %d" % window)
            left, right = window
            visible &= (apart <= left) if left >= 0 else True
            visible &= (-apart <= right) if right >= 0 else True
        if segments:
            of = documents(rng, B, max(Tq, Tk), segments)
            tensors["q_segments"] = of[:, :Tq].reshape(1, 1, B, Tq)
            tensors["kv_segments"] = of[:, :Tk].reshape(1, 1, B, Tk)
            visible &= torch.from_numpy(of[:, None, :Tq, None] ==
                                        of[:, None, None, :Tk])
        if blocks:
            rows, columns = -(-Tq // blocks[0]), -(-Tk // blocks[1])
            keep = torch.from_numpy(rng.random((B, Hq, rows, columns)) < 0.6)
            keep[..., 0] = True
            lines.append("block %d %d" % blocks)
            tensors["blocks"] = keep.numpy().astype(np.uint8)
            visible &= keep.repeat_interleave(blocks[0], 2).repeat_interleave(
                blocks[1], 3)[:, :, :Tq, :Tk]
        raw = q @ k.repeat_interleave(Hq // Hkv, 1).transpose(-1, -2)
        raw = raw * D ** -0.5
        capped = raw
        if softcap:
            lines.append("softcap %s" % float(softcap).hex())
            capped = softcap * torch.tanh(raw / softcap)
        z = capped
        if added:
            mask = make_mask(rng, "add", (Hq, Tq, Tk), dtype)
            tensors["mask0"] = mask
            lines.append("mask add mask0")
            z = z + mask
        if alibi:
            slopes = alibi_slopes(Hq).to(TYPES[dtype][1])
            tensors["alibi"] = slopes
            z = z - slopes[:, None, None] * apart.abs()
        z = z.masked_fill(~visible, -np.inf)
        with_sink = z
        if sinks:
            logits = draw(rng, (Hq,), dtype)
            tensors["sinks"] = logits
            with_sink = torch.cat(
                [z, logits[:, None, None].expand(B, Hq, Tq, 1)], -1)
        w = torch.nan_to_num(torch.softmax(with_sink, -1))[..., :Tk]
        out = w @ v.repeat_interleave(Hq // Hkv, 1)
        assert torch.isfinite(out).all(), name
        if not (sinks or added or blocks):
            cap = lambda s: softcap * torch.tanh(s / softcap) if softcap else s
            bias = (lambda h, i, j: slopes[h] * apart[i, j].abs()) if alibi \
                else (lambda h, i, j: 0.0)
            flex = by_flex(q, k, v,
                           lambda s, b, h, i, j: cap(s) - bias(h, i, j),
                           lambda b, h, i, j: visible[b, h, i, j])
            assert torch.allclose(out, flex, rtol=1e-4, atol=1e-5), name
        tensors["out"] = out
        tensors["lse"] = torch.logsumexp(with_sink, -1, keepdim=True)
        tensors["max_weight"] = w.amax(-1, keepdim=True)
        squares = (w * w).sum(-1, keepdim=True)
        tensors["effective_keys"] = torch.where(squares > 0, 1 / squares, 0.0)
        tensors["entropy"] = -torch.xlogy(w, w).sum(-1, keepdim=True)
        tensors["key_sums"] = w.sum(-2, keepdim=True)
        if Tq * Tk <= 100:
            tensors.update(scores_raw=raw, scores_capped=capped, scores=z,
                           weights=w)
        write(name + "_" + dtype, lines, tensors)


# Gradients ----------------------------------------------------------------
#
# The loss is sum of out * d_out, and of lse * d_lse where that is asked for, in
# the formula written out: every score is tau (q.k), and so on as in attn.h, so
# that torch.autograd gives the gradients of tau, the slopes and the sinks too.
# Where F.scaled_dot_product_attention can express a case, the gradients of its
# arguments are its own. Both types have the same numbers, which are of float32:
# what float64 gives is exact enough to measure both libraries' float32.


def single(rng, shape, factor=1.0):
    return torch.from_numpy(
        (rng.standard_normal(shape) * factor).astype(np.float32)
        .astype(np.float64))


def backward(name, B, Hq, Hkv, Tq, Tk, D, Dv, masks=(), causal=None,
             align=None, window=None, scale=None, softcap=None, alibi=None,
             sinks=None, d_lse=False, q_lens=None, kv_lens=None,
             kv_starts=None, empty_row=False, factor=1.0):
    rng = rng_of(name)
    q = single(rng, (B, Hq, Tq, D), factor)
    k = single(rng, (B, Hkv, Tk, D), factor)
    v = single(rng, (B, Hkv, Tk, Dv))
    d_out = single(rng, (B, Hq, Tq, Dv))
    lines, given, lengths, visible = [], {}, {}, torch.ones(
        B, Hq, Tq, Tk, dtype=torch.bool)
    for kind, shape in masks:
        role = "mask%d" % len([m for m in given if m.startswith("mask")])
        mask = make_mask(rng, kind, shape, "f32")
        if empty_row:
            mask[..., Tq // 2, :] = False if kind == "keep" else -np.inf
        lines.append("mask %s %s" % (kind, role))
        if kind == "keep":
            visible = visible & mask
        else:
            mask = mask.double()
        given[role] = mask
    q_len = torch.tensor(q_lens or [Tq] * B).reshape(B, 1, 1, 1)
    kv_len = torch.tensor(kv_lens or [Tk] * B).reshape(B, 1, 1, 1)
    kv_start = torch.tensor(kv_starts or [0] * B).reshape(B, 1, 1, 1)
    i = torch.arange(Tq).reshape(1, 1, Tq, 1)
    j = torch.arange(Tk).reshape(1, 1, 1, Tk)
    align = causal or align
    apart = i - j + (kv_len - q_len if align == "bottom_right" else 0)
    visible = visible & (i < q_len) & (j < kv_len) & (j >= kv_start)
    if causal:
        lines.append("causal " + causal)
        visible = visible & (apart >= 0)
    elif align:
        lines.append("align " + align)
    if window:
        lines.append("window %d %d" % window)
        visible = visible & (apart <= window[0])
        visible = visible & ((-apart <= window[1]) | (window[1] < 0))
    if scale is not None:
        lines.append("scale %s" % float(scale).hex())
    if softcap:
        lines.append("softcap %s" % float(softcap).hex())
    for role, lens in (("q_lens", q_lens), ("kv_lens", kv_lens),
                       ("kv_starts", kv_starts)):
        if lens:
            lengths[role] = np.array(lens, np.int64)
    if alibi:
        given["alibi"] = (alibi_slopes(Hq) if alibi == "heads" else
                          single(rng, (B, Hq, 1, 1)).abs())
    if sinks:
        given["sinks"] = single(rng, (Hq,) if sinks == "heads" else
                                (B, Hq, 1, 1))
    d_sums = single(rng, (B, Hq, Tq, 1)) if d_lse else None

    for dtype, (_, type_) in TYPES.items():
        leaf = lambda x: x.to(type_).requires_grad_() \
            if x.is_floating_point() else x
        x = {role: leaf(t) for role, t in
             dict(q=q, k=k, v=v, **given).items()}
        tau = torch.tensor(D ** -0.5 if scale is None else scale,
                           dtype=type_, requires_grad=True)
        group = Hq // Hkv
        z = tau * (x["q"] @ x["k"].repeat_interleave(group, 1)
                   .transpose(-1, -2))
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        for role in given:
            if role.startswith("mask") and x[role].is_floating_point():
                z = z + x[role]
                visible = visible & (given[role] > -np.inf)
        if alibi:
            z = z - x["alibi"].reshape(-1, Hq, 1, 1) * apart.abs()
        z = z.masked_fill(~visible, -np.inf)
        if sinks:
            logits = x["sinks"].reshape(-1, Hq, 1, 1)
            z = torch.cat([z, logits.expand(B, Hq, Tq, 1)], -1)
        # Rows that see nothing are taken out before the softmax, as their
        # gradient would be NaN; so are those at and beyond q_lens.
        nothing = (z == -np.inf).all(-1, keepdim=True) | (i >= q_len)
        z = z.masked_fill(nothing, 0.0)
        w = torch.softmax(z, -1).masked_fill(nothing, 0.0)[..., :Tk]
        out = w @ x["v"].repeat_interleave(group, 1)
        lse = torch.logsumexp(z, -1, keepdim=True).masked_fill(nothing,
                                                               -np.inf)
        loss = (out * d_out.to(type_)).sum()
        if d_lse:
            alive = lse.masked_fill(nothing, 0.0)
            loss = loss + (alive * d_sums.to(type_)).sum()
        wanted = {"d_" + role: t for role, t in x.items()
                  if t.is_floating_point()}
        wanted["d_scale"] = tau
        of = dict(zip(wanted, torch.autograd.grad(loss, wanted.values())))

        simple = not (d_lse or softcap or alibi or sinks or window or q_lens or
                      kv_lens or kv_starts or causal == "bottom_right")
        if simple and len(masks) <= 1:
            y = {role: t.detach().clone().requires_grad_(t.requires_grad)
                 for role, t in x.items()}
            theirs = F.scaled_dot_product_attention(
                y["q"], y["k"], y["v"], attn_mask=y.get("mask0"),
                is_causal=causal is not None, scale=scale,
                enable_gqa=Hq != Hkv)
            leaves = {"d_" + role: t for role, t in y.items()
                      if t.requires_grad}
            grads = torch.autograd.grad((theirs * d_out.to(type_)).sum(),
                                        leaves.values())
            for role, grad in zip(leaves, grads):
                near = 1e-12 if dtype == "f64" else 1e-4
                assert torch.allclose(grad, of[role], near, near), (name, role)
                of[role] = grad
            out = theirs
        tensors = {role: t.to(torch.uint8) if t.dtype == torch.bool else t
                   for role, t in x.items()}
        tensors.update(lengths, d_out=d_out.to(type_))
        if d_lse:
            tensors["d_lse"] = d_sums.to(type_)
        tensors.update(out=out, lse=lse)
        for role, grad in of.items():
            assert torch.isfinite(grad).all(), (name, role)
            tensors[role] = grad
        write(name + "_" + dtype, ["op sdpa", "dtype " + dtype] + lines,
              tensors)


# Layers -------------------------------------------------------------------


def mha(name, B, Tq, Tk, E, H, bias=True, kdim=None, vdim=None, self_=True,
        batch_first=True, attn_mask=None, padding=False, average=False,
        causal=False, in_out=False,
        gain=1.0):
    for dtype in TYPES:
        rng = rng_of(name)
        layer = torch.nn.MultiheadAttention(
            E, H, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first,
            dtype=TYPES[dtype][1])
        Ek, Ev = kdim or E, vdim or E
        parts = [draw(rng, (E, n), dtype, gain * n ** -0.5)
                 for n in (E, Ek, Ev, E)]
        biases = [draw(rng, (E,), dtype, 0.5) for _ in range(4)]
        separate = kdim is not None or vdim is not None
        with torch.no_grad():
            if separate:
                layer.q_proj_weight.copy_(parts[0])
                layer.k_proj_weight.copy_(parts[1])
                layer.v_proj_weight.copy_(parts[2])
            else:
                layer.in_proj_weight.copy_(torch.cat(parts[:3]))
            layer.out_proj.weight.copy_(parts[3])
            if bias:
                layer.in_proj_bias.copy_(torch.cat(biases[:3]))
                layer.out_proj.bias.copy_(biases[3])

        order = (lambda t, e: (B, t, e)) if batch_first else (
            lambda t, e: (t, B, e))
        x_q = draw(rng, order(Tq, E), dtype)
        x_k = x_q if self_ else draw(rng, order(Tk, Ek), dtype)
        x_v = x_q if self_ else draw(rng, order(Tk, Ev), dtype)
        lines = ["op mha", "dtype " + dtype, "heads %d" % H,
                 "weight_layout " + ("in_out" if in_out else "out_in"),
                 "input " + ("bte" if batch_first else "tbe")]
        tensors = {"x_q": x_q}
        if not self_:
            tensors.update(x_k=x_k, x_v=x_v)
        if in_out:
            for role, w in zip(("w_q", "w_k", "w_v", "w_o"), parts):
                tensors[role] = w.T
        elif separate:
            tensors.update(w_q=parts[0], w_k=parts[1], w_v=parts[2],
                           w_o=parts[3])
        else:
            tensors.update(w_qkv=torch.cat(parts[:3]), w_o=parts[3])
        if bias:
            if separate or in_out:
                tensors.update(b_q=biases[0], b_k=biases[1], b_v=biases[2])
            else:
                tensors["b_qkv"] = torch.cat(biases[:3])
            tensors["b_o"] = biases[3]

        options = {}
        if causal:
            hidden = torch.ones(Tq, Tk, dtype=torch.bool).triu(1)
            options.update(attn_mask=hidden, is_causal=True)
            lines.append("causal top_left")
        elif attn_mask in ("drop2", "drop3"):
            shape = (Tq, Tk) if attn_mask == "drop2" else (B * H, Tq, Tk)
            hidden = rng.random(shape) < 0.4
            hidden[..., 0] = False
            options["attn_mask"] = torch.from_numpy(hidden)
            lines.append("mask drop mask0")
            tensors["mask0"] = hidden.astype(np.uint8).reshape(
                (1, 1, Tq, Tk) if attn_mask == "drop2" else (B, H, Tq, Tk))
        elif attn_mask == "add":
            added = make_mask(rng, "add", (Tq, Tk), dtype)
            options["attn_mask"] = added
            lines.append("mask add mask0")
            tensors["mask0"] = added
        if padding:
            lens = rng.integers(1, Tk + 1, B)
            hidden = np.arange(Tk)[None, :] >= lens[:, None]
            if attn_mask == "add":  # PyTorch wants both masks of one type
                add = np.where(hidden, -np.inf, 0).astype(TYPES[dtype][0])
                options["key_padding_mask"] = torch.from_numpy(add)
            else:
                options["key_padding_mask"] = torch.from_numpy(hidden)
            lines.append("mask drop mask1")
            tensors["mask1"] = hidden.astype(np.uint8).reshape(B, 1, 1, Tk)
        out, weights = layer(x_q, x_k, x_v, need_weights=True,
                             average_attn_weights=average, **options)
        assert torch.isfinite(out).all(), name
        tensors["out"] = out
        if average:
            tensors["weights_mean"] = weights.reshape(B, 1, Tq, Tk)
        else:
            tensors["weights"] = weights
        write(name + "_" + dtype, lines, tensors)


def main():
    for entry in os.listdir(HERE):
        if os.path.isdir(os.path.join(HERE, entry)):
            shutil.rmtree(os.path.join(HERE, entry))

    # Five tokens, as in the article. The gain keeps outputs below 1, so that
    # the last place of a number is at most 1.1e-16.
    sdpa("article_single", 1, 1, 1, 5, 5, 4, 4)
    sdpa("article_causal", 1, 1, 1, 5, 5, 4, 4, causal=True)
    mha("article_multihead", 1, 5, 5, 16, 4, bias=False, in_out=True,
        gain=0.6)
    mha("article_multihead_causal", 1, 5, 5, 16, 4, bias=False, in_out=True,
        causal=True, gain=0.6)
    mha("article_multihead_cross", 1, 5, 7, 16, 4, bias=False, in_out=True,
        self_=False, gain=0.6)

    sdpa("sdpa_one", 1, 1, 1, 1, 1, 1, 1)
    sdpa("sdpa_17", 2, 2, 2, 17, 17, 5, 5)
    sdpa("sdpa_65", 1, 2, 2, 65, 65, 8, 8)
    sdpa("sdpa_130", 1, 1, 1, 130, 130, 16, 16)
    sdpa("sdpa_cross_5_130", 1, 2, 2, 5, 130, 8, 8)
    sdpa("sdpa_cross_130_5", 1, 2, 2, 130, 5, 4, 4)
    sdpa("sdpa_decode", 2, 2, 2, 1, 65, 8, 8)
    sdpa("sdpa_causal_65", 1, 1, 1, 65, 65, 8, 8, causal=True)
    sdpa("sdpa_causal_17_65", 1, 1, 1, 17, 65, 8, 8, causal=True)
    sdpa("sdpa_causal_65_17", 1, 1, 1, 65, 17, 8, 8, causal=True)
    sdpa("sdpa_keep_full", 2, 3, 3, 17, 17, 4, 4,
         masks=("keep", (2, 3, 17, 17)))
    sdpa("sdpa_keep_2d", 2, 2, 2, 5, 17, 8, 8, masks=("keep", (5, 17)))
    sdpa("sdpa_keep_padding", 2, 2, 2, 5, 65, 4, 4,
         masks=("keep", (2, 1, 1, 65)))
    sdpa("sdpa_keep_empty_row", 1, 2, 2, 5, 17, 8, 8,
         masks=("keep", (5, 17)), empty_row=True)
    sdpa("sdpa_add_full", 2, 2, 2, 17, 17, 4, 4,
         masks=("add", (2, 2, 17, 17)))
    sdpa("sdpa_add_batch", 2, 2, 2, 5, 17, 8, 8, masks=("add", (2, 1, 5, 17)))
    sdpa("sdpa_add_heads", 2, 3, 3, 17, 5, 4, 4, masks=("add", (1, 3, 17, 5)))
    sdpa("sdpa_add_empty_row", 1, 2, 2, 5, 17, 8, 8,
         masks=("add", (5, 17)), empty_row=True)
    sdpa("sdpa_gqa", 2, 6, 2, 5, 17, 8, 8)
    sdpa("sdpa_gqa_causal", 1, 6, 2, 17, 17, 4, 4, causal=True)
    sdpa("sdpa_gqa_add", 2, 6, 2, 5, 17, 8, 8, masks=("add", (2, 6, 5, 17)))
    sdpa("sdpa_gqa_add_batch", 2, 4, 2, 9, 9, 8, 8,
         masks=("add", (2, 1, 9, 9)))
    sdpa("sdpa_mqa_add_empty_row", 1, 4, 1, 5, 17, 8, 8,
         masks=("add", (5, 17)), empty_row=True)
    sdpa("sdpa_mqa_mask", 2, 4, 1, 5, 17, 8, 8, masks=("keep", (2, 4, 5, 17)))
    sdpa("sdpa_narrow_value", 2, 2, 2, 17, 17, 8, 3)
    sdpa("sdpa_wide_value", 1, 1, 1, 5, 65, 8, 17)
    sdpa("sdpa_wide_value_causal", 1, 2, 2, 17, 17, 8, 17, causal=True)
    sdpa("sdpa_scale", 1, 2, 2, 17, 17, 8, 8, scale=0.3)
    sdpa("sdpa_scale_zero", 1, 1, 1, 5, 5, 8, 8, scale=0.0)
    sdpa("sdpa_scale_negative", 1, 1, 1, 5, 17, 8, 8, scale=-0.5)
    sdpa("sdpa_large_scores", 1, 2, 2, 17, 17, 8, 8, factor=12.0)

    # As in Gemma 2: capped scores, and layers with a window.
    scored("softcap", 2, 2, 2, 7, 9, 8, 8, softcap=2.0)
    scored("softcap_gemma", 1, 4, 2, 33, 33, 8, 8, causal="top_left",
           softcap=50.0, factor=6.0)
    scored("softcap_gemma_window", 1, 4, 2, 40, 40, 8, 8, causal="top_left",
           window=(15, -1), softcap=50.0, factor=6.0)
    scored("softcap_added", 1, 3, 3, 5, 17, 8, 8, softcap=0.5, added=True)
    # The paper's biases: causal, and one query over a cache.
    scored("alibi", 1, 8, 8, 9, 9, 8, 8, causal="top_left", alibi=True)
    scored("alibi_decode", 2, 4, 2, 1, 65, 8, 8, causal="bottom_right",
           alibi=True)
    scored("alibi_both_sides", 1, 4, 4, 6, 11, 8, 8, align="bottom_right",
           alibi=True)
    # As in GPT-OSS: a learned logit per head, GQA, layers with a window.
    scored("sinks", 2, 4, 4, 5, 9, 8, 8, sinks=True)
    scored("sinks_gpt_oss", 1, 8, 1, 40, 40, 8, 8, causal="top_left",
           sinks=True)
    scored("sinks_gpt_oss_window", 1, 8, 1, 40, 40, 8, 8, causal="top_left",
           window=(7, -1), sinks=True)
    # Sliding windows, documents in one row, blocks.
    scored("window", 1, 2, 2, 65, 65, 8, 8, window=(8, 3))
    scored("window_decode", 2, 2, 1, 3, 65, 8, 8, causal="bottom_right",
           window=(16, -1))
    scored("documents", 2, 2, 2, 65, 65, 8, 8, segments=13)
    scored("documents_causal", 2, 4, 2, 65, 65, 8, 8, causal="top_left",
           segments=30)
    scored("blocks", 2, 2, 2, 33, 65, 8, 8, blocks=(8, 16))
    scored("everything", 1, 4, 2, 10, 10, 8, 5, causal="top_left",
           window=(6, -1), softcap=3.0, alibi=True, sinks=True, segments=6,
           blocks=(4, 4), added=True, factor=3.0)

    # Gradients. The mask's go through every broadcast that it has.
    backward("backward", 2, 2, 2, 5, 7, 4, 4)
    backward("backward_one", 1, 1, 1, 1, 1, 1, 1)
    backward("backward_33", 1, 1, 1, 33, 40, 8, 5)
    backward("backward_causal", 1, 2, 2, 7, 7, 4, 4, causal="top_left")
    backward("backward_causal_5_9", 1, 2, 2, 5, 9, 4, 4, causal="top_left")
    backward("backward_bottom_right", 2, 2, 2, 5, 9, 4, 4,
             causal="bottom_right")
    backward("backward_bottom_right_9_5", 1, 2, 2, 9, 5, 4, 4,
             causal="bottom_right", d_lse=True)
    backward("backward_keep", 2, 2, 2, 5, 7, 4, 4,
             masks=[("keep", (2, 2, 5, 7))])
    backward("backward_keep_empty_row", 1, 2, 2, 5, 7, 4, 4,
             masks=[("keep", (5, 7))], empty_row=True)
    backward("backward_add", 2, 2, 2, 5, 7, 4, 4, masks=[("add", (2, 2, 5, 7))])
    backward("backward_add_2d", 2, 3, 3, 5, 7, 4, 4, masks=[("add", (5, 7))])
    backward("backward_add_batch", 2, 2, 2, 5, 7, 4, 4,
             masks=[("add", (2, 1, 5, 7))])
    backward("backward_add_heads", 2, 3, 3, 5, 7, 4, 4,
             masks=[("add", (1, 3, 5, 7))])
    backward("backward_add_keys", 2, 2, 2, 5, 7, 4, 4,
             masks=[("add", (2, 1, 1, 7))])
    backward("backward_add_head_keys", 2, 2, 2, 5, 7, 4, 4,
             masks=[("add", (1, 2, 1, 7))])
    backward("backward_add_empty_row", 1, 2, 2, 5, 7, 4, 4,
             masks=[("add", (5, 7))], empty_row=True)
    backward("backward_two_masks", 2, 2, 2, 5, 7, 4, 4,
             masks=[("add", (1, 2, 5, 7)), ("add", (2, 1, 1, 7))], d_lse=True)
    backward("backward_gqa", 2, 4, 2, 5, 7, 4, 4)
    backward("backward_mqa_add", 1, 4, 1, 5, 7, 4, 6,
             masks=[("add", (4, 5, 7))])
    backward("backward_narrow_value", 2, 2, 2, 5, 7, 8, 3)
    backward("backward_scale_negative", 1, 2, 2, 5, 7, 4, 4, scale=-0.7)
    backward("backward_scale_zero", 1, 1, 1, 5, 7, 4, 4, scale=0.0)
    backward("backward_large_scores", 1, 2, 2, 9, 9, 8, 8, factor=4.0)
    backward("backward_lse", 2, 2, 2, 5, 7, 4, 4, d_lse=True)
    backward("backward_softcap", 1, 4, 2, 7, 9, 4, 4, softcap=1.5, factor=2.0,
             d_lse=True)
    backward("backward_alibi", 2, 4, 4, 6, 6, 4, 4, causal="top_left",
             alibi="heads")
    backward("backward_alibi_both_sides", 2, 2, 2, 5, 8, 4, 4,
             align="bottom_right", alibi="batch", d_lse=True)
    backward("backward_sinks", 2, 4, 2, 5, 7, 4, 4, sinks="heads")
    backward("backward_sinks_empty_row", 2, 2, 2, 5, 7, 4, 4, sinks="batch",
             masks=[("keep", (5, 7))], empty_row=True, d_lse=True)
    backward("backward_padding", 3, 2, 1, 5, 9, 4, 4, q_lens=[5, 3, 1],
             kv_lens=[9, 4, 6], kv_starts=[2, 0, 5])
    backward("backward_padding_causal", 3, 2, 2, 6, 6, 4, 4, kv_lens=[6, 4, 0],
             q_lens=[6, 4, 2], causal="bottom_right", d_lse=True)
    backward("backward_window", 1, 2, 2, 9, 9, 4, 4, causal="top_left",
             window=(2, -1))
    backward("backward_window_both_sides", 1, 2, 1, 9, 12, 4, 4,
             align="bottom_right", window=(3, 1))
    backward("backward_everything", 2, 4, 2, 7, 9, 4, 3,
             causal="bottom_right", window=(5, -1), softcap=2.0,
             alibi="heads", sinks="heads", masks=[("add", (1, 4, 7, 9))],
             kv_lens=[9, 6], q_lens=[7, 5], scale=0.6, d_lse=True)

    mha("mha_self", 2, 17, 17, 12, 3)
    mha("mha_self_65", 1, 65, 65, 8, 2, average=True)
    mha("mha_no_bias", 2, 5, 5, 12, 4, bias=False)
    mha("mha_one_head", 1, 5, 5, 8, 1)
    mha("mha_cross", 2, 5, 17, 12, 3, self_=False)
    mha("mha_kdim_vdim", 2, 5, 17, 12, 3, self_=False, kdim=10, vdim=7)
    mha("mha_kdim_no_bias", 1, 17, 5, 12, 3, self_=False, kdim=10,
        bias=False)
    mha("mha_time_first", 3, 5, 5, 12, 3, batch_first=False)
    mha("mha_time_first_cross", 3, 5, 17, 12, 3, batch_first=False,
        self_=False, average=True)
    mha("mha_causal", 2, 17, 17, 12, 3, causal=True)
    mha("mha_drop", 2, 5, 17, 12, 3, self_=False, attn_mask="drop2")
    mha("mha_drop_heads", 2, 5, 17, 12, 3, self_=False, attn_mask="drop3")
    mha("mha_padding", 3, 5, 17, 12, 3, self_=False, padding=True)
    mha("mha_drop_padding", 3, 5, 17, 12, 3, self_=False, attn_mask="drop2",
        padding=True, average=True)
    mha("mha_add", 2, 17, 17, 12, 3, attn_mask="add")
    mha("mha_add_padding", 3, 5, 17, 12, 3, self_=False, attn_mask="add",
        padding=True)


if __name__ == "__main__":
    main()
