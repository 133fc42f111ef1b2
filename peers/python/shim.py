"""Arrow C++, through the shim of `peers/cpp`; and what the Rust side has for tests against it (`peers/rust/cpp`,
`peers/rust/sim.rs`). One libarrow is in the process: that of pyarrow."""

import contextlib
import ctypes as c
import os
import time
import unittest
import weakref

import pyarrow  # Its libarrow is loaded first, and the shim finds it. # noqa: F401

import abi
from abi import ArrowArray, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

rust = c.CDLL(os.environ["ARROW_DEVICE_PEERS"])
# The shim calls the simulated device's functions: they must be found by name.
c.CDLL(os.environ["ARROW_DEVICE_PEERS"], os.RTLD_GLOBAL | os.RTLD_NOLOAD)
lib = c.CDLL(os.environ["ARROW_DEVICE_SHIM"])

OK, OUT_OF_MEMORY, KEY_ERROR, INVALID, IO_ERROR, CANCELLED, UNKNOWN, NOT_IMPLEMENTED = 0, 1, 2, 4, 5, 8, 9, 10
EIO, ENOMEM, EINVAL, ENOSYS, ENOTSUP = 5, 12, 22, 38, 95
DIFFERS = -1
NO_EVENT, OWN_EVENT, NEW_EVENT = range(3)


class ShimError(Exception):
    """The code of an arrow::Status and its text."""

    def __init__(self, code, text):
        super().__init__(f"[{code}] {text}")
        self.code, self.text = code, text


class RustError(Exception):
    """An errno, or DIFFERS, and its text."""

    def __init__(self, errno, text):
        super().__init__(f"[{errno}] {text}")
        self.errno, self.text = errno, text


def check(code):
    if code:
        raise ShimError(code, lib.shim_last_error().decode(errors="replace"))


def check_rust(code):
    if code:
        raise RustError(code, rust.peers_cpp_last_error().decode(errors="replace"))


class Counts(c.Structure):
    """What Arrow C++ did on its device."""

    _fields_ = [
        (name, c.c_int64)
        for name in "copies_to_host bytes_to_host copies_to_device host_waits queue_waits buffers events".split()
    ]


class Stats(c.Structure):
    """What this crate did on a simulated device, and what is live there."""

    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "copies bytes_to_device bytes_to_host bytes_on_device events queue_waits host_waits "
            "live_allocations live_events pending_operations violations"
        ).split()
    ]


P = c.POINTER
_array, _schema, _stream = P(ArrowDeviceArray), P(ArrowSchema), P(ArrowDeviceArrayStream)
_handle, _out = c.c_void_p, P(c.c_void_p)
_pairs = {
    "array_import": [_array, _schema, _out],
    "array_import_host": [P(ArrowArray), _schema, _out],
    "array_export": [_handle, c.c_int, _handle, _array, _schema],
    "array_validate": [_handle],
    "array_same": [_handle, _handle],
    "array_slice": [_handle, c.c_int64, c.c_int64, _out],
    "array_copy": [_handle, _handle, _out],
    "array_wait": [_handle],
    "batch_import": [_array, _schema, _out],
    "batch_import_host": [P(ArrowArray), _schema, _out],
    "batch_export": [_handle, c.c_int, _handle, _array, _schema],
    "batch_validate": [_handle],
    "batch_same": [_handle, _handle],
    "batch_copy": [_handle, _handle, _out],
    "batch_wait": [_handle],
    "batch_mix": [_handle, _handle, _out],
    "batch_select": [_handle, P(c.c_int), c.c_int, _out],
    "batch_device_type": [_handle],
    "move_columns": [_array, _schema, P(c.c_int), c.c_int, _out],
    "reader_import": [_stream, _out],
    "reader_export": [_handle, _stream],
    "reader_next": [_handle, _out],
    "reader_close": [_handle],
    "reader_device_type": [_handle],
    "reader_new": [_handle, _out, c.c_int64, c.c_int, c.c_int64, c.c_int, c.c_char_p, _out],
    "reader_odd": [_out],
    "device_new": [c.c_void_p, _out],
    "device_settle": [_handle],
}
for _name, _types in _pairs.items():
    getattr(lib, f"shim_{_name}").argtypes = _types
for _name in ("array_drop", "batch_drop", "reader_drop", "device_drop"):
    _function = getattr(lib, f"shim_{_name}")
    _function.argtypes, _function.restype = [_handle], None
