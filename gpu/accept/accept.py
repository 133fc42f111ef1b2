#!/usr/bin/env python3
"""Exchanges batches on a GPU with libraries that were not made here, both ways, and compares every value.

    accept.py ours torch cupy pylibcudf

ours        arrow-device alone: capsules out and in again, DLPack and the CUDA Array Interface, what it must refuse
torch       PyTorch's tensors by DLPack
cupy        CuPy's arrays by DLPack and the CUDA Array Interface
pylibcudf   tables by `__arrow_c_device_array__`

A library that is not there, or finds no device that it can use, is said to be absent, which is no failure. On the
stand-in for the CUDA driver only `ours` can run: the memory is the stand-in's own. Exit status: 1 if anything that
ran was wrong or if there is no CUDA device, else 0.
"""

import gc
import importlib
import importlib.metadata
import pathlib
import re
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
try:
    import arrow_device as ad
except ImportError as e:
    sys.exit(f"the packed module needs Python 3.11 or later and a glibc as new as that of its build: {e}")
from arrow_c import HostBatch, device_of, host_column, host_columns  # noqa: E402

CUDA = 2
DEVICE = "cuda:0"


class Absent(Exception):
    """The library is not here."""


def equal(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {str(found)[:300]} is not {str(expected)[:300]}")


def refuses(errors, what, call):
    try:
        call()
    except errors:
        return
    raise AssertionError(f"{what} is not refused")


def version(name):
    """Of an installed package, whose name may end with that of a CUDA version."""
    found = [d for d in importlib.metadata.distributions() if re.fullmatch(rf"{name}(-cu\d+)?", d.name or "")]
    return found[0].version if found else "of unknown version"


def library(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        # One that is here but lacks a module of its own is broken, not absent.
        if e.name != name:
            raise
        raise Absent(f"{name} is not here") from e


def columns(rows):
    """Whole numbers, fractions and text, each with nulls, and numbers without."""
    def some(values, step):
        return [None if i % step == step - 1 else value for i, value in enumerate(values)]

    return [
        ("id", "l", [i * 1_000_003 - 7 for i in range(rows)]),
        ("count", "i", some(range(rows), 3)),
        ("price", "g", some([i / 8 for i in range(rows)], 5)),
        ("name", "u", some([f"n\u00e4me {i}" * (i % 4) for i in range(rows)], 7)),
        ("rate", "g", [i / 4 for i in range(rows)]),
    ]


# With no row, fewer than a byte of a bitmap has, and more.
ROWS = (0, 5, 1000)


def batch(rows):
    """The values, and a batch of them on the device."""
    values = columns(rows)
    return [v for _, _, v in values], ad.RecordBatch(HostBatch(values)).to(DEVICE)


def ours():
    for rows in ROWS:
        values, there = batch(rows)
        kind, number, _, formats = device_of(there)
        equal((kind, number), (CUDA, 0), "device of the capsule")
        equal(formats, ["l", "i", "g", "u", "g"], "types")
        refuses(TypeError, "reading device memory as the host's", lambda: host_columns(there))
        equal(host_columns(there.to("cpu")), values, f"{rows} rows there and back")
        equal(host_columns(ad.RecordBatch(there).to("cpu")), values, f"{rows} rows, exported and imported")
        if rows > 3:
            part = [v[2:-1] for v in values]
            equal(host_columns(ad.RecordBatch(there.slice(2, rows - 3)).to("cpu")), part, f"a slice of {rows} rows")
    equal(there["id"].__dlpack_device__(), (CUDA, 0), "device of the tensor")
    interface = there["id"].__cuda_array_interface__
    equal((interface["typestr"], interface["shape"]), ("<i8", (rows,)), "CUDA Array Interface")
    refuses((BufferError, TypeError, ValueError), "a tensor of a column with nulls", lambda: there["count"].__dlpack__())
    again = ad.Array.from_dlpack(there["rate"])
    equal(host_column(again.to("cpu")), values[4], "a tensor of our own")


def tensors(name, to_library, way, values_of, from_library):
    """One way of exchanging columns without nulls, there and back."""
    for rows in ROWS[1:]:
        values, there = batch(rows)
        for column, expected in (("id", values[0]), ("rate", values[4])):
            what = f"{name}: {rows} rows of {column} by {way}"
            theirs = to_library(there[column])
            equal(values_of(theirs), expected, what)
            back = ad.Array.from_dlpack(from_library(theirs))
            equal(host_column(back.to("cpu")), [v + v for v in expected], f"{what}, doubled and back")
        print(f"  {rows} rows by {way}: same values there, and doubled here again", flush=True)


def torch():
    torch = library("torch")
    if not torch.cuda.is_available():
        raise Absent(f"torch {torch.__version__} finds no CUDA device")
    tensors("torch", torch.from_dlpack, "DLPack", lambda t: t.cpu().tolist(), lambda t: t + t)
    return torch.__version__


def cupy():
    cupy = library("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        raise Absent(f"cupy {cupy.__version__} finds no CUDA device: {e}") from e
    tensors("cupy", cupy.from_dlpack, "DLPack", lambda a: a.get().tolist(), lambda a: a + a)
    tensors("cupy", cupy.asarray, "CUDA Array Interface", lambda a: a.get().tolist(), lambda a: a + a)
    return cupy.__version__


def pylibcudf():
    plc = library("pylibcudf")
    for rows in ROWS:
        values, there = batch(rows)
        table = plc.Table.from_arrow(there)
        equal((table.num_columns(), table.num_rows()), (len(values), rows), "shape")
        # By cuDF's own way to the host, which has no code of ours in it, then by its device array.
        equal(host_columns(OnHost(table)), values, f"{rows} rows, as pylibcudf brings them to the host")
        equal(host_columns(ad.RecordBatch(OnDevice(table)).to("cpu")), values, f"{rows} rows, back as a device array")
        print(f"  {rows} rows: same values there, and here again", flush=True)
        if rows > 3:
            part = plc.Table.from_arrow(there.slice(2, rows - 3))
            equal(host_columns(OnHost(part)), [v[2:-1] for v in values], f"a slice of {rows} rows")
    return version("pylibcudf")


class OnDevice:
    """Of an object that offers host arrays too, only its device array."""

    def __init__(self, whole):
        self.whole = whole

    def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
        return self.whole.__arrow_c_device_array__(requested_schema, **kwargs)


class OnHost:
    """Of an object that offers device arrays too, only its host array."""

    def __init__(self, whole):
        self.whole = whole

    def __arrow_c_array__(self, requested_schema=None):
        return self.whole.__arrow_c_array__(requested_schema)


PARTS = {part.__name__: part for part in (ours, torch, cupy, pylibcudf)}


def released():
    """Waits until consumers have released all that they were given: they may do so on other threads."""
    gc.collect()
    ad.Device(DEVICE).synchronize()
    end = time.monotonic() + 5
    while HostBatch.released < HostBatch.given and time.monotonic() < end:
        time.sleep(0.01)
    equal(HostBatch.released, HostBatch.given, "released host structs")


def main():
    wanted = sys.argv[1:]
    if not wanted or not set(wanted) <= set(PARTS):
        sys.exit(__doc__)
    results = {}
    for name in wanted:
        print(f"{name}:", flush=True)
        try:
            named = PARTS[name]()
            released()
            results[name] = f"{named} accepted" if named else "accepted"
        except Absent as e:
            print(f"  {e}")
            results[name] = "absent"
        except Exception:
            traceback.print_exc(file=sys.stdout)
            results[name] = "FAILED"
    print(", ".join(f"{name} {result}" for name, result in results.items()), flush=True)
    sys.exit("FAILED" in results.values())


if __name__ == "__main__":
    main()
