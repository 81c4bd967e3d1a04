"""Results as CSV, and as a Markdown page."""

import csv
import math

import timing

BAR = 1.05

FIELDS = [
    "row", "family", "kind", "layout", "dtype", "batch", "heads", "kv_heads",
    "q_len", "kv_len", "width", "threads", "rival", "variant", "calls",
    "rounds", "min_s", "median_s", "gflops", "kv_gb_s", "max_error",
    "rms_error", "others", "best", "direction",
]


# Rows of this much foreign load are marked.
DISTURBED = 0.1


def mark(result):
    return " †" if result.others > DISTURBED else ""


class Result:
    """One row at one thread count: times and errors of each contender."""

    def __init__(self, row, threads, times, errors, rounds, others):
        self.row, self.threads = row, threads
        self.times, self.errors, self.rounds = times, errors, rounds
        self.others = others  # share of the processors

    def of(self, rival):
        return [t for t in self.times if t.contender.rival == rival]

    def best(self, rival, key="minimum"):
        """The rival's fastest variant, or None."""
        some = [t for t in self.of(rival)
                if key == "minimum" or t.medians]
        return min(some, key=lambda t: getattr(t, key), default=None)

    def ratio(self, rival, key="minimum"):
        other, ours = self.best(rival, key), self.best("libattn", key)
        if other is None:
            return None
        return getattr(other, key) / getattr(ours, key)

    def paired(self, rival):
        """Median over the rounds of the ratios of their medians."""
        other, ours = self.best(rival, "median"), self.best("libattn")
        return None if other is None else timing.paired(other, ours)

    def worst_ratio(self):
        ratios = [self.ratio(r) for r in ("torch", "ort")]
        return min((r for r in ratios if r is not None), default=None)

    def worst_paired(self):
        ratios = [self.paired(r) for r in ("torch", "ort")]
        return min((r for r in ratios if r is not None), default=None)

    def time(self):
        """libattn's shortest call."""
        return self.best("libattn").minimum

    def error(self, rival):
        """Errors of the rival's fastest variant."""
        t = self.best(rival)
        return None if t is None else self.errors[t.contender.name, rival]


def write_csv(path, results):
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(FIELDS)
        for r in results:
            row = r.row
            for t in r.times:
                c = t.contender
                best = int(t is r.best(c.rival))
                errors = r.errors[c.name, c.rival]
                out.writerow(
                    [row.name, row.family, row.kind, row.layout, row.dtype,
                     row.batch, row.heads, row.kv_heads, row.q_len,
                     row.kv_len, row.width, r.threads, c.rival, c.name,
                     t.calls, r.rounds, f"{t.minimum:.9f}",
                     f"{t.median:.9f}", f"{row.flops / t.minimum / 1e9:.2f}",
                     f"{row.kv_bytes / t.minimum / 1e9:.2f}",
                     f"{errors[0]:.3e}", f"{errors[1]:.3e}", f"{r.others:.2f}",
                     best, row.direction]
                )


def _mean(values):
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    log = sum(math.log(v) for v in values) / len(values)
    return f"{math.exp(log):.2f} ({len(values)})"


def _counts(results):
    return sorted({r.threads for r in results})


GROUPS = [
    ("full", lambda r: r.row.kind == "full"),
    ("causal", lambda r: r.row.kind == "causal"),
    ("full and causal", lambda r: r.row.kind in ("full", "causal")),
    ("padded, masks", lambda r: r.row.kind in ("padded", "mask", "keymask")),
    ("window", lambda r: r.row.kind == "window"),
    ("softcap", lambda r: r.row.kind == "softcap"),
    ("decode", lambda r: r.row.kind == "decode"),
    ("all", lambda r: True),
]

TRAINING_GROUPS = [
    (f"{text}, {kinds}",
     lambda r, d=direction, k=kinds: r.row.direction == d
     and k in ("all", r.row.kind))
    for direction, text in (("both", "forward and backward"),
                            ("backward", "backward"))
    for kinds in ("full", "causal", "all")
]

# Rivals and their names above columns, which are shorter in some tables.
NAMES = {"torch": "PyTorch", "ort": "ONNX Runtime"}
SHORT = {"torch": "PyTorch", "ort": "ORT"}