lib.shim_last_error.restype = lib.shim_abi.restype = c.c_char_p
lib.shim_pool_bytes.restype = lib.shim_readers.restype = lib.shim_batch_rows.restype = c.c_int64
lib.shim_batch_rows.argtypes = [_handle]
lib.shim_device_waits.argtypes, lib.shim_device_waits.restype = [_handle, c.c_bool], None
lib.shim_device_counts.argtypes, lib.shim_device_counts.restype = [_handle, P(Counts)], None
lib.shim_throwing_array.argtypes, lib.shim_throwing_array.restype = [_array, _schema], None
lib.shim_throwing_stream.argtypes, lib.shim_throwing_stream.restype = [_stream, c.c_int], None

_n, _sim = c.c_size_t, c.c_void_p
_pairs = {
    "cpp_case_export": [_n, _n, _sim, c.c_bool, _array, _schema],
    "cpp_case_export_host": [_n, _n, P(ArrowArray), _schema],
    "cpp_case_check": [_n, _n, _n, _n, _sim, c.c_bool, _array, _schema],
    "cpp_batch_export": [_n, c.c_uint64, _sim, c.c_bool, c.c_bool, _array, _schema],
    "cpp_batch_export_host": [_n, c.c_uint64, P(ArrowArray), _schema],
    "cpp_batch_check": [_n, c.c_uint64, _sim, c.c_bool, _array, _schema],
    "cpp_stream": [_n, c.c_uint64, c.c_int64, c.c_int, _sim, c.c_bool, _stream],
    "cpp_stream_check": [_n, c.c_uint64, c.c_int64, c.c_bool, _sim, _stream],
    "sim_check": [_sim],
}
for _name, _types in _pairs.items():
    getattr(rust, f"peers_{_name}").argtypes = _types
for _name in ("types", "cases", "case_rows", "batches", "case_holders"):
    getattr(rust, f"peers_cpp_{_name}").restype = _n
for _name in ("type_name", "case_name", "batch_name", "last_error", "abi"):
    getattr(rust, f"peers_cpp_{_name}").restype = c.c_char_p
rust.peers_cpp_readers.restype = c.c_ssize_t
for _name in ("type_name", "cases", "batch_name"):
    getattr(rust, f"peers_cpp_{_name}").argtypes = [_n]
for _name in ("case_name", "case_rows"):
    getattr(rust, f"peers_cpp_{_name}").argtypes = [_n, _n]
rust.peers_sim_new.argtypes, rust.peers_sim_new.restype = [c.c_bool], _sim
rust.peers_sim_drop.argtypes, rust.peers_sim_drop.restype = [_sim], None
rust.peers_sim_id.argtypes, rust.peers_sim_id.restype = [_sim], c.c_int64
rust.peers_sim_stats.argtypes, rust.peers_sim_stats.restype = [_sim, P(Stats)], None


def release(struct):
    """Releases a struct that may be released already."""
    array = struct.array if isinstance(struct, ArrowDeviceArray) else struct
    if array.release:
        array.release(array)


def handle_of(of):
    return of.handle if of is not None else None


class _Handle:
    """Something of the shim's; dropped once, at the latest with this object."""

    kind = ""
    live = weakref.WeakSet()

    def __init__(self, handle):
        self.handle = handle
        self.live.add(self)

    @classmethod
    def drop_all_but(cls, kept):
        """Variables and tracebacks may hold handles for longer than tests mean it."""
        for handle in set(cls.live) - kept:
            handle.drop()

    @classmethod
    def call(cls, function, *args):
        out = c.c_void_p()
        check(getattr(lib, f"shim_{function}")(*args, c.byref(out)))
        return cls(out)

    def drop(self):
        handle = self.give()
        if handle:
            getattr(lib, f"shim_{self.kind}_drop")(handle)

    def give(self):
        """The handle, for somebody else to drop."""
        handle, self.handle = self.handle, None
        return handle

    def __del__(self):
        self.drop()

    def do(self, function, *args):
        check(getattr(lib, f"shim_{self.kind}_{function}")(self.handle, *args))


class _Data(_Handle):
    """An array or a batch of Arrow C++'s."""

    @classmethod
    def take(cls, pair):
        return cls.call(f"{cls.kind}_import", *pair)

    @classmethod
    def take_host(cls, pair):
        return cls.call(f"{cls.kind}_import_host", *pair)

    def export(self, carry=NO_EVENT, device=None, into=None):
        array, schema = into or (ArrowDeviceArray(), ArrowSchema())
        self.do("export", carry, handle_of(device), array, schema)
        return array, schema

    def copy(self, device=None):
        return self.call(f"{self.kind}_copy", self.handle, handle_of(device))

    def validate(self):
        self.do("validate")

    def wait(self):
        self.do("wait")

    def assert_same(self, expected):
        check(getattr(lib, f"shim_{self.kind}_same")(expected.handle, self.handle))


