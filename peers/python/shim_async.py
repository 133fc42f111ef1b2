"""Async streams, of Arrow C++ (`peers/cpp/async.cc`) and of the Rust side (`peers/rust/cpp/async_streams.rs`)."""

import ctypes as c
import time

import abi
from shim import Balanced, Batch, _Handle, check, check_rust, handle_of, lib, rust

P = c.POINTER
_handle, _out, _text = c.c_void_p, P(c.c_void_p), c.c_char_p
# Arrow C++ may wait for ever.
SECONDS = 30.0
COMPLETED, CANCELLED, DROPPED, PANICKED, REFUSED = 0, 1, 2, 3, 1000
# In place of a kind: batches that both sides make by themselves.
NUMBERED = c.c_size_t(-1).value

for _library, _name, _result, _arguments in [
    (lib, "shim_async_new", c.c_int, [c.c_uint64, _out]),
    (lib, "shim_async_handler", _handle, [_handle]),
    (lib, "shim_async_schema", c.c_int, [_handle, c.c_double, _handle, P(c.c_int)]),
    (lib, "shim_async_next", c.c_int, [_handle, c.c_double, _out]),
    (lib, "shim_async_read_numbered", c.c_int, [_handle, c.c_double, c.c_int64]),
    (lib, "shim_async_metadata", c.c_int64, [_handle]),
    (lib, "shim_async_metadata_of", _text, [_handle, _text]),
    (lib, "shim_async_detail", c.c_int, [_handle, P(_text), _out, P(c.c_int64)]),
    (lib, "shim_async_drop", None, [_handle]),
    (lib, "shim_async_consumers", c.c_int64, []),
    (lib, "shim_async_produce", c.c_int,
     [_handle, _handle, _out, c.c_int64, c.c_int, c.c_int64, c.c_int, _text, c.c_bool, _out]),
    (lib, "shim_async_produce_numbered", c.c_int, [_handle, c.c_int64, c.c_int64, c.c_int, _text, c.c_bool, _out]),
    (lib, "shim_async_relay", c.c_int, [_handle, c.c_double, _handle, _out]),
    (lib, "shim_async_produced", c.c_int, [_handle, c.c_double]),
    (lib, "shim_export_drop", None, [_handle]),
    (lib, "shim_async_running", c.c_int64, []),
    (rust, "peers_cpp_async_live", c.c_ssize_t, []),
    (rust, "peers_cpp_async_batches", c.c_ssize_t, []),
    (rust, "peers_cpp_async_give", c.c_int,
     [c.c_size_t, c.c_uint64, c.c_int64, c.c_int, _handle, c.c_bool, c.c_bool, c.c_bool, c.c_bool, _handle, _out]),
    (rust, "peers_cpp_async_given", c.c_int, [_handle, c.c_double, P(c.c_int)]),
    (rust, "peers_cpp_async_stop", None, [_handle]),
    (rust, "peers_cpp_async_give_drop", None, [_handle]),
    (rust, "peers_cpp_async_take", c.c_int, [c.c_size_t, _handle, _out, _out]),
    (rust, "peers_cpp_async_opened", c.c_int, [_handle, c.c_size_t, c.c_int]),
    (rust, "peers_cpp_async_read", c.c_int, [_handle, c.c_size_t, c.c_uint64, c.c_uint64, c.c_bool, c.c_bool]),
    (rust, "peers_cpp_async_read_waiting", c.c_int, [_handle, c.c_size_t, c.c_uint64]),
    (rust, "peers_cpp_async_take_drop", None, [_handle]),
]:  # fmt: skip
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments


class Consumer(_Handle):
    """Arrow C++'s consumer, whose handler is given to a producer."""

    kind = "async"

    @classmethod
    def new(cls, queue=5):
        return cls.call("async_new", queue)

    @property
    def handler(self):
        return lib.shim_async_handler(self.handle)

    def schema(self, like):
        """The device type; the schema is that of a batch."""
        device_type = c.c_int()
        self.do("schema", SECONDS, like.handle, device_type)
        return device_type.value

    def next(self, seconds=SECONDS):
        out = c.c_void_p()
        self.do("next", seconds, c.byref(out))
        return Batch(out) if out else None

    def read_numbered(self, count):
        self.do("read_numbered", SECONDS, count)

    def metadata(self, *keys):
        """Of the last batch: how many entries, -1 if there is none, and the values of these keys."""
        return lib.shim_async_metadata(self.handle), *(self._value("metadata_of", key) for key in keys)

    def detail(self):
        """Of the last error: its code, text and bytes of metadata."""
        text, metadata, bytes = c.c_char_p(), c.c_void_p(), c.c_int64()
        code = lib.shim_async_detail(self.handle, text, metadata, bytes)
        return code, text.value and text.value.decode(), c.string_at(metadata, bytes.value)

    def _value(self, what, key):
        value = getattr(lib, f"shim_async_{what}")(self.handle, key.encode())
        return value and value.decode()


