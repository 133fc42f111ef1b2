"""Instructions, by valgrind's callgrind: the same numbers every time."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from rows import Figure, Row
from sides import NAMES

COUNTS = os.path.join(os.environ["BENCHES_PROGRAMS"], "counts")


def available():
    return shutil.which("valgrind") is not None


def _counted(options, arguments):
    """What `counts` prints, and the instructions of each part that callgrind has written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        command = ["valgrind", "--quiet", "--tool=callgrind", *options, "--dump-after=counted", f"--callgrind-out-file={out}", COUNTS]
        printed = subprocess.run([*command, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        texts = (path.read_text() for path in sorted(pathlib.Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])))
        return printed, [int(re.search(r"^totals: (\d+)$", text, re.M)[1]) for text in texts]


def exports():
    """E3."""
    cases, times = ["export", "export_host"], 10
    row = Row("E3", "export + release, 1e3 -> 1e6 rows, instructions", "<= 1.02")
    options = ["--collect-atstart=no", "--toggle-collect=counted"]
    # Two parts for each case, of which the first warms up.
    few, many = (_counted(options, ["cases", ",".join(cases), "mixed", 8, rows, times])[1][1::2] for rows in (1_000, 1_000_000))
    for case, at_few, at_many in zip(cases, few, many):
        row.figures.append(Figure(f"8 columns, {NAMES[case]}", at_many / at_few, 1.02))
        row.notes.append(f"{NAMES[case]}, instructions a column: {at_few / times / 8:.0f}")
    return row


def _parts(n):
    """Instructions of each case of `linear` with n parts, on all of its threads, without what prepares it."""
    names, counted = _counted(["--dump-before=counted"], ["linear", n])
    # Two parts for each case: what comes before it, and what it does.
    return dict(zip(names, counted[1::2]))


def linear(quick):
    """L1: what another part costs among many, over what it costs among a hundred."""
    few, many = 100, 2_000 if quick else 10_000
    row = Row("L1", f"another of many pending operations, columns, batches, children, events or queues: its instructions at {few} to {many:,} over those up to {few}",
              "<= 1.5")
    start, at_few, at_many = _parts(1), _parts(few), _parts(many)
    for case in start:
        first, then = (at_few[case] - start[case]) / (few - 1), (at_many[case] - at_few[case]) / (many - few)
        row.figures.append(Figure(case, then / first, 1.5))
        row.notes.append(f"{case}, instructions a part: {first:.0f} up to {few}, {then:.0f} from there to {many:,}")
    return row