class Array(_Data):
    kind = "array"

    def slice(self, offset, length):
        return self.call("array_slice", self.handle, offset, length)


class Batch(_Data):
    kind = "batch"

    @classmethod
    def move_columns(cls, pair, columns):
        return cls.call("move_columns", *pair, (c.c_int * len(columns))(*columns), len(columns))

    def select(self, columns):
        return self.call("batch_select", self.handle, (c.c_int * len(columns))(*columns), len(columns))

    def mix(self, others):
        """The first column of this batch, and the others of another."""
        return self.call("batch_mix", self.handle, others.handle)

    @property
    def rows(self):
        return lib.shim_batch_rows(self.handle)

    @property
    def device_type(self):
        return lib.shim_batch_device_type(self.handle)


class Reader(_Handle):
    kind = "reader"

    @classmethod
    def take(cls, stream):
        return cls.call("reader_import", stream)

    @classmethod
    def of(cls, batches, like=None, device_type=abi.CPU, fail_at=-1, code=0, text=""):
        """Of these batches; with the schema of `like` if there is none."""
        handles = (c.c_void_p * len(batches))(*[b.handle for b in batches])
        like = like or batches[0]
        count = len(batches)
        return cls.call("reader_new", like.handle, handles, count, device_type, fail_at, code, text.encode())

    @classmethod
    def odd(cls):
        return cls.call("reader_odd")

    @property
    def device_type(self):
        return lib.shim_reader_device_type(self.handle)

    def export(self):
        stream = ArrowDeviceArrayStream()
        self.do("export", stream)
        return stream

    def next(self):
        out = c.c_void_p()
        self.do("next", c.byref(out))
        return Batch(out) if out else None

    def close(self):
        self.do("close")


class Sim:
    """A simulated device of the Rust side."""

    def __init__(self, lazy):
        self.handle = rust.peers_sim_new(lazy)
        assert self.handle, "no simulated device"

    @property
    def id(self):
        return rust.peers_sim_id(self.handle)

    @property
    def stats(self):
        stats = Stats()
        rust.peers_sim_stats(self.handle, stats)
        return stats

    def assert_clean(self):
        check_rust(rust.peers_sim_check(self.handle))

    def drop(self):
        handle, self.handle = self.handle, None
        if handle:
            rust.peers_sim_drop(handle)


class Device(_Handle):
    """Arrow C++'s device over a simulated one."""

    kind = "device"

    @classmethod
    def over(cls, sim):
        return cls.call("device_new", sim.handle)

    def waits(self, waits):
        """Whether copies to the host wait for the event of what they read."""
        lib.shim_device_waits(self.handle, waits)

    def settle(self):
        self.do("settle")

    @property
    def counts(self):
        counts = Counts()
        lib.shim_device_counts(self.handle, counts)
        return counts


class Cases:
    """The Rust side's arrays of every type."""

    def __init__(self):
        names = [rust.peers_cpp_type_name(t).decode() for t in range(rust.peers_cpp_types())]
        self.types = {name: t for t, name in enumerate(names)}

    def of(self, name):
        """All arrays of a type."""
        of_type = self.types[name]
        return [Case(of_type, i) for i in range(rust.peers_cpp_cases(of_type))]


class Case:
    """One array of the Rust side's."""

    def __init__(self, of_type, index):
        self.at = (of_type, index)
        self.name = f"{rust.peers_cpp_type_name(of_type).decode()}: {rust.peers_cpp_case_name(*self.at).decode()}"
        self.rows = rust.peers_cpp_case_rows(*self.at)

    def export(self, sim=None, wait=False, into=None):
        pair = into or (ArrowDeviceArray(), ArrowSchema())
        check_rust(rust.peers_cpp_case_export(*self.at, handle_of(sim), wait, *pair))
        return pair

    def export_host(self):
        pair = ArrowArray(), ArrowSchema()
        check_rust(rust.peers_cpp_case_export_host(*self.at, *pair))
        return pair

    def check(self, pair, offset=0, length=None, sim=None, full=True):
        """Consumes the structs."""
        length = self.rows - offset if length is None else length
        check_rust(rust.peers_cpp_case_check(*self.at, offset, length, handle_of(sim), full, *pair))


