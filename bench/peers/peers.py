#!/usr/bin/env python3
"""libattn against PyTorch and ONNX Runtime on the same arrays. README.md."""

import argparse
import datetime
import gc
import os
import re
import sys
import time

# Read by the C library when the process starts, so it is started again with
# them. Freed blocks stay in the process: PyTorch allocates its output anew in
# each call, and would pay page faults for it that the others do not.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 24),
}


def restart_with_environment():
    if os.environ.get("ATTN_PEERS_STARTED"):
        return
    os.environ.update(ENVIRONMENT, ATTN_PEERS_STARTED="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--lib", help="libattn.so.0 (default: of this tree)")
    p.add_argument("--quick", action="store_true", help="a few rows, quickly")
    p.add_argument("--shapes", default="", metavar="REGEX",
                   help="rows whose name matches; see --list")
    p.add_argument("--rows", choices=("forward", "training", "all"),
                   default="all", help="which of them (default all)")
    p.add_argument("--list", action="store_true", help="names of the rows")
    p.add_argument("--threads", default="1,2", help="default 1,2")
    p.add_argument("--rounds", type=int, default=0, help="default 8")
    p.add_argument("--min-time", type=float, default=0.0, metavar="S",
                   help="seconds for each contender of a row, default 0.12")
    p.add_argument("--row-time", type=float, default=0.0, metavar="S",
                   help="seconds after which rounds are saved, default 2.5")
    p.add_argument("--wait", choices=("active", "passive"), default="active",
                   help="may a rival's threads spin between its own calls?")
    p.add_argument("--clock", choices=("wall", "cpu"), default="cpu",
                   help="where there is one thread: its own time (default), or "
                   "that of the wall; several are timed by the wall")
    p.add_argument("--quiet", type=float, default=0.0, metavar="S",
                   help="wait up to S seconds before each row of several "
                   "threads until the machine is quiet")
    p.add_argument("--csv", metavar="FILE")
    p.add_argument("--markdown", metavar="FILE")
    options = p.parse_args()
    quick = options.quick
    options.rounds = options.rounds or (6 if quick else 8)
    options.min_time = options.min_time or (0.06 if quick else 0.12)
    options.row_time = options.row_time or (1.2 if quick else 2.5)
    return options


def chosen_rows(options):
    from shapes import ROWS

    wanted = {"forward": (False,), "training": (True,), "all": (False, True)}
    rows = [r for r in ROWS if r.quick or not options.quick]
    rows = [r for r in rows if r.training in wanted[options.rows]]
    return [r for r in rows if re.search(options.shapes, r.name)]


def make_contenders(library, arrays, threads, options, notes):
    import attn_side
    import ort_side
    import torch_side

    row = arrays.row
    spins = [False]
    if threads > 1 and options.wait == "active":
        spins.append(True)
    makers = [lambda: attn_side.contender(library, arrays, threads)]
    for variant in torch_side.variants(row):
        makers.append(lambda v=variant: torch_side.contender(arrays, v))
    # The packages of ONNX Runtime for inference have no gradients.
    for variant in [] if row.training else ort_side.variants(row):
        for spin in spins:
            makers.append(
                lambda v=variant, s=spin: ort_side.Contender(
                    arrays, v, threads, s
                )
            )
    contenders = []
    for make in makers:
        try:
            contenders.append(make())
        except Exception as error:  # the reason is part of the result
            notes.append(f"{row.name}: not run: {str(error).strip()[:200]}")
    return contenders


def check(contenders, arrays, reference, notes):
    """Errors of all; a wrong result is not timed."""
    limit = 1e-3 if arrays.row.dtype == "f32" else 1e-6
    errors, good = {}, []
    for c in contenders:
        try:
            worst, rms = reference.errors(c.result())
        except RuntimeError as error:  # what only shows when it runs
            if c.rival == "libattn":
                raise
            reason = str(error).strip().splitlines()[0][-200:]
            notes.append(f"{arrays.row.name}: {c.rival} {c.name} not run: "
                         f"{reason}")
            continue
        if worst > limit:
            notes.append(f"{arrays.row.name}: {c.rival} {c.name} is wrong "
                         f"by {worst:.1e}")
            if c.rival == "libattn":
                raise SystemExit(notes[-1])
            continue
        errors[c.name, c.rival] = (worst, rms)
        good.append(c)
    return errors, good


class Sleeper:
    """Waits until the workers of the one that was active sleep."""

    SLICE, SLICES = 0.002, 50

    def __init__(self, threads, notes):
        self.threads, self.notes = threads, notes

    def __call__(self):
        if self.threads == 1:
            return
        for _ in range(self.SLICES):
            before = time.process_time()
            time.sleep(self.SLICE)
            if time.process_time() - before < 0.1 * self.SLICE:
                return
        self.notes.append("threads of a contender still ran 0.1 s after its "
                          "last call")


