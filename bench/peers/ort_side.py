"""ONNX Runtime on CPU: its three attention operators, bound to our arrays.

  mha     com.microsoft.MultiHeadAttention, inputs (B, S, H*D); keys and
          values of a cache as (B, H, S, D)
  attn3d  ai.onnx Attention, inputs (B, S, H*D)
  attn4d  ai.onnx Attention, inputs (B, H, S, D)
  fold    the same with the heads of a group as queries of one head (decoding)
  gqa     com.microsoft.GroupQueryAttention, inputs (B, S, H*D), with a key
          and value cache that is its past and its present at once, so that
          nothing but the new keys is copied

With "-add", masks are numbers made ready to be added, not booleans. Each with
and without spinning workers where there is more than one thread.
"""

import contextlib

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import arrays as arrays_module
import shapes

ELEMENT = {np.dtype(np.float32): TensorProto.FLOAT,
           np.dtype(np.float64): TensorProto.DOUBLE,
           np.dtype(np.int32): TensorProto.INT32,
           np.dtype(np.int64): TensorProto.INT64,
           np.dtype(np.bool_): TensorProto.BOOL}

OPERATORS = {
    "mha": ("com.microsoft", "MultiHeadAttention"),
    "attn3d": ("", "Attention"),
    "attn4d": ("", "Attention"),
    "fold": ("", "Attention"),
    "gqa": ("com.microsoft", "GroupQueryAttention"),
}


def variants(row):
    """The operators that can do this row on the arrays as they lie."""
    materialised = row.scores <= shapes.SCORES_AT_MOST
    grouped = row.group > 1
    if row.layout == "bhtd":
        names = ["attn4d"]
    elif row.kind == "mask":
        names = ["attn3d", "attn3d-add", "mha-add"]
    elif row.kind == "keymask":
        names = ["attn3d", "attn3d-add", "mha"]
    elif row.kind == "window":
        names = ["gqa", "attn3d", "attn3d-add"]
    elif row.kind == "softcap" and row.layout == "bthd":
        names = ["attn3d", "gqa"]
    elif row.layout == "cache" and row.kind == "causal":
        names = ["gqa"]
    elif row.layout == "cache":
        names = ["attn4d", "gqa"]
        names += ["fold"] if grouped or row.kind == "softcap" else ["mha"]
    else:
        names = ["attn3d"] if grouped else ["mha", "attn3d"]
        names += ["gqa"] if row.kind == "causal" or grouped else []
    if row.dtype == "f64":  # of ai.onnx only
        names = [n for n in names if not n.startswith(("mha", "gqa"))]
    tiled = {"gqa", "mha"} if row.kind == "full" else {"gqa"}
    return [n for n in names if materialised or n in tiled]


class _Graph:
    """One node, its inputs and outputs bound to NumPy arrays in place."""

    def __init__(self, domain, operator, attributes):
        self.domain, self.operator = domain, operator
        self.attributes = attributes
        self.inputs, self.outputs = [], []

    def input(self, name, array):
        self.inputs.append((name, array))

    def skip(self):
        self.inputs.append(("", None))

    def output(self, name, array):
        self.outputs.append((name, array))

    def session(self, options):
        def info(name, x):
            return helper.make_tensor_value_info(
                name, ELEMENT[x.dtype], list(x.shape)
            )

        node = helper.make_node(
            self.operator,
            [name for name, _ in self.inputs],
            [name for name, _ in self.outputs],
            domain=self.domain,
            **self.attributes,
        )
        graph = helper.make_graph(
            [node],
            "attention",
            [info(*pair) for pair in self.inputs if pair[0]],
            [info(*pair) for pair in self.outputs],
        )
        opsets = [helper.make_opsetid("", 24),
                  helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        return ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )

    def bind(self, session):
        binding = session.io_binding()
        for name, x in self.inputs:
            if name:
                binding.bind_input(name, "cpu", 0, x.dtype.type,
                                   list(x.shape), x.ctypes.data)
        for name, x in self.outputs:
            binding.bind_output(name, "cpu", 0, x.dtype.type,
                                list(x.shape), x.ctypes.data)
        return binding


def _options(threads, spin):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if spin else "0"
    )
    return options


def _rows_of(x):
    """(B, T, H, D) as (B, T, H*D), the same memory."""
    return x.reshape(x.shape[0], x.shape[1], -1)


