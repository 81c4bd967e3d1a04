"""Rounds: every contender in turn, the order rotated, one active at a time."""

import math
import statistics
import time

CALLS_AT_MOST = 2000
ROUNDS_AT_LEAST = 3
# A variant this much slower than its rival's best at the first look is timed
# no further: it cannot become the rival's best.
HOPELESS = 1.8
# With one thread the CPU time of that thread is what a call would take on an
# idle machine, when others take the processor away now and then.
# That clock now and then gives a short call too little in a virtual machine,
# so its fastest twentieth is passed over.
SKIPPED = {False: 0.0, True: 0.05}
CLOCKS = {False: time.perf_counter_ns, True: time.thread_time_ns}


class Times:
    """Seconds a call of one contender of one row."""

    def __init__(self, contender):
        self.contender = contender
        self.first = 0.0  # of the first look
        self.minimum = math.inf
        self.medians = []
        self.seconds = []

    @property
    def calls(self):
        return len(self.seconds)

    @property
    def median(self):
        return statistics.median(self.medians or [self.minimum])

    def add(self, seconds):
        self.medians.append(statistics.median(seconds))
        self.seconds += seconds

    def finish(self, skipped):
        """The minimum, after `skipped` of the fastest calls."""
        if self.seconds:
            place = int(skipped * len(self.seconds))
            self.minimum = sorted(self.seconds)[place]


def _burst(contender, calls, warm, clock):
    """Seconds of each of `calls` calls, after `warm` untimed ones."""
    with contender.active():
        call = contender.caller()
        for _ in range(warm):
            call()
        out = []
        for _ in range(calls):
            start = clock()
            call()
            out.append(clock() - start)
    return [ns * 1e-9 for ns in out]


def _first_look(times, rest, clock):
    """An estimate, and the end of variants far behind their own best."""
    for t in times:
        seconds = _burst(t.contender, 1, 0, clock)
        if seconds[0] < 0.5:
            seconds += _burst(t.contender, 2, 0, clock)
        t.first = min(seconds)
        t.minimum = t.first
        rest()
    keep = []
    for t in times:
        rival = t.contender.rival
        best = min(o.first for o in times if o.contender.rival == rival)
        if t.first <= HOPELESS * best:
            keep.append(t)
    return keep


def run(contenders, options, rest, cpu_time):
    """Times of the contenders; `rest` is called after each burst and returns
    when the threads of the one that was active have gone to sleep."""
    times = [Times(c) for c in contenders]
    clock = CLOCKS[cpu_time]
    keep = _first_look(times, rest, clock)
    rounds = options.rounds
    calls = {}
    for t in keep:
        want = options.min_time / rounds / max(t.first, 1e-7)
        calls[t] = max(1, min(CALLS_AT_MOST, math.ceil(want)))
    once = sum(calls[t] * t.first for t in keep)
    if once * rounds > options.row_time:
        rounds = max(ROUNDS_AT_LEAST, int(options.row_time / once))
    for r in range(rounds):
        for i in range(len(keep)):
            t = keep[(i + r) % len(keep)]
            warm = 1 if t.first < 0.02 else 0
            t.add(_burst(t.contender, calls[t], warm, clock))
            rest()
    for t in times:
        t.finish(SKIPPED[cpu_time])
    return times, rounds
