"""Rounds in which all sides take turns, and what they come to."""

import statistics

# Of one side in one round.
NANOSECONDS = 1_000_000


def quartiles(values):
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


class Rounds:
    """Nanoseconds of each side, once in each round; in every fifth it runs twice."""

    def __init__(self, batch, sides, rounds, n=None):
        self.batch, self.sides, self.n = batch, sides, n
        if n is None:
            slowest = max(self._warm(side) for side in sides)
            self.n = max(1, min(2_000, NANOSECONDS // max(1, slowest)))
        self.times = {side: [] for side in sides}
        self.twins = []
        for i in range(rounds):
            for side in sides if i % 2 else sides[::-1]:
                took = self._run(side)
                if i % 5 == 0:
                    again = self._run(side)
                    self.twins.append(abs(again / took - 1))
                self.times[side].append(took)

    def _run(self, side):
        # The side before leaves caches full of its own, and the heap with what it freed, which the next large
        # allocation sorts.
        if not side.endswith("cold"):
            self.batch.run(side, 1)
        return max(1, self.batch.run(side, self.n)) / self.n

    def _warm(self, side):
        self.batch.run(side, 1)
        return self.batch.run(side, 1)

    def median(self, side):
        return statistics.median(self.times[side])

    def ratio(self, over, under):
        """Median of the rounds' ratios, their quartiles, and the ratio of the best times."""
        ratios = [a / b for a, b in zip(self.times[over], self.times[under])]
        best = min(self.times[over]) / min(self.times[under])
        return statistics.median(ratios), quartiles(ratios), best

    @property
    def same(self):
        """By how much the second of two runs of the same code differs, in the median."""
        return statistics.median(self.twins)
