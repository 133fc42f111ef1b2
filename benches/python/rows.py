"""The rows: what each measures, and which value it has to reach."""

import dataclasses
import math
import statistics

import gpu
from limits import LIMITS, TARGET
from rounds import Rounds, quartiles
from sides import NAMES, Batch, overlap

MIXED = [("mixed", columns, 1000) for columns in (1, 10, 100, 1000)]


@dataclasses.dataclass
class Figure:
    """One measured value of a row."""

    what: str
    measured: float
    limit: float
    at_least: bool = False
    spread: tuple = None
    best: float = None
    same: float = None
    # It is a ratio to the physical limit.
    to_limit: bool = False

    @property
    def load(self):
        """The share of its limit that is used up; beyond 1 it misses."""
        return self._share(self.measured, self.limit)

    @property
    def least_load(self):
        """As `load`, by the best times if that is less: what a busy machine cannot make worse."""
        return min(self._share(value, self.limit) for value in (self.measured, self.best) if value is not None)

    @property
    def reached(self):
        """The share of the physical limit."""
        return self.measured if self.at_least else 1 / self.measured

    def _share(self, value, limit):
        if math.isinf(limit):
            return 0
        if self.at_least:
            return limit / value
        if limit == 0:
            return math.inf if value > 0 else 0
        return value / limit

    def text(self):
        times = self.best is not None
        text = f"{self.measured:.3f}" if times else f"{self.measured:.4g}"
        if not math.isinf(self.limit):
            text += f" ({'>=' if self.at_least else '<='} {self.limit:.4g})"
        if self.spread:
            text += f", quartiles {self.spread[0]:.3f} to {self.spread[1]:.3f}"
        if times:
            text += f", best {self.best:.3f}"
        if self.same is not None:
            text += f", same code +-{self.same:.1%}"
        return text


@dataclasses.dataclass
class Row:
    id: str
    case: str
    target: str
    figures: list = dataclasses.field(default_factory=list)
    # Medians of all sides, as text.
    notes: list = dataclasses.field(default_factory=list)
    missing: str = ""

    @property
    def worst(self):
        return max(self.figures, key=lambda figure: figure.load)

    @property
    def reached(self):
        """The share of the physical limit that the worst figure reaches; `None` where the limit is known in words only."""
        count = LIMITS[self.id][1]
        if count is None:
            return min((figure.reached for figure in self.figures if figure.to_limit), default=None)
        if count == TARGET:
            return 1 / max(1, self.worst.load)
        return min(1, count / self.worst.measured)

    def passes(self):
        return self.worst.load <= 1

    def within(self, margin):
        return all(figure.least_load <= margin for figure in self.figures)


@dataclasses.dataclass
class Times:
    """A row of times."""

    id: str
    case: str
    target: str
    # Ours, peer, limit; infinity for what is only told.
    pairs: list
    shapes: list
    # Sides that are measured along with it.
    also: tuple = ()
    # Of the medians.
    unit: str = "ns a column"
    # How often a side runs in its turn, if that matters.
    n: int = None

    rounds: int = 60
    quick: int = 15

    def sides(self):
        return list(dict.fromkeys([*(p[0] for p in self.pairs), *(p[1] for p in self.pairs), *self.also]))

    def measure(self, rounds):
        """The row, and the rounds of each shape."""
        row, all_rounds = Row(self.id, self.case, self.target), []
        for shape in self.shapes:
            with Batch(*shape) as batch:
                for side in self.sides():
                    batch.check(side)
                measured = Rounds(batch, self.sides(), rounds, self.n)
                row.figures += [self._figure(measured, *pair) for pair in self.pairs]
                row.notes.append(self._note(measured, batch))
                all_rounds.append(measured)
        return row, all_rounds

    def _figure(self, measured, ours, peer, limit):
        ratio, spread, best = measured.ratio(ours, peer)
        what = f"{measured.batch.name}, {NAMES[ours]} / {NAMES[peer]}"
        return Figure(what, ratio, limit, False, spread, best, measured.same, (ours, peer) in self._to_limit())

    def _to_limit(self):
        """Of the pairs with the limit those that have a target, or all if none has one."""
        pairs = [pair for pair in self.pairs if pair[1] in AT_LIMIT]
        return {pair[:2] for pair in pairs if not math.isinf(pair[2])} or {pair[:2] for pair in pairs}

    def _note(self, measured, batch):
        def value(side):
            time = measured.median(side)
            if self.unit == "GB/s":
                return f"{NAMES[side]} {batch.bytes / time:.2f}"
            return f"{NAMES[side]} {time / (1 if self.unit == 'ns a batch' else batch.columns):.0f}"

        return f"{batch.name}, {self.unit}: " + ", ".join(value(side) for side in measured.sides)


