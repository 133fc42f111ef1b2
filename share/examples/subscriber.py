"""The child of the example `two_processes` in Python, with the package of the folder `python`: reads the batches where they are."""

import time

import arrow_device
import pyarrow
import pyarrow.compute
from arrow_device.share import Subscriber


def copied():
    counters = arrow_device.Device("cpu").counters()
    return counters["host_copied_bytes"] + counters["bytes_to_device"]


before = copied()
rows, revenue = 0, 0
# The publisher is the program that has started this one.
for batch in Subscriber.over(0, trusting=True):
    batch = pyarrow.record_batch(batch)
    print(time.monotonic_ns(), flush=True)
    rows += batch.num_rows
    products = pyarrow.compute.multiply(batch["l_extendedprice"], batch["l_discount"])
    # In hundredths of cents.
    revenue += int(pyarrow.compute.sum(products).as_py().scaleb(4))
print(rows, copied() - before, revenue, sep="\n")
