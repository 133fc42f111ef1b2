"""Where this crate and its peers differ, by type of `cases.TYPES`: pyarrow 26.0.1, arrow-rs 59. Anything else is a
failure, and so is an entry that no longer holds."""

# Types that pyarrow's C++ reads, but for which Python has no class: exception and text. They pass through unseen.
NO_CLASS = {
    "Interval(YearMonth)": (KeyError, "21"),
    "Interval(DayTime)": (KeyError, "22"),
}

# Types that come back from pyarrow changed: map entries are named `key` and `value`, and the metadata of the extension
# type `arrow.uuid` is written out though it is empty. Values are the same.
CHANGED = {
    "struct with field metadata",
    "map<utf8, i32>",
    "map<utf8, i32> sorted",
    "map<i32, utf8> sorted",
    "map<utf8, list<i32>>",
    "map<i32, map<utf8, struct>>",
}

# arrow-rs loses the flag of sorted maps in its own C data interface.
UNSORTED = {"map<utf8, i32> sorted", "map<i32, utf8> sorted"}

# arrow-rs's IPC writer writes these so that pyarrow refuses them or sees other values: slices of them.
IPC_WRONG = {
    "ree<Int16, utf8>",
    "ree<Int16, i32>",
    "ree<Int32, utf8>",
    "ree<Int32, i32>",
    "ree<Int64, utf8>",
    "ree<Int64, i32>",
    "ree<i32, struct>",
    "ree<i16, dictionary<i8, utf8>>",
    "list<ree<i32, utf8>>",
    "list<sparse union<i32, utf8>>",
}

# What pyarrow cannot build from the Python values that it gives: a part of what it says, and by what it builds an array
# in memory of its own instead.
NOT_FROM_VALUES = {
    # A signalling NaN becomes a quiet one.
    "Float32": ("array: row", "take"),
    "Decimal64(18, -3)": ("Rescaling Decimal value would cause data loss", "take"),
    "Date32": ("must have magnitude <= 999999999", "take"),
    "Date64": ("date value out of range", "take"),
    "Time64(ns)": ("is not safely convertible to microseconds", "take"),
    **{
        f"Timestamp({unit}{zone})": (text, "take")
        for unit, text in [
            ("s", "Python int too large to convert to C int"),
            ("ms", "date value out of range"),
            ("µs", "date value out of range"),
            ("ns", "is not safely convertible to microseconds"),
        ]
        for zone in ["", ', "UTC"', ', "+05:30"']
    },
    "Duration(s)": ("Python int too large to convert to C int", "take"),
    "Duration(ms)": ("Python int too large to convert to C int", "take"),
    "Duration(ns)": ("is not safely convertible to microseconds", "take"),
    "struct with field metadata": ("extension", "take"),
    "sparse union<i32, utf8, bool>": ("sparse_union", "take"),
    "sparse union<null, f64>": ("sparse_union", "take"),
    "dense union<i32, utf8, bool>": ("dense_union", "take"),
    "dense union<null, f64>": ("dense_union", "take"),
    "sparse union<struct, list>": ("sparse_union", "take"),
    "sparse union<dense union, utf8_view>": ("sparse_union", "concat"),
    "dense union<struct, list>": ("dense_union", "take"),
    "dense union<dense union, utf8_view>": ("dense_union", "concat"),
    "list<sparse union<i32, utf8>>": ("sparse_union", "take"),
    "list<ree<i32, utf8>>": ("run_end_encoded", "concat"),
    "ree<i16, dictionary<i8, utf8>>": ("Function 'run_end_encode' has no kernel", "concat"),
    "dictionary<i32, struct>": ("DictionaryArray converter for type", "take"),
    "dictionary<u8, list<utf8>>": ("DictionaryArray converter for type", "take"),
    "dictionary<i32, utf8_view>": ("DictionaryArray converter for type", "take"),
}

# nanoarrow 0.9.0 ends the process when it gives view arrays out again: it takes the array for one of its own making and
# looks for the variadic buffers there. It reads their structs without harm.
NANOARROW_CANNOT_EXPORT = {
    "BinaryView",
    "Utf8View",
    "sparse union<dense union, utf8_view>",
    "dense union<dense union, utf8_view>",
    "dictionary<i32, utf8_view>",
    "list<utf8_view>",
    "struct<binary_view, fixed_binary>",
}

# nanoarrow reads the wrong rows of these if they have an offset, pyarrow's own too.
NANOARROW_MISREADS_OFFSETS = {"FixedSizeBinary(3)"}

# Arrow C++ 26.0.1 in async streams, against the specification: see test_cpp_async.
CPP_ASYNC = {
    # As a consumer.
    "tasks of a dropped consumer": "what is queued is never extracted, and there is no cancel: the batches are "
    "lost, at most as many as its queue is long",
    "tasks before an error": "what is queued when on_error comes is neither read nor extracted: lost as well",
    "request after release": "a request for each batch that it takes, though the handler was released",
    "metadata of an error": "taken for a text: what is left ends before the first zero byte",
    "metadata of a stream": "not kept",
    # As a producer.
    "errno of an error": "EINVAL, whatever the Status",
    "on_error after cancel": "a stream that was cancelled ends with an error",
    "answers of a handler": "an answer other than 0 is told as 1, and on_error follows",
    "failed extraction": "extract_data answers 0 and leaves `out` as it was",
    "declared device type": "arrays of another type are passed on",
}
# The errno of all its errors.
CPP_ASYNC_ERRNO = 22