# Rows in which the system's scheduler decides more than the code does: --quick leaves them out.
SCHEDULED = {"A2"}
# Sides that are a row's physical limit.
AT_LIMIT = {"channel", "channel_single", "memcpy", "write_structs"}
EXPORT = "export + release, 1/10/100/1000 mixed columns"
TIMES = [
    Times("E2", f"{EXPORT}, time", "<= 0.5x arrow-rs, <= 0.5x Arrow C++",
          [(ours, peer, limit) for ours, limit in (("export", 0.5), ("export_host", math.inf))
           for peer in ("export_arrow", "cpp.export")] + [("export", "write_structs", math.inf)],
          MIXED, also=("export_ready",)),
    Times("I1", "import to a device view, 1000 columns, time", "<= 0.5x arrow-rs, <= 1.0x nanoarrow's ArrowArrayView",
          [("import", "import_arrow", 0.5), ("import", "nanoarrow.view", 1.0), ("import", "write_structs", math.inf)], MIXED[-1:],
          also=("cpp.import", "nanoarrow.view_again")),
    Times("X1", "device stream of 10,000 batches x 10 columns x 1 row, export + import",
          "<= 0.5x Arrow C++'s device stream and arrow-rs's plain stream",
          [("stream", "cpp.stream", 0.5), ("stream", "stream_arrow", 0.5)],
          [("integers", 10, 1)], also=("stream_host",), unit="ns a batch", n=10_000, rounds=30, quick=8),
    Times("A1", "async stream of 10,000 batches x 10 columns x 1 row, producer + consumer, queue 5",
          "<= 0.5x Arrow C++ on both sides, one thread",
          [("async", "cpp.async", 0.5)], [("integers", 10, 1)], also=("stream",), unit="ns a batch", n=10_000, rounds=30, quick=8),
    Times("A2", "the same with producer and consumer on a thread each; batches that are requested one by one",
          "<= 0.2x Arrow C++; one by one: told",
          [("async_threads", "cpp.async", 0.2), ("async_threads", "channel", math.inf), ("async_single", "cpp.async_single", math.inf),
           ("async_single", "channel_single", math.inf)], [("integers", 10, 1)], unit="ns a batch", n=10_000, rounds=30, quick=8),
    Times("P1", "pack 1000 columns x 1000 rows into a warm host buffer", "<= 1.5x one memcpy of the payload",
          [("copy", "memcpy", 1.5), *(("copy", peer, math.inf) for peer in ("nanoarrow.copy", "pyarrow.copy"))], MIXED[-1:], unit="GB/s", n=4),
    Times("F3", "64 MiB in columns of 512 KiB to the simulated device and back: the crate's part, warm; with the simulation's; cold",
          "<= 1.15x one memcpy, warm",
          [("up_held", "memcpy", 1.15), ("download", "memcpy", 1.15),
           *((side, "memcpy", math.inf) for side in ("up", "up_cold", "download_cold"))],
          [("integers", 128, 1 << 16)], unit="GB/s", n=1, rounds=30, quick=5),
]

# Rows of the program `counts`.
COUNTS = [
    ("C1", "upload: allocations / copies / events / host waits", "1 / chunks + direct buffers / <= copies + 1 / 0; nothing created once warm"),
    ("C2", "bytes of a 1 % slice of 10 million rows", "<= 1.05x + 64 per buffer"),
    ("C3", "allocated bytes", "<= payload + 64 per buffer"),
    ("D3", "300 string columns on a device: host waits, bytes read for the sizes", "2 waits; 8 bytes a column"),
    ("V2", "import with Validation::Full from the simulated device: bytes that come down, host waits", "<= 1.05x the batch's bytes: validity bitmaps come twice; 2 waits"),
    ("Z1", "re-export on the same device", "0 copies, 0 waits"),
    ("A1", "async stream of 10,000 batches x 10 columns x 1 row, producer + consumer, queue 5; two of them and a task on one thread",
     "<= 0.5x Arrow C++ on both sides, one thread; 10 batches behind, 20 between two turns"),
    ("M1", "bytes held for those used: one column of eight, a slice, a stream of 100,000 batches, idle pools after trim", "<= 1.1x, compacted exactly; 64 batches, 65 staging buffers; 0"),
]

def counts(cases, lines):
    """The rows of what the program `counts` printed."""
    rows = {id: Row(id, case, target) for id, case, target in cases}
    for line in lines:
        id, what, measured, limit = line.split("\t")
        rows[id].figures.append(Figure(what, float(measured), float(limit)))
    return list(rows.values())


def joined(first, second):
    """One row of what two programs have measured."""
    return Row(first.id, first.case, first.target, first.figures + second.figures, first.notes + second.notes)


