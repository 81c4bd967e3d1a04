"""The rows of the comparison.

A row is one attention problem: the letters are those of attn.h (B, Hq, Hkv,
Tq, Tk, D). `kind` says which keys are visible:

  full     all of them
  causal   j <= Tk - Tq + i, so the last query sees every key
  padded   j < kv_lens[b], lengths from half of Tk to all of it
  decode   all of them, Tq = 1, and the keys and values stand in a cache
  mask     a dense boolean mask (B, H, Tq, Tk), nine of ten keys
  keymask  the lengths of `padded` as a boolean mask (B, 1, 1, Tk)
  window   causal, and of those the last WINDOW
  softcap  all of them, scores bent: c tanh(u / c) with c = SOFTCAP

`layout` says how the arrays lie in memory; every contender gets the same ones:

  bthd     q, k, v and out are (B, T, H, D), as a projection writes them
  bhtd     q, k, v and out are contiguous (B, H, T, D)
  cache    q and out are (B, T, H, D); k and v contiguous (B, H, T, D)

`direction` is what is computed: `forward` the output; `backward` the gradients
of q, k and v from what a forward call kept; `both` one after the other, which
is what a step of training does.
"""

import dataclasses

WINDOW = 256
SOFTCAP = 30.0

@dataclasses.dataclass(frozen=True)
class Row:
    family: str
    kind: str
    layout: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    width: int
    dtype: str = "f32"
    quick: bool = False
    direction: str = "forward"

    @property
    def training(self):
        return self.direction != "forward"

    @property
    def name(self):
        heads = f"H{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        length = f"T{self.q_len}"
        if self.kv_len != self.q_len:
            length += f"x{self.kv_len}"
        text = (
            f"{self.family} B{self.batch} {heads} {length} D{self.width} "
            f"{self.kind} {self.layout} {self.dtype}"
        )
        return f"{text} {self.direction}" if self.training else text

    @property
    def flops(self):
        """4 B H Tq Tk D, of the five products of the gradients 10, whatever is
        visible: full and causal alike."""
        products = {"forward": 4.0, "backward": 10.0, "both": 14.0}
        return (
            products[self.direction]
            * self.batch
            * self.heads
            * self.q_len
            * self.kv_len
            * self.width
        )

    @property
    def scores(self):
        return self.batch * self.heads * self.q_len * self.kv_len

    @property
    def is_causal(self):
        return self.kind in ("causal", "window")

    @property
    def group(self):
        """Query heads of one key/value head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self):
        size = 4 if self.dtype == "f32" else 8
        return (
            2.0 * self.batch * self.kv_heads * self.kv_len * self.width * size
        )


# Contenders that hold all scores in memory take part up to as many: 0.5 GiB.
SCORES_AT_MOST = 1 << 27


def _rows():
    rows = []

    def add(family, kind, b, h, hkv, tq, tk, d, **more):
        layout = more.pop("layout", "bthd")
        rows.append(
            Row(family, kind, layout, b, h, hkv, tq, tk, d, **more)
        )

    # BERT-base, with and without padding.
    for b in (1, 8, 32):
        for t in (128, 384, 512):
            quick = b == 1 and t != 384
            add("bert", "full", b, 12, 12, t, t, 64, quick=quick)
    add("bert", "causal", 1, 12, 12, 128, 128, 64, quick=True)
    add("bert", "causal", 1, 12, 12, 512, 512, 64, quick=True)
    for t in (128, 384, 512):
        add("bert", "padded", 8, 12, 12, t, t, 64, quick=t == 128)
    # ViT-B.
    add("vit", "full", 1, 12, 12, 197, 197, 64, quick=True)
    add("vit", "full", 32, 12, 12, 197, 197, 64)
    # GPT-2.
    for b in (1, 8):
        add("gpt2", "causal", b, 12, 12, 1024, 1024, 64, quick=b == 1)
    add("gpt2", "full", 1, 12, 12, 1024, 1024, 64, quick=True)
    # Llama-like. The group of 4 heads is kept; from 4k on fewer groups, so
    # that a call of the slowest contender ends in seconds.
    add("llama", "causal", 1, 32, 8, 2048, 2048, 128)
    add("llama", "causal", 1, 8, 2, 4096, 4096, 128)
    add("llama", "causal", 1, 4, 1, 8192, 8192, 128)
    add("llama", "full", 1, 8, 2, 2048, 2048, 128, quick=True)
    add("llama", "causal", 1, 8, 2, 512, 8192, 128, layout="cache")
    add("llama", "causal", 1, 32, 8, 512, 8192, 128, layout="cache")
    # Whisper-large: encoder, and cross-attention to it.
    add("whisper", "full", 1, 20, 20, 1500, 1500, 64)
    add("whisper", "full", 8, 20, 20, 1500, 1500, 64)
    for tq in (1, 4, 32, 448):
        add("whisper-x", "full", 1, 20, 20, tq, 1500, 64, quick=tq == 32)
    # Stable Diffusion 1.5: self-attention, and cross-attention to 77 tokens.
    for t, d in ((4096, 40), (1024, 80), (256, 160)):
        add("sd15", "full", 1, 8, 8, t, t, d, quick=t == 1024)
        add("sd15-x", "full", 1, 8, 8, t, 77, d, quick=t == 1024)
    # Odd lengths and widths.
    for t in (1, 2, 17, 63, 65, 1000):
        add("odd", "full", 1, 12, 12, t, t, 64, quick=t == 17)
        if t > 1:
            add("odd", "causal", 1, 12, 12, t, t, 64)
    for d in (48, 72, 96, 256):
        add("odd", "full", 1, 8, 8, 512, 512, d, quick=d == 72)
        add("odd", "causal", 1, 8, 8, 512, 512, d)
    # Masks, windows, capped scores.
    add("bert", "mask", 1, 12, 12, 512, 512, 64, quick=True)
    add("bert", "mask", 8, 12, 12, 128, 128, 64)
    add("bert", "keymask", 8, 12, 12, 128, 128, 64, quick=True)
    add("bert", "keymask", 8, 12, 12, 512, 512, 64)
    add("gpt2", "window", 1, 12, 12, 1024, 1024, 64)
    add("mistral", "window", 1, 8, 2, 4096, 4096, 128, quick=True)
    add("gemma", "softcap", 1, 12, 12, 512, 512, 64, quick=True)
    add("gemma", "softcap", 1, 8, 4, 1024, 1024, 256)
    # The other memory order.
    add("bert", "full", 1, 12, 12, 128, 128, 64, layout="bhtd")
    add("bert", "full", 1, 12, 12, 512, 512, 64, layout="bhtd")
    add("gpt2", "causal", 1, 12, 12, 1024, 1024, 64, layout="bhtd")
    add("llama", "full", 1, 8, 8, 2048, 2048, 128, layout="bhtd")
    # Decoding.
    for h, hkv, d in ((32, 8, 128), (32, 32, 128), (12, 12, 64)):
        for tk in (1024, 4096, 8192, 16384, 32768):
            quick = (h, hkv, tk) in ((32, 8, 8192), (12, 12, 1024))
            add("decode", "decode", 1, h, hkv, 1, tk, d, layout="cache",
                quick=quick)
        for tk in (1024, 4096):
            add("decode", "decode", 8, h, hkv, 1, tk, d, layout="cache")
    add("decode", "padded", 8, 32, 8, 1, 4096, 128, layout="cache")
    add("decode", "softcap", 1, 32, 8, 1, 8192, 128, layout="cache")
    # float64.
    f64 = {"dtype": "f64"}
    add("bert", "full", 1, 12, 12, 128, 128, 64, quick=True, **f64)
    add("bert", "full", 1, 12, 12, 512, 512, 64, **f64)
    add("gpt2", "full", 1, 12, 12, 1024, 1024, 64, **f64)
    add("gpt2", "causal", 1, 12, 12, 1024, 1024, 64, quick=True, **f64)
    add("llama", "full", 1, 8, 2, 2048, 2048, 128, **f64)
    add("llama", "causal", 1, 8, 2, 2048, 2048, 128, **f64)
    add("sd15", "full", 1, 8, 8, 1024, 1024, 80, **f64)
    add("whisper-x", "full", 1, 20, 20, 32, 1500, 64, **f64)
    add("decode", "decode", 1, 32, 8, 1, 8192, 128, layout="cache", **f64)
    return rows


def _training_rows():
    """Each problem forward and backward, and backward alone."""
    rows = []

    def add(family, kind, b, h, hkv, tq, tk, d, **more):
        for direction in ("both", "backward"):
            rows.append(
                Row(family, kind, "bthd", b, h, hkv, tq, tk, d,
                    direction=direction, **more)
            )

    for b in (1, 8):
        for t in (128, 384, 512):
            quick = b == 1 and t != 384
            add("bert", "full", b, 12, 12, t, t, 64, quick=quick)
    add("vit", "full", 1, 12, 12, 197, 197, 64)
    add("gpt2", "causal", 1, 12, 12, 1024, 1024, 64, quick=True)
    add("gpt2", "full", 1, 12, 12, 1024, 1024, 64)
    add("gpt2", "full", 1, 12, 12, 2048, 2048, 64)
    add("llama", "causal", 1, 32, 8, 2048, 2048, 128)
    for t in (512, 1024, 2048):
        add("llama", "full", 1, 8, 8, t, t, 128, quick=t == 512)
    add("whisper-x", "full", 1, 20, 20, 448, 1500, 64)
    add("sd15", "full", 1, 8, 8, 1024, 1024, 80)
    for t in (17, 63, 65, 1000):
        add("odd", "full", 1, 12, 12, t, t, 64, quick=t == 17)
        add("odd", "causal", 1, 12, 12, t, t, 64)
    for d in (48, 72, 96, 256):
        add("odd", "full", 1, 8, 8, 512, 512, d)
    f64 = {"dtype": "f64"}
    add("bert", "full", 1, 12, 12, 128, 128, 64, quick=True, **f64)
    add("bert", "full", 1, 12, 12, 512, 512, 64, **f64)
    add("gpt2", "full", 1, 12, 12, 1024, 1024, 64, **f64)
    add("gpt2", "causal", 1, 12, 12, 1024, 1024, 64, **f64)
    add("llama", "full", 1, 8, 8, 512, 512, 128, **f64)
    return rows


ROWS = _rows() + _training_rows()