class Kind:
    """The Rust side's batches of one kind."""

    def __init__(self, index):
        self.index = index
        self.name = rust.peers_cpp_batch_name(index).decode()

    @classmethod
    def all(cls):
        return [cls(i) for i in range(rust.peers_cpp_batches())]

    @classmethod
    def named(cls, name):
        return next(kind for kind in cls.all() if kind.name == name)

    def export(self, seed=0, sim=None, wait=False, apart=False):
        """`apart`: each column has an event of its own, before they become one."""
        pair = ArrowDeviceArray(), ArrowSchema()
        check_rust(rust.peers_cpp_batch_export(self.index, seed, handle_of(sim), wait, apart, *pair))
        return pair

    def export_host(self, seed=0):
        pair = ArrowArray(), ArrowSchema()
        check_rust(rust.peers_cpp_batch_export_host(self.index, seed, *pair))
        return pair

    def check(self, pair, seed=0, sim=None, full=True):
        """Consumes the structs."""
        check_rust(rust.peers_cpp_batch_check(self.index, seed, handle_of(sim), full, *pair))

    def stream(self, count, fail_at=-1, errno=0, sim=None, wait=False):
        stream = ArrowDeviceArrayStream()
        check_rust(rust.peers_cpp_stream(self.index, count, fail_at, errno, handle_of(sim), wait, stream))
        return stream

    def check_stream(self, stream, count, stop=-1, later=False, sim=None):
        """Consumes the stream."""
        check_rust(rust.peers_cpp_stream_check(self.index, count, stop, later, handle_of(sim), stream))


def balance():
    """What lives on both sides: bytes of the C++ pool, holders of the Rust side's buffers, readers."""
    return {
        "pool bytes": lib.shim_pool_bytes(),
        "holders": rust.peers_cpp_case_holders(),
        "C++ readers": lib.shim_readers(),
        "Rust readers": rust.peers_cpp_readers(),
    }


class Balanced(unittest.TestCase):
    """Tests that leave nothing behind on either side."""

    def setUp(self):
        self.before = balance()

    def tearDown(self):
        _Handle.drop_all_but(set())
        # The Rust side may let go of foreign memory on a thread of its own.
        until = time.monotonic() + 5
        while (now := balance()) != self.before and time.monotonic() < until:
            time.sleep(0.01)
        self.assertEqual(self.before, now)

    def assert_fails(self, code, text, call, *args, **kwargs):
        """That a call fails with this code, and a text that has `text` in it."""
        with self.assertRaises((ShimError, RustError)) as failed:
            call(*args, **kwargs)
        error = failed.exception
        self.assertEqual(getattr(error, "code", getattr(error, "errno", None)), code, error.text)
        self.assertIn(text, error.text)

    @contextlib.contextmanager
    def simulated(self, lazy):
        """A simulated device, and Arrow C++'s device over it; in the end nothing is left there.

        Lazy: what nobody waits for does not happen, every time."""
        sim = Sim(lazy)
        device = Device.over(sim)
        kept = set(_Handle.live)
        yield sim, device
        _Handle.drop_all_but(kept)
        device.settle()
        sim.assert_clean()
        counts = device.counts
        self.assertEqual((counts.buffers, counts.events), (0, 0), "left in C++")
        device.drop()
        sim.drop()


def walk(schema, array=None):
    """The format of each node of a type, and its array's struct if there is one."""
    yield schema.format.decode(), array
    for i in range(schema.n_children):
        yield from walk(schema.children[i].contents, array and array.children[i].contents)
    if schema.dictionary:
        yield from walk(schema.dictionary.contents, array and array.dictionary.contents)


def has_strings(schema):
    """Whether a type has strings or bytes with offsets, at any depth."""
    return any(format in ("u", "U", "z", "Z") for format, _ in walk(schema))


def has_null_data(array, schema):
    """Whether a buffer other than a mask is null, at any depth: one of no bytes."""
    for format, node in walk(schema, array):
        masks = 0 if format in ("n", "+r") or format.startswith("+u") else 1
        if any(not node.buffers[i] for i in range(masks, node.n_buffers)):
            return True
    return False


def count_buffers(array, schema):
    """How many buffers are there, at any depth."""
    nodes = (node for _, node in walk(schema, array))
    return sum(bool(node.buffers[i]) for node in nodes for i in range(node.n_buffers))


def spoiled():
    """Structs full of 0xAB, for an export to write to."""
    pair = ArrowDeviceArray(), ArrowSchema()
    for struct in pair:
        c.memset(c.byref(struct), 0xAB, c.sizeof(struct))
    return pair
