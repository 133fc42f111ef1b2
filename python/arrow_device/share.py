"""Batches handed to other processes on this machine without a copy. Linux.

    from arrow_device.share import Publisher

    with Publisher("/run/user/1000/prices") as publisher:  # in one process
        publisher.wait_for_subscribers()
        publisher.send(pyarrow.record_batch({"day": [1, 2]}))

    from arrow_device.share import Subscriber

    for batch in Subscriber("/run/user/1000/prices"):  # in another one, of Python or of Rust
        print(pyarrow.record_batch(batch))

The end of a `with` ends the stream; after an exception, with an error. Then `Subscriber` raises `RuntimeError`, and `ConnectionResetError`
if the publisher has died.
"""

import sys

if sys.platform != "linux":
    raise ImportError("arrow_device.share is for Linux: other systems have no memory files with seals")

from ._native import Publisher, Subscriber, shared_cpu

__all__ = ["Publisher", "Subscriber", "shared_cpu"]
