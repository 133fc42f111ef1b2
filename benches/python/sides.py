"""The sides of a measurement, all in this process: this crate and arrow-rs (benches/rust), Arrow C++ and nanoarrow
(peers/cpp/bench.cc), pyarrow."""

import ctypes as c
import os
import time

import nanoarrow._device
import pyarrow as pa

rust = c.CDLL(os.environ["BENCHES_RUST"])
peers = c.CDLL(os.environ["BENCHES_PEERS"])
_handle, _text, _n = c.c_void_p, c.c_char_p, c.c_size_t
# The structs of the specification: 128 and 72 bytes.
_Array, _Schema = c.c_uint64 * 16, c.c_uint64 * 9
for _library, _name, _result, _arguments in [
    (rust, "bench_input", _handle, [_text, _n, _n]),
    (rust, "bench_input_free", None, [_handle]),
    (rust, "bench_bytes", _n, [_handle]),
    (rust, "bench_run", c.c_int64, [_handle, _text, _n]),
    (rust, "bench_give", c.c_int, [_handle, _handle, _handle]),
    (rust, "bench_check", c.c_int, [_handle, _handle]),
    (rust, "bench_check_own", c.c_int, [_handle, _text]),
    (rust, "bench_overlap", c.c_int, [_n, _n, _handle]),
    (peers, "bench_peer_error", _text, []),
    (peers, "bench_peer_new", c.c_int64, [_text, _handle, _handle, _handle]),
    (peers, "bench_peer_drop", None, [_handle]),
    (peers, "bench_peer_run", c.c_int64, [_handle, _text, c.c_int64]),
    (peers, "bench_peer_give", c.c_int64, [_handle, _text, _handle]),
]:
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments

# What the report calls them.
NAMES = {
    "export": "arrow-device",
    "export_host": "arrow-device from arrow-rs",
    "export_arrow": "arrow-rs",
    "export_ready": "arrow-rs from ready ArrayData",
    "import": "arrow-device view",
    "import_arrow": "arrow-rs",
    "stream": "arrow-device",
    "stream_host": "arrow-device from and to arrow-rs",
    "stream_arrow": "arrow-rs",
    "async": "arrow-device on one thread",
    "async_threads": "arrow-device on two threads",
    "async_single": "arrow-device on two threads, one by one",
    "channel": "std's channel between two threads",
    "channel_single": "std's channel between two threads, one by one",
    "copy": "arrow-device",
    "download": "arrow-device download",
    "download_cold": "arrow-device download, cold",
    "up": "arrow-device upload until there",
    "up_cold": "arrow-device upload until there, cold",
    "up_held": "arrow-device upload, its own part",
    "memcpy": "one memcpy",
    "write_structs": "a memcpy of the C structs' bytes",
    "cpp.export": "Arrow C++",
    "cpp.import": "Arrow C++",
    "cpp.stream": "Arrow C++",
    "cpp.async": "Arrow C++",
    "cpp.async_single": "Arrow C++, one by one",
    "nanoarrow.view": "nanoarrow's view",
    "nanoarrow.view_again": "nanoarrow's view set again",
    "nanoarrow.copy": "nanoarrow",
    "pyarrow.copy": "pyarrow",
}


def _check_peer(code):
    if code < 0:
        raise RuntimeError(peers.bench_peer_error().decode())
    return code


class Batch:
    """A batch that all sides have, over the same memory."""

    def __init__(self, kind, columns, rows):
        self.columns, self.rows = columns, rows
        self.name = f"{columns} x {rows}" if kind in ("mixed", "integers", "text") else f"{kind} x {rows}"
        self._input = rust.bench_input(kind.encode(), columns, rows)
        if not self._input:
            raise RuntimeError("no batch")
        self.bytes = rust.bench_bytes(self._input)
        self._peer, self._pyarrow = None, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._peer:
            peers.bench_peer_drop(self._peer)
        self._pyarrow = None
        rust.bench_input_free(self._input)

    def _give(self):
        array, schema = _Array(), _Schema()
        if rust.bench_give(self._input, array, schema):
            raise RuntimeError("no structs")
        return array, schema

    def _of_peers(self):
        if not self._peer:
            self._peer = c.c_void_p()
            path = nanoarrow._device.__file__.encode()
            _check_peer(peers.bench_peer_new(path, *self._give(), c.byref(self._peer)))
        return self._peer

    def _of_pyarrow(self):
        if not self._pyarrow:
            array, schema = self._give()
            addresses = c.addressof(array), c.addressof(schema)
            self._pyarrow = pa.RecordBatch._import_from_c_device(*addresses)
        return self._pyarrow

    def run(self, side, n):
        """Nanoseconds of `n` times."""
        if side.startswith("pyarrow."):
            return _pyarrow_copies(self._of_pyarrow(), n)
        if "." in side:
            return _check_peer(peers.bench_peer_run(self._of_peers(), side.encode(), n))
        took = rust.bench_run(self._input, side.encode(), n)
        if took < 0:
            raise RuntimeError(f"{side} failed")
        return took

    def check(self, side):
        """Whether what a peer gives, or a copy of ours, has the values that this batch has."""
        if side in ("copy", "download") and rust.bench_check_own(self._input, side.encode()):
            raise RuntimeError(f"{side} gives other values")
        if "." not in side:
            return
        array = _Array()
        if side.startswith("pyarrow."):
            copy = self._of_pyarrow().copy_to(pa.default_cpu_memory_manager())
            copy._export_to_c_device(c.addressof(array))
        else:
            _check_peer(peers.bench_peer_give(self._of_peers(), side.encode(), array))
        if rust.bench_check(self._input, array):
            raise RuntimeError(f"{side} gives other values")


def _pyarrow_copies(batch, n):
    memory, start = pa.default_cpu_memory_manager(), time.perf_counter_ns()
    for _ in range(n):
        batch.copy_to(memory)
    return time.perf_counter_ns() - start


def overlap(way, batches):
    """Seconds of a long stream: in all, of the producer, of the copies, of one batch's copy. Ways: see benches/rust/overlap.rs."""
    seconds = (c.c_double * 4)()
    if rust.bench_overlap(way, batches, seconds):
        raise RuntimeError("the stream failed")
    return list(seconds)
