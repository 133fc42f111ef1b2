"""Measures the installed Python package against its limits: package.py WHEEL. Needs pyarrow and nanoarrow."""

import os
import statistics
import subprocess
import sys
import time

import arrow_device as ad
import nanoarrow
import pyarrow as pa

MOST_MIB, MOST_MS, MOST_RATIO = 10, 50, 1.2


def seconds(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def handed_over(columns):
    """The time that a consumer needs to take a batch of ours, and the same batch of pyarrow's."""
    theirs = pa.record_batch({f"c{i}": pa.array([i, None, 3]) for i in range(columns)})
    ours = ad.RecordBatch(theirs)
    consumers = {
        "pyarrow": lambda batch: pa.RecordBatch._import_from_c_capsule(*batch.__arrow_c_array__()),
        "pyarrow, of a device": lambda batch: pa.RecordBatch._import_from_c_device_capsule(*batch.__arrow_c_device_array__()),
        "nanoarrow": nanoarrow.c_array,
    }
    for name, take in consumers.items():
        # In turns, and the best of each: noise only adds.
        pairs = [[seconds(lambda: take(batch), 2000 // columns + 1) for batch in (ours, theirs)] for _ in range(60)]
        ours_us, theirs_us = (min(side) * 1e6 for side in zip(*pairs))
        yield f"a batch of {columns} columns to {name}: {ours_us:.1f} us, pyarrow's own {theirs_us:.1f} us", ours_us / theirs_us, MOST_RATIO


def imported():
    program = "import time; start = time.perf_counter(); import arrow_device; print(time.perf_counter() - start)"
    runs = [float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout) for _ in range(15)]
    return statistics.median(runs) * 1e3


def main(wheel):
    rows = [("the wheel, MiB", os.path.getsize(wheel) / 2**20, MOST_MIB), ("import, ms", imported(), MOST_MS)]
    rows += [row for columns in (1, 10, 1000) for row in handed_over(columns)]
    for name, value, limit in rows:
        print(f"{value:8.2f}  of at most {limit:4}  {name}")
    return int(any(value > limit for _, value, limit in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