def gemm_speed(torch, n=1024):
    """GFLOP/s of PyTorch's own float32 product, as a yardstick."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    best = 1e9
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best / 1e9


def machine():
    model, flags = "unknown CPU", ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
            if line.startswith("flags"):
                flags = line
    level = "AVX-512" if "avx512f" in flags else "no AVX-512"
    return f"{model}, {os.cpu_count()} CPU(s), {level}"


def given():
    """The options as given, but for where the results go."""
    text = " ".join(sys.argv[1:])
    return re.sub(r"--(csv|markdown|lib)[ =]\S+", "", text).strip() or "none"


def facts(library, torch, options, seconds, kernels, notes):
    import onnxruntime

    config = torch.__config__.show()
    blas = re.search(r"(?:Math Kernel Library Version|OpenBLAS)[^\n]*",
                     config)
    torch.set_num_threads(1)
    today = datetime.date.today().isoformat()
    return [
        f"{today}, {machine()}; {seconds / 60:.1f} minutes, load averages "
        "at the end " + " ".join(f"{x:.1f}" for x in os.getloadavg()),
        *library.info(),
        f"PyTorch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}, "
        f"{blas.group(0) if blas else 'BLAS unknown'}; its 1024^3 float32 "
        f"product on one thread: {gemm_speed(torch):.0f} GFLOP/s",
        "PyTorch kernels seen by its profiler: "
        + ", ".join(f"{k}: {', '.join(sorted(v))}"
                    for k, v in sorted(kernels.items())),
        f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider",
        f"rounds {options.rounds}, {options.min_time} s a "
        f"contender and row, rivals' waiting: {options.wait}, "
        f"clock: {options.clock}"
        + (" (wall for 2 threads and more)" if options.clock == "cpu" else ""),
        "options: " + given(),
        *dict.fromkeys(notes),
    ]


def progress(result):
    import report

    r = result
    ours = r.best("libattn")
    text = f"{r.threads}t {r.row.name:61s} "
    text += f"{r.row.flops / ours.minimum / 1e9:7.1f} GF "
    for rival in ("torch", "ort"):
        t = r.best(rival)
        if t is not None:
            text += f" {rival} {r.ratio(rival):5.2f} " \
                    f"({r.paired(rival):5.2f}) {t.contender.name:14s}"
    print(text + report.mark(r), flush=True)


def run_row(row, threads, library, options, notes, kernels):
    import torch

    import load
    import report
    import timing
    from arrays import Arrays
    from reference import reference as reference_for

    torch.set_num_threads(1)
    arrays = Arrays(row)
    reference = reference_for(row, arrays)
    torch.set_num_threads(threads)
    contenders = make_contenders(library, arrays, threads, options, notes)
    errors, good = check(contenders, arrays, reference, notes)
    for c in good:
        for name in getattr(c, "kernels", []):
            kernels.setdefault(c.name, set()).add(name)
    if threads > 1:
        load.wait_for_quiet(options.quiet)
    cpu_time = options.clock == "cpu" and threads == 1
    times, rounds, others = timing.run(good, options,
                                       Sleeper(threads, notes), cpu_time,
                                       threads)
    for t in times:
        t.contender = Label(t.contender)
    return report.Result(row, threads, times, errors, rounds, others)


def main():
    options = parse()
    rows = chosen_rows(options)
    if options.list:
        print("\n".join(row.name for row in rows))
        return
    if options.wait == "passive":
        ENVIRONMENT["OMP_WAIT_POLICY"] = "passive"
    restart_with_environment()

    import torch

    import attn_side
    import report

    library = attn_side.Library(options.lib or attn_side.find_library())
    if any(row.training for row in rows) and not library.has_backward:
        raise SystemExit(f"peers: {library.path} has no attn_sdpa_backward; "
                         "give --rows forward")
    for line in library.info():
        print(line)
    start, results, notes, kernels = time.time(), [], [], {}
    for threads in [int(t) for t in options.threads.split(",")]:
        for row in rows:
            results.append(run_row(row, threads, library, options, notes,
                                   kernels))
            progress(results[-1])
            gc.collect()
    about = facts(library, torch, options, time.time() - start, kernels,
                  notes)
    text = report.markdown(results, about)
    if options.csv:
        report.write_csv(options.csv, results)
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write(text)
    else:
        print(text)


class Label:
    """What is left of a contender when its arrays are freed."""

    def __init__(self, contender):
        self.rival, self.name = contender.rival, contender.name


if __name__ == "__main__":
    main()
