"""Measures every row beside its peers and its limit, those of a GPU where there is one, and reports: see benches/report."""

import argparse
import datetime
import os
import pathlib
import subprocess
import sys

import callgrind
import draw
import gpu
import machine
import rows
from limits import LIMITS
from rounds import Rounds
from sides import NAMES, Batch

ORDER = "E1 E2 E3 E4 I1 I2 I3 V1 V2 X1 A1 A2 P1 P2 P3 C1 C2 C3 D4 D3 S3 O1 WG1 DF1 DF2 DF3 DF4 DF5 DF6 Z1 F1 F1T F2 F3 M1 T1 W1 L1 N1 N2 N3 N4".split()
# What --quick lets pass of times, times the limit: machines that build are busy, and processors differ in what a copy or a lock costs.
MARGIN = 1.5


def progress(text):
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


MODEL = [
    "## Model: the stand-in driver as a clock (25 GB/s each way, 1 us a call, 300 ns a query); not measured on a GPU", "",
    "Copies take that time but move nothing, since no thread is as fast as a copy engine; everything else is done, and was",
    "measured on this machine. These rows have no targets: they show what overlaps and what calls cost.", "",
]


def run(program, *arguments):
    """The lines that a program prints."""
    command = [f"target/release/{program}", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


class Report:
    def __init__(self, quick, wanted):
        self.quick, self.wanted = quick, wanted
        self.rows, self.rounds, self.model, self.probe = {}, {}, [], []
        self.timed = {times.id for times in rows.TIMES} | {"S3", "T1", "F2", "O1", "WG1", "DF1", "DF2", "DF4", "DF5"}

    def add(self, measured):
        for row in measured:
            if row.id in self.wanted:
                before = self.rows.get(row.id)
                self.rows[row.id] = rows.joined(before, row) if before else row

    def counts(self):
        for cases, command in [(rows.COUNTS, ["counts"]), (rows.DRIVER, ["driver", "counts"])]:
            if self.wanted & {row[0] for row in cases}:
                progress(f"counts of {command[0]}")
                self.add(rows.counts(cases, run(*command)))

    def models(self):
        """Times that the stand-in driver keeps: --quick has no use for them."""
        if not self.quick and self.wanted & {id for id, _ in rows.MODEL}:
            progress("model")
            self.model = list(rows.model(self.wanted, run("driver", "model")))

    def instructions(self):
        if self.wanted & {"E1", "E3"}:
            if callgrind.available():
                progress("instructions")
                self.add(callgrind.rows())
            else:
                for id in ("E1", "E3"):
                    self.add([rows.Row(id, "export + release, instructions", "", missing="valgrind is missing")])
        if "L1" in self.wanted:
            progress("L1")
            missing = rows.Row("L1", "another of many parts, instructions", "", missing="valgrind is missing")
            self.add([callgrind.linear(self.quick) if callgrind.available() else missing])

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
        if "T1" in self.wanted and not self.quick:
            progress("T1")
            self.add(rows.datafusion(run("threads", "31"), rows.THREADS))

    def parquet(self):
        # Built here: --quick does without compiling the reader.
        if "F2" not in self.wanted or self.quick:
            return
        progress("F2")
        build = "cargo build --release --locked -p arrow-device-benches --features parquet --bin parquet"
        subprocess.run(build.split(), check=True)
        self.add(rows.datafusion(run("parquet"), rows.PARQUET))

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
            self.add(rows.datafusion((line for line in printed if line.startswith("DF")), kinds))

    def gpu(self):
        """Rows of the probe, which says for itself whether its figures are a measurement."""
        if self.quick or not self.wanted & {id for id, _ in gpu.ROWS} or not gpu.has_driver():
            return
        progress("GPU")
        printed = gpu.probe()
        self.probe = [line for line in printed if not line.startswith("row\t")]
        self.add(row for row in rows.of_gpu(printed) if not (row.missing and row.id in self.rows))

    def measure(self):
        self.counts()
        self.instructions()
        self.times()
        self.parquet()
        self.opencl()
        self.webgpu()
        self.datafusion()
        self.gpu()
        self.models()
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

    def profiles(self):
        """The rows beyond their target whose time is instructions, each with where they go."""
        seen = {}
        for row in self.rows.values():
            figures = [figure for figure in row.figures if figure.profile and figure.load > 1]
            if figures:
                worst = max(figures, key=lambda figure: figure.load)
                seen.setdefault(worst.profile, []).append(row.id)
        for profile, ids in seen.items():
            progress(f"profile of {', '.join(ids)}")
            case, kind, columns, number = profile
            yield f"**{', '.join(ids)}**: `{case}`, {columns} {kind} columns x {number} rows"
            yield ""
            yield "| instructions | function |"
            yield "| --- | --- |"
            yield from (f"| {share:.1%} | `{function}` |" for function, share in callgrind.profile(*profile))
            yield ""

    def memcpy(self):
        """GB/s of a memcpy by bytes."""
        rates = {}
        for rounds in (rounds for id in ("P1", "D4") for rounds in self.rounds.get(id, ())):
            rates[rounds.batch.bytes] = rounds.batch.bytes / rounds.median("memcpy")
        return rates


def bandwidth():
    """GB/s of copies by their bytes."""
    sides = ["copy", "nanoarrow.copy", "pyarrow.copy", "malloc_copy", "memcpy"]
    lines = {side: [] for side in sides}
    for number in (1, 10, 100, 1_000, 10_000, 100_000):
        progress(f"copies of 100 columns x {number} rows")
        with Batch("mixed", 100, number) as batch:
            rounds = Rounds(batch, sides, 15)
            for side in sides:
                lines[side].append((batch.bytes, batch.bytes / rounds.median(side)))
    return panel("Deep copies, warm: 100 mixed columns", "bytes", "GB/s", lines, "memcpy")


def per_column(title, all_rounds, sides):
    limit = "write_structs"
    lines = {side: [(r.batch.columns, r.median(side) / r.batch.columns) for r in all_rounds] for side in [*sides, limit]}
    return panel(title, "columns", "ns a column", lines, limit)


def panel(title, x_label, y_label, lines, limit):
    """Lines by their sides, of which `limit` is what nobody can beat."""
    at_limit = NAMES[limit], lines.pop(limit)
    return draw.panel(title, x_label, y_label, {NAMES[side]: points for side, points in lines.items()}, at_limit)


def write(report, out):
    name = f"{datetime.date.today():%Y-%m-%d}-{machine.kind()}"
    facts = machine.facts(report.memcpy())
    exports = ["export", "export_host", "export_arrow", "cpp.export"]
    imports = ["import", "import_host", "import_arrow", "cpp.import"]
    panels = [bandwidth()]
    for id, title, sides in (("E2", "Export and release", exports), ("I2", "Import", imports)):
        if id in report.rounds:
            panels.append(per_column(f"{title}: mixed columns x 1000 rows", report.rounds[id], sides))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.svg").write_text(draw.picture(panels))
    lines = [f"# {machine.cpu()}, {machine.cores()} cores, {datetime.date.today():%Y-%m-%d}", ""]
    lines += ["Written by `benches/report`. Times are medians of the ratios of rounds in which all sides take turns in one process;",
              "the spread is their quartiles. A row's value is that of its worst shape. The limit is what nobody can beat, and how near the row comes to",
              "it, where a measurement can say that; [performance](../../docs/performance.md) says what each row means.", ""]
    lines += [*report.table(), "", report.summary(), "", f"![Bandwidth against size, cost against columns]({name}.svg)", ""]
    lines += [*MODEL, *report.model, ""]
    if any(row.id in dict(gpu.ROWS) and not row.missing for row in report.rows.values()):
        lines += ["## The probe of the GPU", "", "```text", *report.probe, "```", ""]
    lines += ["## Machine", "", "| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts), ""]
    lines += ["## All shapes", "", *report.details()]
    lines += ["## Where the time goes in the rows that miss", ""]
    if callgrind.available():
        lines += ["Rows are not among them that wait for copies or other threads, or that a program of their own measures.", "", *report.profiles()]
    else:
        lines += ["Not measured: valgrind is missing.", ""]
    (out / f"{name}.md").write_text("\n".join(lines))
    print(f"written: {out / name}.md and .svg")


def main():
    parser = argparse.ArgumentParser(prog="benches/report")
    parser.add_argument("--quick", action="store_true", help="gate: fewer rounds, a margin for times, nothing is written")
    parser.add_argument("--out", type=pathlib.Path, help="where to write, instead of benches/results; also of some rows only")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="these rows only, and nothing is written without --out")
    options = parser.parse_args()
    everything = {*ORDER, *(id for id, _ in gpu.ROWS), *(id for id, _ in rows.MODEL)}
    if unknown := set(options.rows) - everything:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    report = Report(options.quick, set(options.rows) or everything)
    report.measure()
    print("\n".join([*report.details(), *report.table(), ""]))
    if report.model:
        print("\n".join([*MODEL, *report.model, ""]))
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