class Export(_Handle):
    """An export of Arrow C++'s, on a thread of its own."""

    kind = "export"

    @classmethod
    def of(cls, handler, batches, like=None, device_type=abi.CPU, fail_at=-1, code=0, text="", pooled=False):
        """Of these batches; with the schema of `like` if there is none."""
        handles, count = (c.c_void_p * len(batches))(*[b.handle for b in batches]), len(batches)
        like = like or batches[0]
        rest = device_type, fail_at, code, text.encode(), pooled
        return cls.call("async_produce", handler, like.handle, handles, count, *rest)

    @classmethod
    def numbered(cls, handler, count, fail_at=-1, code=0, text="", pooled=False):
        return cls.call("async_produce_numbered", handler, count, fail_at, code, text.encode(), pooled)

    @classmethod
    def relay(cls, consumer, handler):
        """Takes the consumer."""
        return cls.call("async_relay", consumer.give(), SECONDS, handler)

    def finish(self):
        """Waits for its end, and raises its Status."""
        check(lib.shim_async_produced(self.handle, SECONDS))


class _Ours:
    """Something of the Rust side's."""

    kind = ""

    def __init__(self, handle):
        self.handle = handle

    def __del__(self):
        self.drop()

    def drop(self):
        handle, self.handle = self.handle, None
        if handle:
            getattr(rust, f"peers_cpp_async_{self.kind}_drop")(handle)


class Giving(_Ours):
    """A stream of ours on its way to a handler, on a thread of its own."""

    kind = "give"

    def __init__(
        self, handler, kind, count, fail_at=-1, errno=0, sim=None, wait=False,
        metadata=False, in_place=False, threaded=False,
    ):  # fmt: skip
        super().__init__(None)
        out = c.c_void_p()
        rest = handle_of(sim), wait, metadata, in_place, threaded, handler
        check_rust(rust.peers_cpp_async_give(index(kind), count, fail_at, errno, *rest, c.byref(out)))
        self.handle = out

    def end(self, seconds=SECONDS):
        """Waits for its end: how that was, or the error that it reported."""
        out = c.c_int()
        check_rust(rust.peers_cpp_async_given(self.handle, seconds, out))
        return out.value

    def stop(self):
        """Drops it before its end."""
        rust.peers_cpp_async_stop(self.handle)


class Taking(_Ours):
    """A stream of ours from a handler of ours."""

    kind = "take"

    def __init__(self, depth=5, sim=None):
        super().__init__(None)
        handler, out = c.c_void_p(), c.c_void_p()
        check_rust(rust.peers_cpp_async_take(depth, handle_of(sim), c.byref(handler), c.byref(out)))
        self.handler, self.handle = handler, out

    def opened(self, kind, device_type=abi.CPU):
        """Waits for the schema, and compares it."""
        check_rust(rust.peers_cpp_async_opened(self.handle, index(kind), device_type))

    def read(self, kind, count, start=0, stop=False, later=False):
        """Compares the next batches; and that the end follows, unless it is to `stop`."""
        check_rust(rust.peers_cpp_async_read(self.handle, index(kind), start, count, stop, later))

    def read_waiting(self, kind, count):
        """Compares all batches, by a reader that waits on this thread. Takes the stream."""
        handle, self.handle = self.handle, None
        check_rust(rust.peers_cpp_async_read_waiting(handle, index(kind), count))


def index(kind):
    return kind if isinstance(kind, int) else kind.index


def balance():
    """What lives of async streams."""
    return {
        "our streams": rust.peers_cpp_async_live(),
        "our batches": rust.peers_cpp_async_batches(),
        "C++ consumers": lib.shim_async_consumers(),
        "C++ exports": lib.shim_async_running(),
    }


class AsyncBalanced(Balanced):
    """Async streams that leave nothing behind on either side, except what is said to be lost."""

    def setUp(self):
        super().setUp()
        self.async_before = balance()

    def tearDown(self):
        super().tearDown()
        self.assertEqual(self.settled(), self.async_before)

    def settled(self):
        """What lives once threads have come to their ends."""
        _Handle.drop_all_but(set())
        until = time.monotonic() + 1
        while (now := balance()) != self.async_before and time.monotonic() < until:
            time.sleep(0.01)
        return now

    def lost(self, at_most, at_least=0):
        """So many batches of ours Arrow C++ never lets go of, and no more."""
        lost = self.settled()["our batches"] - self.async_before["our batches"]
        self.assertTrue(at_least <= lost <= at_most, f"{lost} batches are lost")
        self.async_before["our batches"] += lost