def of_gpu(lines):
    """The rows of what the probe printed; those whose figures are no measurement are missing."""
    cases = dict(gpu.ROWS)
    rows = {}
    for id, what, measured, limit, at_least, instead in gpu.parsed(lines):
        row = rows.setdefault(id, Row(id, cases.get(id, ""), ""))
        target = f"{'>=' if at_least else '<='} {limit:g}x"
        row.target = ", ".join(dict.fromkeys(filter(None, [*row.target.split(", "), target])))
        if instead:
            row.missing = instead
        else:
            row.figures.append(Figure(what, float(measured), limit, at_least, to_limit=id in gpu.TO_LIMIT))
    return list(rows.values())


def long_streams(rounds, batches=30):
    """S3."""
    row = Row("S3", "long stream on the simulated device, producer as slow as the copy",
              "wall <= 1.10x max(produce, copy) + one batch")
    # The second is what it costs not to overlap.
    ways = [("up", 1.10), ("up, each batch waited for at once", math.inf), ("down to the host", 1.10)]
    for way, (name, limit) in enumerate(ways):
        runs = [overlap(way, batches) for _ in range(3 if math.isinf(limit) else rounds)]
        ratios = [(wall - one) / max(produce, copies) for wall, produce, copies, one in runs]
        figure = Figure(name, statistics.median(ratios), limit, spread=quartiles(ratios), best=min(ratios), to_limit=not math.isinf(limit))
        row.figures.append(figure)
        wall, produce, copies, _ = (statistics.median(times) * 1e3 for times in zip(*runs))
        row.notes.append(f"{batches} batches {name}: {wall:.0f} ms, producer {produce:.0f} ms, copies {copies:.0f} ms")
    return row


def beside_plain(row, lines, limit, at_least):
    """A row of what the example `speed` of a backend printed; `limit` is that of a line's first column."""
    for line in lines:
        what, *numbers = line.split("\t")
        ratio, first, third, best, plain, ours = map(float, numbers)
        # A loop over many buffers is no limit.
        to_limit = not what.startswith("1,000")
        row.figures.append(Figure(what, ratio, limit(what), at_least=at_least, spread=(first, third), best=best, to_limit=to_limit))
        row.notes.append(f"{what}, GB/s: arrow-device {ours:.2f}, plain {plain:.2f}")
    return row


def opencl(lines):
    """O1: ratios of rates."""
    row = Row("O1", "OpenCL on this machine's runtime: upload and download of 8 columns, 16 to 256 MiB", ">= 0.9x the rate of plain clEnqueueSVMMemcpy")
    return beside_plain(row, lines, lambda what: 0.9, at_least=True)


def webgpu(lines):
    """WG1: ratios of times."""
    row = Row("WG1", "WebGPU on this machine's adapter: upload and download of 1 MiB, of 96 MiB, and of 1,000 columns of 1,000 rows",
              "<= 1.2x, <= 1.0x the time of plain wgpu; <= 0.1x that of a loop over buffers")
    # What else there is, for comparison.
    limits = {"1 MiB": 1.2, "96 MiB": 1.0, "1,000 x 1,000": 0.1}
    return beside_plain(row, lines, lambda what: limits.get(what.rsplit(" ", 1)[0], math.inf), at_least=False)


PROCESSES = [
    ("H1", "a batch handed to another process, by itself; batches in a row beside Arrow IPC, handed over and not read",
     "<= 60 us; 64 MiB <= 2x the time of 1 MiB; <= 0.05x the time of a Unix socket at 64 MiB"),
]
DATAFUSION = [
    ("DF1", "DataFusion: aggregates over a device table that the host can read", "<= 1.02x MemTable"),
    ("DF2", "DataFusion: the rule DeviceTransitions in planning TPC-H 5", "<= 1 % of planning"),
    ("DF3", "DataFusion: device operators that need no kernel between device operators: copies, waits, bytes; joined batches", "0; one allocation and the rows' bytes"),
    ("DF4", "DataFusion: the result of four busy partitions as a device stream", "<= 1.1x execute_stream"),
]
CLUSTER = [
    ("DF5", "Ballista, two executors: TPC-H 1, 3 and 6 with an operator on the CPU above each scan", "<= 1.05x without operators"),
    ("DF6", "Ballista, two executors with a simulated device: bytes and copies of each stage", "0 where nothing moves"),
]


def printed(lines, kinds):
    """What a program printed: `hand_over` H1, a bench `overhead` DF1 to DF4, or DF5 and DF6."""
    rows = {id: Row(id, case, target) for id, case, target in kinds}
    for line in lines:
        id, what, *numbers = line.split("\t")
        measured, limit, *times = map(float, numbers)
        spread, best = (tuple(times[:2]), times[2]) if times else (None, None)
        # Those that have a limit are held against the same work without devices.
        to_limit = id in ("DF1", "DF4", "DF5") and not math.isinf(limit)
        rows[id].figures.append(Figure(what, measured, limit, spread=spread, best=best, to_limit=to_limit))
    return list(rows.values())
