"""Device streams from Python: pyarrow has none of its own."""

import ctypes as c
import errno
from collections.abc import Callable, Iterable

import pyarrow as pa

from abi import (
    CPU,
    ArrowDeviceArray,
    ArrowDeviceArrayStream,
    ArrowSchema,
    GetLastError,
    GetNext,
    GetSchema,
    StreamRelease,
)


class Failure(Exception):
    """What a producer answers instead of an array: an errno, and a text or none."""

    def __init__(self, number: int, text: str | bytes | None):
        super().__init__(number, text)
        self.number = number
        self.text = text.encode() if isinstance(text, str) else text


class Producer:
    """A stream of what pyarrow exports: batches or arrays.

    `items` may also hold functions, which get the struct to write to and may raise `Failure`. An answer that is not 0
    is for everything after it, too: the consumer must not ask again, and `calls_after_end` counts if it does.
    """

    _kept: list = []

    def __init__(
        self,
        schema: pa.Schema | pa.Field | Callable[[ArrowSchema], None],
        items: Iterable[pa.Array | pa.RecordBatch | Callable[[ArrowDeviceArray], None]],
        device_type: int = CPU,
    ):
        self.schema, self.items = schema, iter(items)
        self.gets = self.releases = self.calls_after_end = 0
        self.ended = False
        self.text: bytes | None = None
        callbacks = (
            GetSchema(self._get_schema),
            GetNext(self._get_next),
            GetLastError(self._get_last_error),
            StreamRelease(self._release),
        )
        # A callback is not freed while it may still run.
        Producer._kept.append(callbacks)
        self.stream = ArrowDeviceArrayStream(device_type, *callbacks, None)

    def _answer(self, body) -> int:
        try:
            body()
            return 0
        except Failure as failure:
            self.text_buffer = None if failure.text is None else c.create_string_buffer(failure.text)
            self.text = failure.text
            return failure.number

    def _get_schema(self, _stream, out) -> int:
        def body():
            if callable(self.schema):
                self.schema(out.contents)
            else:
                self.schema._export_to_c(c.addressof(out.contents))

        return self._answer(body)

    def _get_next(self, _stream, out) -> int:
        self.gets += 1
        self.calls_after_end += self.ended
        out = out.contents

        def body():
            item = next(self.items, None)
            if item is None:
                self.ended = True
                out.array.release = type(out.array.release)()
            elif callable(item):
                item(out)
            else:
                item._export_to_c_device(c.addressof(out))

        code = self._answer(body)
        self.ended = self.ended or code != 0
        return code

    def _get_last_error(self, _stream):
        return None if self.text is None else c.addressof(self.text_buffer)

    def _release(self, stream):
        self.releases += 1
        self.items = iter(())
        stream.contents.release = StreamRelease()


def failing(number: int = errno.EIO, text: str | bytes | None = "") -> Callable[[ArrowDeviceArray], None]:
    """An item that is an error."""

    def fail(_out):
        raise Failure(number, text)

    return fail
