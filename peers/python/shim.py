"""Arrow C++, through the shim of `peers/cpp`. One libarrow is in the process: that of pyarrow."""

import ctypes as c
import os
import weakref

import peer_case
import rust
from abi import CPU, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from rust import pair

lib = c.CDLL(os.environ["ARROW_DEVICE_SHIM"])

OUT_OF_MEMORY, KEY_ERROR, INVALID, IO_ERROR, CANCELLED, UNKNOWN, NOT_IMPLEMENTED = 1, 2, 4, 5, 8, 9, 10
NO_EVENT, OWN_EVENT, NEW_EVENT = range(3)
# Arrow C++ may wait for ever.
SECONDS = 30.0


class ShimError(Exception):
    """The code of an arrow::Status and its text."""

    def __init__(self, code, text):
        super().__init__(f"[{code}] {text}")
        self.errno, self.text = code, text


def check(code):
    if code:
        raise ShimError(code, lib.shim_last_error().decode(errors="replace"))


_int, _long, _bool, _text, _seconds = c.c_int, c.c_int64, c.c_bool, c.c_char_p, c.c_double
_array, _schema, _stream = c.POINTER(ArrowDeviceArray), c.POINTER(ArrowSchema), c.POINTER(ArrowDeviceArrayStream)
_handle, _out = c.c_void_p, c.POINTER(c.c_void_p)
for _name, _result, *_arguments in [
    ("last_error", _text),
    ("live", _long),
    *((f"{kind}_drop", None, _handle) for kind in ("array", "batch", "reader", "device", "async", "export")),
    *((f"{kind}_import", _int, _array, _schema, _out) for kind in ("array", "batch")),
    *((f"{kind}_export", _int, _handle, _int, _handle, _array, _schema) for kind in ("array", "batch")),
    *((f"{kind}_copy", _int, _handle, _handle, _out) for kind in ("array", "batch")),
    ("batch_mix", _int, _handle, _handle, _out),
    ("batch_device_type", _int, _handle),
    ("move_columns", _int, _array, _schema, c.POINTER(_int), _int, _out),
    ("reader_import", _int, _stream, _out),
    ("reader_export", _int, _handle, _stream),
    ("reader_next", _int, _handle, _out),
    ("reader_close", _int, _handle),
    ("reader_device_type", _int, _handle),
    ("reader_new", _int, _handle, _out, _long, _int, _long, _int, _text, _out),
    ("device_new", _int, _long, _out),
    ("device_settle", _int, _handle),
    ("device_waits", None, _handle, _bool),
    ("async_new", _int, c.c_uint64, _out),
    ("async_handler", _handle, _handle),
    ("async_next", _int, _handle, _seconds, _out),
    ("async_metadata", _long, _handle),
    ("async_metadata_of", _text, _handle, _text),
    ("async_detail", _int, _handle, c.POINTER(_text), _out, c.POINTER(_long)),
    ("async_produce", _int, _handle, _handle, _out, _long, _long, _int, _long, _int, _text, _bool, _out),
    ("async_relay", _int, _handle, _seconds, _handle, _out),
    ("async_produced", _int, _handle, _seconds),
    ("capi_there_and_back", _int, _text, _text, _text, c.POINTER(_long)),
]:
    _function = getattr(lib, f"shim_{_name}")
    _function.restype, _function.argtypes = _result, _arguments


def handle_of(of):
    return of.handle if of is not None else None


def _handles(of):
    return (c.c_void_p * len(of))(*[one.handle for one in of]), len(of)


class _Handle:
    """Something of the shim's; dropped once, at the latest with this object."""

    kind = ""
    live = weakref.WeakSet()

    def __init__(self, handle):
        self.handle = handle
        self.live.add(self)

    @classmethod
    def call(cls, function, *args):
        out = c.c_void_p()
        check(getattr(lib, f"shim_{function}")(*args, c.byref(out)))
        return cls(out)

    def drop(self):
        handle = self.give()
        if handle:
            getattr(lib, f"shim_{self.kind}_drop")(handle)

    __del__ = drop

    def give(self):
        """The handle, for somebody else to drop."""
        handle, self.handle = self.handle, None
        return handle

    def do(self, function, *args):
        check(getattr(lib, f"shim_{self.kind}_{function}")(self.handle, *args))


