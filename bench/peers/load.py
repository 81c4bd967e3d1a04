"""How much of the processors other processes take: /proc/stat and our own."""

import os
import time


class Others:
    """CPU time of others since the object was made, as a share of all CPUs."""

    def __init__(self):
        self.start = self._now()

    @staticmethod
    def _now():
        try:
            with open("/proc/stat") as file:
                fields = [int(x) for x in file.readline().split()[1:9]]
        except OSError:  # not Linux: nothing is known
            return None
        tick = os.sysconf("SC_CLK_TCK")
        busy = (sum(fields) - fields[3] - fields[4]) / tick
        return busy, time.process_time(), sum(fields) / tick

    def share(self):
        now = self._now()
        if now is None or self.start is None:
            return 0.0
        busy, own, total = (b - a for a, b in zip(self.start, now))
        return max(0.0, busy - own) / total if total > 0 else 0.0


def wait_for_quiet(limit):
    """Up to `limit` seconds, until others take less than a twentieth."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        others = Others()
        time.sleep(0.5)
        if others.share() < 0.05:
            return
