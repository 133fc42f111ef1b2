"""The rows that need a GPU: what the probe (benches/cuda_probe) measured."""

import ctypes
import re
import subprocess

ROWS = [
    ("U1", "upload 8 x 64 MiB, page-locked source"), ("U2", "upload 8 x 64 MiB, pageable source"),
    ("U3", "the same, beside the driver's own copy"), ("U4", "upload 1000 columns x 10 rows"),
    ("U5", "upload 1000 columns x 1000 rows"), ("U6", "upload 1 column x 1 row"),
    ("U7", "upload 64 KiB to 64 MiB in 10 columns, the worst size"), ("U8", "the first upload of a process"),
    ("S1", "50 batches x 8 MiB up, producer at different speeds"), ("S2", "streams up and down together"),
    ("D1", "download of 512 MiB into page-locked memory"), ("D2", "download of 512 MiB into heap memory"),
    ("G1", "upload 1 KiB to 1 GiB in 1 to 1000 columns, the worst"), ("G2", "the same down"),
    ("G3", "upload from 16 MiB on, packed by 8 threads, the worst"),
]
# Those whose figure is a share of their limit (limits.py).
TO_LIMIT = {"U1", "U2", "U6", "S1", "S2", "D1", "G3"}


def has_driver():
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


def probe():
    """The lines of the probe, which says why if it has measured nothing. A measurement that fails leaves out its rows."""
    command = "cargo bench --locked -p arrow-device-gpu --bench cuda_probe"
    return subprocess.run(command.split(), stdout=subprocess.PIPE, text=True).stdout.splitlines()


def parsed(lines):
    """Of each row that the probe printed: id, what, measured, target, whether that is the least, and what stands in the place of a
    verdict, if anything does: then the figures are no measurement."""
    for line in lines:
        if not line.startswith("row\t"):
            continue
        _, id, what, measured, target, verdict = line.split("\t")
        sign, limit = re.fullmatch(r"([<>]=) ([\d.]+)", target).groups()
        instead = {"pass": "", "miss": "", "not measured": "the probe has no figure"}.get(verdict, verdict)
        yield id, what, measured, float(limit), sign == ">=", instead