def _head(first, columns):
    columns = [first, *columns]
    return ["| " + " | ".join(columns) + " |",
            "| " + " | ".join("---" for _ in columns) + " |"]


def _threads(n):
    return f"{n} thread" + ("s" if n > 1 else "")


def _means(results):
    """Geometric means of the ratios by group, all thread counts in a line."""
    counts = _counts(results)
    columns = [f"{_threads(n)}: {text}" for n in counts
               for text in ("PyTorch", "ONNX Runtime", "the better",
                            "the better, paired")]
    lines = _head("rows", columns)
    for dtype in ("f32", "f64"):
        for name, chosen in GROUPS:
            cells = []
            for n in counts:
                some = [r for r in results if r.threads == n
                        and r.row.dtype == dtype and chosen(r)]
                cells += [
                    _mean([r.ratio("torch") for r in some]),
                    _mean([r.ratio("ort") for r in some]),
                    _mean([r.worst_ratio() for r in some]),
                    _mean([r.worst_paired() for r in some]),
                ]
            if any(c != "-" for c in cells):
                lines.append(f"| {dtype} {name} | " + " | ".join(cells)
                             + " |")
    return lines


def _training_means(results):
    counts = _counts(results)
    columns = [f"{_threads(n)}: {text}" for n in counts
               for text in ("PyTorch", "PyTorch, paired")]
    lines = _head("rows", columns)
    for dtype in ("f32", "f64"):
        for name, chosen in TRAINING_GROUPS:
            cells = []
            for n in counts:
                some = [r for r in results if r.threads == n
                        and r.row.dtype == dtype and chosen(r)]
                cells += [_mean([r.ratio("torch") for r in some]),
                          _mean([r.paired("torch") for r in some])]
            if any(c != "-" for c in cells):
                lines.append(f"| {dtype} {name} | " + " | ".join(cells)
                             + " |")
    return lines


