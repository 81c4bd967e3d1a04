"""libattn through ctypes."""

import contextlib
import ctypes
import os

import arrays as arrays_module
import shapes

F32, F64, U8 = 1, 2, 3
ALIGN_BOTTOM_RIGHT = 2
MASK_KEEP = 1
FLAG_WINDOW = 2


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Mask(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("view", Tensor),
    ]


class SdpaParams(ctypes.Structure):
    """Up to softcap: a library takes what is not given for zeros."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("flags", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("align", ctypes.c_int32),
        ("num_masks", ctypes.c_int32),
        ("masks", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("q_offset", ctypes.c_int64),
        ("q_offsets", ctypes.c_void_p),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("keep_first", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("prefix_lens", ctypes.c_void_p),
        ("q_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("cu_q", ctypes.c_void_p),
        ("cu_k", ctypes.c_void_p),
        ("num_seqs", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("weights_mean", ctypes.c_void_p),
        ("softcap", ctypes.c_double),
    ]


class Gradients(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("flags", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("d_lse", ctypes.c_void_p),
        ("d_q", ctypes.c_void_p),
        ("d_k", ctypes.c_void_p),
        ("d_v", ctypes.c_void_p),
        ("d_masks", ctypes.c_void_p),
        ("d_alibi", ctypes.c_void_p),
        ("d_sinks", ctypes.c_void_p),
        ("d_scale", ctypes.c_void_p),
    ]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_user", ctypes.c_void_p),
        ("alloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("alloc_user", ctypes.c_void_p),
    ]


def find_library():
    """build/libattn.so.0 (or build-*/) of the tree this file is in."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    names = sorted(n for n in os.listdir(root) if n.startswith("build"))
    for name in names:
        path = os.path.join(root, name, "libattn.so.0")
        if os.path.exists(path):
            return path
    raise SystemExit(
        f"peers: no build*/libattn.so.0 in {root}; build the library first "
        "or name it with --lib"
    )


def _view(x4, dtype):
    t = Tensor()
    t.data = x4.ctypes.data
    t.shape[:] = x4.shape
    t.stride[:] = [s // x4.itemsize for s in x4.strides]
    t.dtype = dtype
    return t


class Library:
    def __init__(self, path):
        self.path = os.path.realpath(path)
        self.lib = ctypes.CDLL(self.path)
        for name in ("attn_version", "attn_build_info", "attn_blas_info",
                     "attn_last_error"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.contexts = {}

    def info(self):
        return [
            self.lib.attn_build_info().decode(),
            self.lib.attn_blas_info().decode(),
        ]

    @property
    def has_backward(self):
        return hasattr(self.lib, "attn_sdpa_backward")

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.attn_last_error().decode())

    def context(self, threads):
        if threads not in self.contexts:
            params = ContextParams(struct_size=ctypes.sizeof(ContextParams))
            params.num_threads = threads
            context = ctypes.c_void_p()
            self.check(
                self.lib.attn_context_create(
                    ctypes.byref(context), ctypes.byref(params)
                )
            )
            self.contexts[threads] = context
        return self.contexts[threads]


class Contender:
    rival = "libattn"
    name = "sdpa"

    def __init__(self, library, arrays, threads):
        row = arrays.row
        dtype = F32 if row.dtype == "f32" else F64
        self.out = arrays.new_out()
        self.out4 = arrays.bhtd(self.out, arrays.q_heads_first)
        self.params = SdpaParams(struct_size=ctypes.sizeof(SdpaParams))
        if row.is_causal:
            self.params.causal = 1
            self.params.align = ALIGN_BOTTOM_RIGHT
        if row.kind == "window":
            self.params.flags = FLAG_WINDOW
            self.params.window_left = shapes.WINDOW - 1
        if row.kind == "softcap":
            self.params.softcap = shapes.SOFTCAP
        if row.kind == "padded":
            self.lens = arrays.kv_lens
            self.params.kv_lens = self.lens.ctypes.data
        if arrays.mask is not None:
            self.mask = Mask(kind=MASK_KEEP, view=_view(arrays.mask, U8))
            self.params.masks = ctypes.addressof(self.mask)
            self.params.num_masks = 1
        views = (arrays.q4, arrays.k4, arrays.v4, self.out4)
        self.views = [_view(x, dtype) for x in views]
        self.args = [library.context(threads), ctypes.byref(self.params)]
        self.args += [ctypes.byref(view) for view in self.views]
        self.library = library
        library.check(library.lib.attn_sdpa(*self.args))

    @contextlib.contextmanager
    def active(self):
        yield

    def caller(self):
        call, args = self.library.lib.attn_sdpa, tuple(self.args)
        return lambda: call(*args)

    def result(self):
        self.caller()()
        return self.out4


class Training(Contender):
    """The gradients, or out with its lse and then the gradients."""

    def __init__(self, library, arrays, threads):
        super().__init__(library, arrays, threads)
        row, dtype = arrays.row, self.views[0].dtype
        self.name = "sdpa+backward" if row.direction == "both" else "backward"
        self.lse = arrays_module.aligned(
            (row.batch, row.heads, row.q_len, 1), arrays.dtype
        )
        self.lse_view = _view(self.lse, dtype)
        self.params.lse = ctypes.addressof(self.lse_view)
        self.d_out = _view(arrays.d_out4, dtype)
        self.arrays = arrays.new_gradients()
        self.gradients4 = arrays.bhtd_gradients(*self.arrays)
        self.gradient_views = [_view(x, dtype) for x in self.gradients4]
        self.list = Gradients(struct_size=ctypes.sizeof(Gradients))
        for name, view in zip(("d_q", "d_k", "d_v"), self.gradient_views):
            setattr(self.list, name, ctypes.addressof(view))
        more = [ctypes.byref(self.d_out), ctypes.byref(self.list)]
        self.backward_args = [*self.args, *more]
        self.both = row.direction == "both"
        library.check(library.lib.attn_sdpa(*self.args))
        library.check(library.lib.attn_sdpa_backward(*self.backward_args))

    def caller(self):
        lib = self.library.lib
        forward, args = lib.attn_sdpa, tuple(self.args)
        backward, more = lib.attn_sdpa_backward, tuple(self.backward_args)
        if not self.both:
            return lambda: backward(*more)

        def call():
            forward(*args)
            backward(*more)

        return call

    def result(self):
        for x in self.arrays:
            x.fill(float("nan"))
        self.caller()()
        return self.gradients4


def contender(library, arrays, threads):
    kind = Training if arrays.row.training else Contender
    return kind(library, arrays, threads)