class _Data(_Handle):
    """An array or a batch of Arrow C++'s."""

    @classmethod
    def take(cls, given):
        return cls.call(f"{cls.kind}_import", *given)

    def export(self, carry=NO_EVENT, device=None, into=None):
        out = into or pair()
        self.do("export", carry, handle_of(device), *out)
        return out

    def copy(self, device=None):
        return self.call(f"{self.kind}_copy", self.handle, handle_of(device))


class Array(_Data):
    kind = "array"


class Batch(_Data):
    kind = "batch"

    @classmethod
    def move_columns(cls, given, columns):
        return cls.call("move_columns", *given, (c.c_int * len(columns))(*columns), len(columns))

    def mix(self, others):
        """The first column of this batch, and the others of another."""
        return self.call("batch_mix", self.handle, others.handle)

    @property
    def device_type(self):
        return lib.shim_batch_device_type(self.handle)


class Reader(_Handle):
    kind = "reader"

    @classmethod
    def take(cls, stream):
        return cls.call("reader_import", stream)

    @classmethod
    def of(cls, batches, like=None, device_type=CPU, fail_at=-1, code=0, text=""):
        """Of these batches; with the schema of `like` if there is none."""
        like = like or batches[0]
        return cls.call("reader_new", like.handle, *_handles(batches), device_type, fail_at, code, text.encode())

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


class Device(_Handle):
    """Arrow C++'s device over a simulated one."""

    kind = "device"

    def __init__(self, number):
        out = c.c_void_p()
        check(lib.shim_device_new(number, c.byref(out)))
        super().__init__(out)

    def waits(self, waits):
        """Whether copies to the host wait for the event of what they read."""
        lib.shim_device_waits(self.handle, waits)

    def settle(self):
        self.do("settle")


# On a lazy device what nobody waits for does not happen, every time.
DEVICES = {f"sim:{number}": Device(number) for number in (rust.LAZY, rust.EAGER)}
LAZY, EAGER = DEVICES
_kept = set(_Handle.live)


class Consumer(_Handle):
    """Arrow C++'s consumer of an async stream, whose handler is given to a producer."""

    kind = "async"

    @classmethod
    def new(cls, queue=5):
        return cls.call("async_new", queue)

    @property
    def handler(self):
        return lib.shim_async_handler(self.handle)

    def next(self):
        out = c.c_void_p()
        self.do("next", SECONDS, c.byref(out))
        return Batch(out) if out else None

    def metadata(self, *keys):
        """Of the last batch: how many entries, -1 if there is none, and the values of these keys."""
        values = [lib.shim_async_metadata_of(self.handle, key.encode()) for key in keys]
        return lib.shim_async_metadata(self.handle), *(value and value.decode() for value in values)

    def detail(self):
        """Of the last error: its code and text."""
        text, metadata, bytes = c.c_char_p(), c.c_void_p(), c.c_int64()
        code = lib.shim_async_detail(self.handle, text, metadata, bytes)
        return code, text.value and text.value.decode()


class Export(_Handle):
    """An async export of Arrow C++'s, on a thread of its own."""

    kind = "export"

    @classmethod
    def of(cls, handler, batches, count=None, like=None, device_type=CPU, fail_at=-1, code=0, text="", pooled=False):
        """Of `count` batches: these, again and again; with the schema of `like` if there is none."""
        handles, n = _handles(batches)
        like, count = like or batches[0], n if count is None else count
        rest = device_type, fail_at, code, text.encode(), pooled
        return cls.call("async_produce", handler, like.handle, handles, n, count, *rest)

    @classmethod
    def relay(cls, consumer, handler):
        """Takes the consumer."""
        return cls.call("async_relay", consumer.give(), SECONDS, handler)

    def finish(self):
        """Waits for its end, and raises its Status."""
        check(lib.shim_async_produced(self.handle, SECONDS))


class CppCase(peer_case.PeerCase):
    """Tests that leave nothing behind on either side."""

    def setUp(self):
        super().setUp()
        self.live = lib.shim_live()

    def tearDown(self):
        # Variables and tracebacks may hold handles for longer than tests mean it.
        for handle in set(_Handle.live) - _kept:
            handle.drop()
        for device in DEVICES.values():
            device.settle()
        super().tearDown()
        peer_case.until(lambda: lib.shim_live() == self.live, "everything of C++'s is dropped")


def has_strings(schema):
    """Whether a type has strings or bytes with offsets, at any depth."""
    children = [schema.children[i].contents for i in range(schema.n_children)]
    children += [schema.dictionary.contents] if schema.dictionary else []
    return schema.format in (b"u", b"U", b"z", b"Z") or any(map(has_strings, children))