def _ratios(results, rivals):
    """A line for each row, all thread counts in it."""
    counts = _counts(results)
    columns = [f"{_threads(n)}: / {SHORT[rival]}" for n in counts
               for rival in rivals]
    columns += [f"libattn: gain of {_threads(n)}" for n in counts[1:]]
    lines = _head("row", columns)
    by_row = {}
    for r in results:
        by_row.setdefault(r.row.name, {})[r.threads] = r
    for name, of in by_row.items():
        marks = [str(n) for n in counts if n in of and mark(of[n])]
        if marks:
            name += " †" + (",".join(marks) if len(counts) > 1 else "")
        cells = [_ratio(of[n], rival) if n in of else "-"
                 for n in counts for rival in rivals]
        for n in counts[1:]:
            both = n in of and counts[0] in of
            cells.append(f"{of[counts[0]].time() / of[n].time():.2f}"
                         if both else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _speed(r, rival):
    t = r.best(rival)
    if t is None:
        return "-"
    gflops = r.row.flops / t.minimum / 1e9
    median = r.row.flops / t.median / 1e9
    text = f"{gflops:.1f} ({median:.1f})"
    return text if rival == "libattn" else f"{text} {t.contender.name}"


def _ratio(r, rival):
    low = r.ratio(rival)
    if low is None:
        return "-"
    text = f"{low:.2f} ({r.paired(rival):.2f})"
    return f"**{text}**" if low < BAR else text


def _error(r, rival):
    error = r.error(rival)
    return "-" if error is None else f"{error[0]:.1e} / {error[1]:.1e}"


def _speeds(results, rivals):
    lines = _head("row", ["libattn", *(NAMES[rival] for rival in rivals),
                          "error libattn",
                          *(SHORT[rival] for rival in rivals)])
    rivals = ("libattn", *rivals)
    for r in results:
        name = r.row.name + mark(r)
        if r.row.q_len == 1:
            name += f" ({r.row.kv_bytes / r.time() / 1e9:.1f} GB/s)"
        cells = [name]
        cells += [_speed(r, rival) for rival in rivals]
        cells += [_error(r, rival) for rival in rivals]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _below(results):
    lines = []
    for r in results:
        for rival, text in NAMES.items():
            ratio = r.ratio(rival)
            if ratio is not None and ratio < BAR:
                lines.append(
                    f"- {r.row.name}{mark(r)}, {_threads(r.threads)}: "
                    f"{ratio:.2f} "
                    f"(paired {r.paired(rival):.2f}) against {text}'s "
                    f"{r.best(rival).contender.name}"
                )
    return lines or ["None."]


def _inexact(results, rivals):
    """Rows of the first thread count: libattn's bits do not depend on it."""
    lines = _head("row", [f"{what} / {SHORT[rival]}'s" for rival in rivals
                          for what in ("max", "rms")])
    first = min(r.threads for r in results)
    for r in (r for r in results if r.threads == first):
        ours, cells, above = r.error("libattn"), [], False
        for rival in rivals:
            theirs = r.error(rival)
            for i in range(2):
                if theirs is None:
                    cells.append("-")
                    continue
                ratio = ours[i] / theirs[i] if theirs[i] else math.inf
                ratio = 1.0 if ours[i] == theirs[i] else ratio
                above |= ratio > 1.0
                text = f"{ratio:.2f}"
                cells.append(f"**{text}**" if ratio > 1.0 else text)
        if above:
            lines.append(f"| {r.row.name} | " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else ["None."]


def _count(results):
    """How often libattn's error is not above PyTorch's, of how many rows."""
    first = min(r.threads for r in results)
    some = [r for r in results
            if r.threads == first and r.error("torch") is not None]
    good = [sum(r.error("libattn")[i] <= r.error("torch")[i] for r in some)
            for i in range(2)]
    return [f"Not above PyTorch's: the largest error in {good[0]}, the root "
            f"mean square in {good[1]} of {len(some)} rows. What is above a "
            "rival's (in bold):", ""]


INTRO = """\
Contenders, their variants, layouts (bthd, bhtd, cache) and the rules are in
[bench/peers/README.md](../bench/peers/README.md). A row names batch, query
heads / key heads, queries x keys and width.

Ratios are the rival's time over libattn's, so above 1 libattn is faster, of
the rival's fastest variant: of the shortest calls, and in brackets the median
over the rounds of the ratio of their medians. Below 1.05 they are in bold. One
thread is timed by its own CPU time unless the options say otherwise, several by
the wall clock. In rows marked † (of that many threads) others took more than a
tenth of the processors in the rounds that count: with several threads, whoever
waits for all of them at a barrier loses most by that."""

SPEEDS = """\
GFLOP/s of the shortest call and, in brackets, of the median. They count 4 B H
Tq Tk D, whatever is visible. Errors are the largest and the root mean square
of the absolute difference from the reference over the sampled rows."""


TRAINING = """\
Gradients of q, k and v for a given gradient of the output: `both` is the
forward call and the backward one after it, `backward` the latter alone, from
what a forward call kept: out and the sums of the rows, but the weights in
PyTorch's `math`, which has four products to do there and not five. GFLOP/s
count 14 and 10 B H Tq Tk D for all. Errors are of the three gradients together.
The packages of ONNX Runtime for inference have no gradients, so it is not in
these tables."""


def _sections(results, means, rivals, text, level):
    """The tables of some rows, under headings of that level."""
    mark = "#" * level
    lines = [f"{mark} Geometric means of the ratios (number of rows)", "",
             *means(results), "", f"{mark} Ratios", "",
             *_ratios(results, rivals), "",
             f"{mark} Speeds and errors", "", *text, ""]
    for threads in _counts(results):
        some = [r for r in results if r.threads == threads]
        lines += [f"{mark}# {_threads(threads)}", "", *_speeds(some, rivals),
                  ""]
    return lines + [f"{mark} Ratios below {BAR}", "", *_below(results), "",
                    f"{mark} Errors above a rival's", "", *_count(results),
                    *_inexact(results, rivals), ""]


def markdown(results, facts):
    lines = ["# libattn against PyTorch and ONNX Runtime", ""]
    lines += [f"- {fact}" for fact in facts]
    lines += ["", *INTRO.splitlines(), ""]
    forward = [r for r in results if not r.row.training]
    training = [r for r in results if r.row.training]
    if forward:
        lines += _sections(forward, _means, list(NAMES), SPEEDS.splitlines(),
                           2)
    if training:
        lines += ["## Training", "", *TRAINING.splitlines(), ""]
        lines += _sections(training, _training_means, ["torch"],
                           ["GFLOP/s of the shortest call and, in brackets, of the "
                            "median; errors are the", "largest and the root "
                            "mean square."],
                           3)
    return "\n".join(lines)
