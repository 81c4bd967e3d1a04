"""Rounds: every contender in turn, the order rotated, one active at a time."""

import math
import statistics
import time

import load

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
# With several threads only the wall clock tells how long a call took, and one
# foreign process delays all threads that wait for each other. So there are
# many short rounds, and of them those count in which others took least of the
# processors: all with less than QUIET, but at least this share of them.
ROUNDS_OF_SEVERAL = 3  # times as many
KEPT = 1 / 3
QUIET = 0.05


class Times:
    """Seconds a call of one contender of one row."""

    def __init__(self, contender):
        self.contender = contender
        self.first = 0.0  # of the first look
        self.minimum = math.inf
        self.rounds = []  # [round] -> seconds of its calls
        self.medians = []  # of the rounds that count
        self.calls = 0

    @property
    def median(self):
        return statistics.median(self.medians or [self.minimum])

    def finish(self, kept, skipped):
        """Sums up the rounds in `kept`; the minimum after `skipped` of the
        fastest calls."""
        if not self.rounds:
            return
        self.medians = [statistics.median(self.rounds[r]) for r in kept]
        seconds = sorted(s for r in kept for s in self.rounds[r])
        self.calls = len(seconds)
        self.minimum = seconds[int(skipped * len(seconds))]
        self.rounds = []


def paired(other, ours):
    """Median over the rounds of other's time over ours in the same round."""
    pairs = list(zip(other.medians, ours.medians))
    if not pairs:
        return other.median / ours.median
    return statistics.median(a / b for a, b in pairs)


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


def _quiet_rounds(others, cpu_time):
    """Numbers of the rounds that count, from what others took in each."""
    order = sorted(range(len(others)), key=lambda r: others[r])
    if cpu_time:
        return order
    least = max(ROUNDS_AT_LEAST, math.ceil(KEPT * len(order)))
    return [r for n, r in enumerate(order)
            if n < least or others[r] < QUIET]


def run(contenders, options, rest, cpu_time, threads):
    """Times of the contenders, the number of rounds that count, and what share
    of the processors others took in those. `rest` is called after each burst
    and returns when the threads of the one that was active sleep."""
    times = [Times(c) for c in contenders]
    clock = CLOCKS[cpu_time]
    keep = _first_look(times, rest, clock)
    more = ROUNDS_OF_SEVERAL if threads > 1 else 1
    rounds = more * options.rounds
    calls = {}
    for t in keep:
        want = options.min_time / options.rounds / max(t.first, 1e-7)
        calls[t] = max(1, min(CALLS_AT_MOST, math.ceil(want)))
    once = sum(calls[t] * t.first for t in keep)
    if once * rounds > more * options.row_time:
        rounds = max(ROUNDS_AT_LEAST, int(more * options.row_time / once))
    others = []
    for r in range(rounds):
        round_load = load.Others()
        for i in range(len(keep)):
            t = keep[(i + r) % len(keep)]
            warm = 1 if t.first < 0.02 else 0
            t.rounds.append(_burst(t.contender, calls[t], warm, clock))
            rest()
        others.append(round_load.share())
    kept = _quiet_rounds(others, cpu_time)
    for t in times:
        t.finish(kept, SKIPPED[cpu_time])
    return times, len(kept), sum(others[r] for r in kept) / len(kept)