class Contender:
    rival = "ort"

    def __init__(self, arrays, variant, threads, spin):
        row = arrays.row
        self.name = variant + ("-spin" if spin else "")
        self.out = arrays.new_out()
        self.out4 = arrays.bhtd(self.out, arrays.q_heads_first)
        base, _, self.mask_as = variant.partition("-")
        domain, operator = OPERATORS[base]
        self.graph = _Graph(domain, operator, {})
        getattr(self, "_" + base)(arrays, row)
        self.session = self.graph.session(_options(threads, spin))
        self.binding = self.graph.bind(self.session)

    def _mha(self, arrays, row):
        graph = self.graph
        graph.attributes["num_heads"] = row.heads
        if row.kind == "causal":
            graph.attributes["unidirectional"] = 1
        graph.input("q", _rows_of(arrays.q))
        for name, x in (("k", arrays.k), ("v", arrays.v)):
            graph.input(name, x if arrays.kv_heads_first else _rows_of(x))
        if row.kind == "padded":
            graph.skip()
            graph.input("lens", arrays.kv_lens.astype(np.int32))
        if row.kind == "keymask":
            graph.skip()
            graph.input("keys", arrays.mask[:, 0, 0].astype(np.int32))
        if row.kind == "mask":
            graph.skip()
            graph.skip()
            graph.input("bias", self._additive(arrays.mask, arrays.dtype))
        graph.output("out", _rows_of(self.out))

    @staticmethod
    def _additive(seen, dtype):
        return np.where(seen, 0, -np.inf).astype(dtype)

    def _attention_tail(self, arrays, row):
        graph, seen = self.graph, arrays.mask
        if row.kind == "causal":
            graph.attributes["is_causal"] = 1
        if row.kind == "softcap":
            graph.attributes["softcap"] = shapes.SOFTCAP
        if row.kind == "padded":
            for _ in range(3):
                graph.skip()
            graph.input("lens", arrays.kv_lens)
        if row.kind == "window":
            seen = arrays.causal_mask()
        if row.kind == "keymask":  # a row for each query is asked for
            seen = np.repeat(seen, row.q_len, 2)
        if seen is not None:
            if self.mask_as == "add":
                seen = self._additive(seen, arrays.dtype)
            graph.input("mask", seen)

    def _attn3d(self, arrays, row):
        self.graph.attributes["q_num_heads"] = row.heads
        self.graph.attributes["kv_num_heads"] = row.kv_heads
        for name, x in (("q", arrays.q), ("k", arrays.k), ("v", arrays.v)):
            self.graph.input(name, _rows_of(x))
        self._attention_tail(arrays, row)
        self.graph.output("out", _rows_of(self.out))

    def _attn4d(self, arrays, row, heads=0):
        heads = heads or row.heads

        def four(x):  # with one query both orders are the same memory
            return x.reshape(row.batch, heads, -1, row.width)

        self.graph.input("q", four(arrays.q))
        self.graph.input("k", arrays.k)
        self.graph.input("v", arrays.v)
        self._attention_tail(arrays, row)
        self.graph.output("out", four(self.out))

    def _fold(self, arrays, row):
        self._attn4d(arrays, row, row.kv_heads)

    def _gqa(self, arrays, row):
        graph = self.graph
        graph.attributes["num_heads"] = row.heads
        graph.attributes["kv_num_heads"] = row.kv_heads
        if row.kind in ("full", "softcap") and row.q_len > 1:
            graph.attributes["causal"] = 0
        if row.kind == "softcap":
            graph.attributes["softcap"] = shapes.SOFTCAP
        if row.kind == "window":
            graph.attributes["local_window_size"] = shapes.WINDOW
        graph.input("q", _rows_of(arrays.q))
        caches = []
        for name, x in (("k", arrays.k), ("v", arrays.v)):
            if arrays.kv_heads_first:
                graph.input(name, _rows_of(self._newest(arrays, x)))
                caches.append(x)
            else:
                graph.input(name, _rows_of(x))
                shape = (row.batch, row.kv_heads, row.kv_len, row.width)
                caches.append(arrays_module.aligned(shape, x.dtype))
        graph.input("past_k", caches[0])
        graph.input("past_v", caches[1])
        last = np.full(row.batch, row.kv_len - 1, np.int32)
        if row.kind == "padded":
            last = (arrays.kv_lens - 1).astype(np.int32)
        graph.input("last", last)
        graph.input("total", np.array([row.kv_len], np.int32))
        graph.output("out", _rows_of(self.out))
        graph.output("present_k", caches[0])
        graph.output("present_v", caches[1])

    @staticmethod
    def _newest(arrays, x):
        """Keys or values of the queries' own tokens, which the operator writes
        into the cache, where they are already."""
        row = arrays.row
        shape = (row.batch, row.q_len, row.kv_heads, row.width)
        new = arrays_module.aligned(shape, x.dtype)
        for b in range(row.batch):
            end = row.kv_len
            if row.kind == "padded":
                end = int(arrays.kv_lens[b])
            new[b] = x[b, :, end - row.q_len : end].transpose(1, 0, 2)
        return new

    @contextlib.contextmanager
    def active(self):
        yield

    def caller(self):
        run, binding = self.session.run_with_iobinding, self.binding
        return lambda: run(binding)

    def result(self):
        self.caller()()
        return self.out4
