"""Measures every row beside its peers and its limit, those of a GPU where there is one, and reports: see benches/report."""

import argparse
import datetime
import os
import pathlib
import subprocess
import sys

import callgrind
import gpu
import machine
import rows
from limits import LIMITS

ORDER = "E2 E3 I1 V2 X1 A1 A2 P1 C1 C2 C3 D3 S3 O1 WG1 H1 DF1 DF2 DF3 DF4 DF5 DF6 Z1 F3 M1 L1".split()
PROGRAMS = pathlib.Path(os.environ["BENCHES_PROGRAMS"])
# What --quick lets pass of times, times the limit: machines that build are busy, and processors differ in what a copy or a lock costs.
MARGIN = 1.5


def progress(text):
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def run(program, *arguments):
    """The lines that a program prints."""
    command = [PROGRAMS / program, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


class Report:
    def __init__(self, quick, wanted):
        self.quick, self.wanted = quick, wanted
        self.rows, self.rounds, self.probe = {}, {}, []
        self.timed = {times.id for times in rows.TIMES} | {"S3", "O1", "WG1", "H1", "DF1", "DF2", "DF4", "DF5"}

    def add(self, measured):
        for row in measured:
            if row.id in self.wanted:
                before = self.rows.get(row.id)
                self.rows[row.id] = rows.joined(before, row) if before else row

    def counts(self):
        if self.wanted & {row[0] for row in rows.COUNTS}:
            progress("counts")
            self.add(rows.counts(rows.COUNTS, run("counts")))

    def instructions(self):
        for id, measure in [("E3", callgrind.exports), ("L1", lambda: callgrind.linear(self.quick))]:
            if id in self.wanted:
                progress(id)
                missing = rows.Row(id, "instructions", "", missing="valgrind is missing")
                self.add([measure() if callgrind.available() else missing])

    def times(self):
        for times in rows.TIMES:
            if times.id not in self.wanted or self.quick and times.id in rows.SCHEDULED:
                continue
            progress(times.id)
            row, rounds = times.measure(times.quick if self.quick else times.rounds)
            if self.quick and not row.within(MARGIN):
                progress(f"{times.id} again")
                row, rounds = times.measure(2 * times.quick)
            self.add([row])
            self.rounds[times.id] = rounds
        if "S3" in self.wanted:
            progress("S3")
            self.add([rows.long_streams(3 if self.quick else 30)])

    def opencl(self):
        if "O1" not in self.wanted:
            return
        progress("O1")
        try:
            self.add([rows.opencl(run("examples/speed_opencl", "5" if self.quick else "41"))])
        except subprocess.CalledProcessError:
            self.add([rows.Row("O1", "OpenCL beside plain copies", "", missing="there is no OpenCL device with shared virtual memory")])

    def webgpu(self):
        if "WG1" not in self.wanted or self.quick:
            return
        progress("WG1")
        try:
            self.add([rows.webgpu(run("examples/speed_wgpu", "41"))])
        except subprocess.CalledProcessError:
            self.add([rows.Row("WG1", "WebGPU beside plain wgpu", "", missing="there is no WebGPU adapter")])

    def processes(self):
        if "H1" in self.wanted and sys.platform == "linux":
            progress("H1")
            self.add(rows.printed(run("examples/hand_over", "--lines"), rows.PROCESSES))

    def datafusion(self):
        # Built here: the programs have no name of their own, and compiling DataFusion with optimizations takes long.
        for what, kinds, folder, options in [
            ("DataFusion", rows.DATAFUSION, ".", "-p arrow-device-datafusion"),
            ("Ballista", rows.CLUSTER, "datafusion/cluster", "--features ballista,distributed"),
        ]:
            if self.quick or not self.wanted & {id for id, _, _ in kinds}:
                continue
            progress(what)
            command = f"cargo bench --locked {options} --bench overhead -- --lines"
            printed = subprocess.run(command.split(), cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            self.add(rows.printed((line for line in printed if line.startswith("DF")), kinds))

    def gpu(self):
        """Rows of the probe, which says for itself whether its figures are a measurement."""
        if self.quick or not self.wanted & {id for id, _ in gpu.ROWS} or not gpu.has_driver():
            return
        progress("GPU")
        printed = gpu.probe()
        self.probe = [line for line in printed if not line.startswith(("row\t", "grid\t"))]
        self.add(row for row in rows.of_gpu(printed) if not (row.missing and row.id in self.rows))

    def measure(self):
        self.counts()
        self.instructions()
        self.times()
        self.opencl()
        self.webgpu()
        self.processes()
        self.datafusion()
        self.gpu()
        order = [*ORDER, *(id for id, _ in gpu.ROWS)]
        self.rows = {id: self.rows[id] for id in order if id in self.rows}

    def beyond(self):
        """Rows that --quick fails for."""
        measured = (row for row in self.rows.values() if not row.missing)
        return [row.id for row in measured if not row.within(MARGIN if row.id in self.timed else 1)]

    def state(self, row):
        if row.missing:
            return f"not measured: {row.missing}"
        return "pass" if row.passes() else "**miss**"

    def table(self):
        lines = ["| id | case | target | measured (worst) | spread | limit | of the limit | |", "| --- | --- | --- | --- | --- | --- | ---: | --- |"]
        for row in self.rows.values():
            measured = spread = reached = ""
            if not row.missing:
                worst = row.worst
                measured = f"{worst.measured:.3g} ({worst.what})"
                exact = "" if row.id in dict(gpu.ROWS) else "exact"
                spread = "{:.3g} to {:.3g}".format(*worst.spread) if worst.spread else exact
                reached = f"{row.reached:.0%}" if row.reached is not None else ""
            lines.append(f"| {row.id} | {row.case} | {row.target} | {measured} | {spread} | {LIMITS[row.id][0]} | {reached} | {self.state(row)} |")
        rest = (row for row in gpu.ROWS if row[0] in self.wanted - self.rows.keys())
        lines += [f"| {id} | {case} | | | | {LIMITS[id][0]} | | not measured: needs a GPU |" for id, case in rest]
        return lines

    def details(self):
        for row in self.rows.values():
            yield f"**{row.id}** {row.missing}".rstrip()
            yield ""
            yield from (f"- {figure.what}: {figure.text()}" for figure in row.figures)
            yield from (f"- *{note}*" for note in row.notes)
            yield ""

    def summary(self):
        measured = [row for row in self.rows.values() if not row.missing]
        return f"{sum(row.passes() for row in measured)} of {len(measured)} rows meet their target"

    def memcpy(self):
        """GB/s of a memcpy by bytes."""
        measured = [rounds for id in ("P1", "F3") for rounds in self.rounds.get(id, ())]
        return {rounds.batch.bytes: rounds.batch.bytes / rounds.median("memcpy") for rounds in measured}


def write(report, out):
    name = f"{datetime.date.today():%Y-%m-%d}-{machine.kind()}"
    facts = machine.facts(report.memcpy())
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"# {machine.cpu()}, {machine.cores()} cores, {datetime.date.today():%Y-%m-%d}", ""]
    lines += ["Written by `benches/report`. Times are medians of the ratios of rounds in which all sides take turns in one process;",
              "the spread is their quartiles. A row's value is that of its worst shape. The limit is what nobody can beat, and how near the row comes to",
              "it, where a measurement can say that; [performance](../../docs/performance.md) says what each row means.", ""]
    lines += [*report.table(), "", report.summary(), ""]
    if any(row.id in dict(gpu.ROWS) and not row.missing for row in report.rows.values()):
        lines += ["## The probe of the GPU", "", "```text", *report.probe, "```", ""]
    lines += ["## Machine", "", "| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts), ""]
    lines += ["## All shapes", "", *report.details()]
    (out / f"{name}.md").write_text("\n".join(lines))
    print(f"written: {out / name}.md")


def main():
    parser = argparse.ArgumentParser(prog="benches/report")
    parser.add_argument("--quick", action="store_true", help="gate: fewer rounds, a margin for times, nothing is written")
    parser.add_argument("--out", type=pathlib.Path, help="where to write, instead of benches/results; also of some rows only")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="these rows only, and nothing is written without --out")
    options = parser.parse_args()
    everything = {*ORDER, *(id for id, _ in gpu.ROWS)}
    if unknown := set(options.rows) - everything:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    report = Report(options.quick, set(options.rows) or everything)
    report.measure()
    print("\n".join([*report.details(), *report.table(), ""]))
    if not options.quick and (options.out or not options.rows):
        where = pathlib.Path(os.environ["BENCHES_FROM"], options.out) if options.out else pathlib.Path("benches/results")
        write(report, where)
    beyond = report.beyond()
    missing = [row for row in report.rows.values() if row.missing]
    for row in missing:
        print(f"{row.id} not measured: {row.missing}")
    if options.quick and beyond:
        print(f"beyond the margin: {', '.join(beyond)}")
    print(report.summary())
    return 1 if options.quick and beyond else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
