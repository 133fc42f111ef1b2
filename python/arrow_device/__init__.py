"""Arrow data on GPUs and other devices.

Data comes from any library with the Arrow PyCapsule interface (pyarrow, polars, pandas, DuckDB, ...) or with DLPack (NumPy, PyTorch,
CuPy, JAX, ...), and goes to any of them, without a copy where it already is on the device:

    import arrow_device as ad
    import polars as pl

    device = ad.Device("sim")  # simulated, for trying; or "cuda:0"
    frame = pl.DataFrame({"id": [1, 2, 3], "name": ["a", None, "c"]})
    there = device.upload(frame)  # a RecordBatch in the device's memory
    print(there)
    back = pl.DataFrame(there.to_host())
"""

import sys

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "arrow_device has not been tried without the GIL: set PYTHON_GIL=1 for this free-threaded Python, or use one with the GIL"
    )

from ._native import (
    Array,
    Device,
    RecordBatch,
    Schema,
    Stream,
    __version__,
    read_ipc,
    read_parquet,
)

__all__ = ["Array", "Device", "RecordBatch", "Schema", "Stream", "__version__", "read_ipc", "read_parquet"]
