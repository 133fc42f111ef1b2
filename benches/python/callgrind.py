"""Instructions, by valgrind's callgrind: the same numbers every time."""

import math
import pathlib
import re
import shutil
import subprocess
import tempfile

from rows import EXPORT, MIXED, Figure, Row
from sides import NAMES

PROGRAM = "target/release/instructions"
LINEAR = "target/release/linear"
CASES = ["export", "export_host", "export_arrow", "export_ready"]
N = 10
# What is held to other ratios than the target, by case and columns: where it is missed, and, with 5 % to spare, where it is met by far, since
# there the target notices nothing.
HELD = {
    ("export", 1): 0.285, ("export", 10): 0.127, ("export", 100): 0.080, ("export", 1000): 0.0755,
    ("export_host", 1): 0.73, ("export_host", 10): 0.30, ("export_host", 100): 0.17, ("export_host", 1000): 0.16,
}


def available():
    return shutil.which("valgrind") is not None


def _callgrind(out, options, arguments):
    command = ["valgrind", "--quiet", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=counted"]
    command += [f"--callgrind-out-file={out}", *options, PROGRAM, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def instructions(cases, kind, columns, rows):
    """Instructions of one call of each case."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        # A file for each measured part: two for each case, of which the first warms up.
        _callgrind(out, ["--dump-after=counted"], [",".join(cases), kind, columns, rows, N])
        counted = []
        for i in range(len(cases)):
            text = pathlib.Path(f"{out}.{2 * i + 2}").read_text()
            counted.append(int(re.search(r"^totals: (\d+)$", text, re.M)[1]) / N)
    return dict(zip(cases, counted))


def rows():
    """E1 and E3."""
    e1 = Row("E1", f"{EXPORT}, instructions", "<= 0.15x arrow-rs")
    for shape in MIXED:
        counted = instructions(CASES, *shape)
        arrow = counted["export_arrow"]
        name = f"{shape[1]} x {shape[2]}"
        # From an arrow-rs batch it is an upload too, and has no target.
        for ours, limit in (("export", 0.15), ("export_host", math.inf)):
            what = f"{name}, {NAMES[ours]} / {NAMES['export_arrow']}"
            held = HELD.get((ours, shape[1]))
            e1.figures.append(Figure(what, counted[ours] / arrow, limit, profile=(ours, *shape), held=held))
        values = (f"{NAMES[case]} {value / shape[1]:.0f}" for case, value in counted.items())
        e1.notes.append(f"{name}, instructions a column: " + ", ".join(values))
    e3 = Row("E3", "export + release, 1e3 -> 1e6 rows, instructions", "<= 1.02")
    few, many = (instructions(CASES[:2], "mixed", 8, rows) for rows in (1_000, 1_000_000))
    for ours in CASES[:2]:
        e3.figures.append(Figure(f"8 columns, {NAMES[ours]}", many[ours] / few[ours], 1.02))
    return [e1, e3]


def _parts(n):
    """Instructions of each case of `linear` with n parts, on all of its threads, without what prepares it."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        command = ["valgrind", "--quiet", "--tool=callgrind", "--dump-before=counted", "--dump-after=counted"]
        command += [f"--callgrind-out-file={out}", LINEAR, str(n)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        # Of each case two files: what comes before it, and what it does.
        texts = [pathlib.Path(f"{out}.{2 * i + 2}").read_text() for i in range(len(printed))]
        return {line.split("\t")[0]: int(re.search(r"^totals: (\d+)$", text, re.M)[1]) for line, text in zip(printed, texts)}


def _nanoseconds(n):
    """Of a part of each case of `linear` with n parts: the best of a few runs where they are short."""
    printed = subprocess.run([LINEAR, str(n), "5" if n <= 1_000 else "2"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {case: int(time) for case, time in (line.split("\t") for line in printed.splitlines())}


def linear(quick):
    """L1: what another part costs among many, over what it costs among a hundred."""
    few, many = 100, 2_000 if quick else 10_000
    row = Row("L1", f"another of many pending operations, columns, batches, children, arrays, devices or events: its instructions at {few} to {many:,} over those up to {few}",
              "<= 1.5")
    start, at_few, at_many = _parts(1), _parts(few), _parts(many)
    for case in start:
        first, then = (at_few[case] - start[case]) / (few - 1), (at_many[case] - at_few[case]) / (many - few)
        row.figures.append(Figure(case, then / first, 1.5))
        row.notes.append(f"{case}, instructions a part: {first:.0f} up to {few}, {then:.0f} from there to {many:,}")
    if not quick:
        numbers = [10, 100, 1_000, 10_000, 100_000]
        times = [_nanoseconds(n) for n in numbers]
        row.notes += [f"{case}, ns a part: " + ", ".join(f"{time[case]} of {n:,}" for n, time in zip(numbers, times)) for case in start]
    return row


def profile(case, kind, columns, rows, top=8):
    """The functions with the most instructions, each with its share."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        _callgrind(out, [], [case, kind, columns, rows, max(20, min(2000 // columns, 5_000_000 // (columns * rows)))])
        annotate = ["callgrind_annotate", "--auto=no", "--threshold=100", str(out)]
        text = subprocess.run(annotate, check=True, capture_output=True, text=True).stdout
    shares = {}
    # Instructions, share, file:function [object]; an inlined function has a line for each file.
    for count, place in re.findall(r"^ *([\d,]+) \([ \d.]+%\)  (.+)$", text, re.M):
        function = re.sub(r" \[[^\[\]]*\]$", "", re.sub(r"^(?:.*?\.\w+|\?\?\?):", "", place))
        function = function.split("'")[0]
        shares[function] = shares.get(function, 0) + int(count.replace(",", ""))
    total = shares.pop("PROGRAM TOTALS")
    most = sorted(shares.items(), key=lambda item: -item[1])[:top]
    return [(function, count / total) for function, count in most]
