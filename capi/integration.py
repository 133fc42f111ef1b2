"""Sends Arrow's integration files through each pair of implementations on the C device interface, and prints who passed.

    python capi/integration.py --library ArrowDevice=libarrow_device_capi.so [--library NAME=PATH ...] [--nanoarrow] FILE_OR_FOLDER ...

A library has the functions of arrow_device_integration.h, with its name in place of ArrowDevice. Files are those of Arrow's
repository arrow-testing: `.json.gz` or `.json`, and `.stream` or `.arrow_file` with the same content, of which each library gets
the first that it reads. Each exporter's schema, batches and streams, labelled CPU and EXT_DEV, go to each importer. After
each, every struct must have been released once, and every library must hold as many bytes as before.

The table, in Markdown, counts passed / failed / skipped; what failed and why something is skipped follows. The exit status is
1 if anything failed or nothing passed. Needs Python 3.10, pyarrow (for numbers of batches and nanoarrow's values), and
nanoarrow if it takes part.
"""

import argparse
import collections
import ctypes as c
import gc
import gzip
import json
import pathlib
import sys
import tempfile
import time

LABELS = {"CPU": 1, "EXT_DEV": 12}
FORMS = ("json", "stream", "arrow_file")
PATIENCE_SECONDS = 20
UNSUPPORTED = "not supported: "


class Skipped(Exception):
    pass


class Failed(Exception):
    pass


class Struct:
    """Memory for one of the C structs, and how often it was released. `release` is the offset of that member."""

    kept = []
    sizes = {"Schema": (72, 56), "Array": (128, 64), "Stream": (48, 32)}

    def __init__(self, kind):
        self.size, self.release = self.sizes[kind]
        self.memory = c.create_string_buffer(self.size)
        self.releases, self.expected = 0, 0

    @property
    def address(self):
        return c.addressof(self.memory)

    def watch(self):
        """Puts a callback around the release, of which there must be exactly one. The struct may be moved."""
        original = c.create_string_buffer(self.memory.raw, self.size)
        theirs = c.c_void_p.from_buffer(original, self.release).value
        if not theirs:
            raise Failed("the exported struct is released")
        self.expected = 1

        def release(moved):
            self.releases += 1
            c.CFUNCTYPE(None, c.c_void_p)(theirs)(c.addressof(original))
            c.c_void_p.from_address(moved + self.release).value = None

        callback = c.CFUNCTYPE(None, c.c_void_p)(release)
        self.kept.append(callback)  # A callback is not freed while it may still run.
        c.c_void_p.from_buffer(self.memory, self.release).value = c.cast(callback, c.c_void_p).value

    def drop(self):
        """Releases what nobody has taken."""
        if theirs := c.c_void_p.from_buffer(self.memory, self.release).value:
            c.CFUNCTYPE(None, c.c_void_p)(theirs)(self.address)


class Library:
    """An implementation behind the C functions."""

    def __init__(self, name, path):
        self.name, self.forms = name, {}
        lib = c.CDLL(path, c.RTLD_GLOBAL)

        def function(suffix, result=c.c_char_p, *arguments):
            found = getattr(lib, f"{name}_CDeviceIntegration_{suffix}")
            found.restype, found.argtypes = result, arguments
            return found

        text, number, label, struct = c.c_char_p, c.c_int, c.c_int32, c.c_void_p
        self.calls = {
            "Schema": (text, struct),
            "Batch": (text, number, label, struct),
            "Stream": (text, label, struct),
        }
        self.exports = {kind: function(f"Export{kind}FromJson", text, *of) for kind, of in self.calls.items()}
        self.imports = {kind: function(f"Import{kind}AndCompareToJson", text, *of) for kind, of in self.calls.items()}
        self.bytes = function("BytesAllocated", c.c_int64)

    def form(self, case):
        """The first form of a file that it reads."""
        if case not in self.forms:
            for form in (form for form in FORMS if form in case.forms):
                struct = Struct("Schema")
                answer = self.exports["Schema"](str(case.forms[form]).encode(), struct.address)
                struct.drop()
                self.forms[case] = form
                if not (answer or b"").startswith(UNSUPPORTED.encode()):
                    break
        return str(case.forms[self.forms[case]]).encode()

    def call(self, functions, kind, case, arguments):
        if answer := functions[kind](self.form(case), *arguments):
            text = answer.decode(errors="replace")
            raise (Skipped if text.startswith(UNSUPPORTED) else Failed)(f"{self.name}: {text.removeprefix(UNSUPPORTED)}")

    def export_(self, kind, case, *arguments):
        self.call(self.exports, kind, case, arguments)

    def import_(self, kind, case, exporter, *arguments):
        self.call(self.imports, kind, case, arguments)


class Nanoarrow:
    """nanoarrow for Python, which has no library to load. pyarrow reads what it gives on. What it cannot read, of a device, its
    exporter gets back and compares."""

    name = "nanoarrow"

    def __init__(self):
        import nanoarrow.c_array_stream
        import nanoarrow.device
        import nanoarrow.ipc
        import pyarrow

        self.na, self.pa = nanoarrow, pyarrow
        self.api = c.pythonapi
        self.api.PyCapsule_New.restype = c.py_object
        self.api.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
        self.api.PyCapsule_GetPointer.restype = c.c_void_p
        self.api.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]

    def bytes(self):
        return 0

    def read(self, case):
        if "stream" not in case.forms:
            raise Skipped("nanoarrow: it reads streams alone")
        try:
            with self.na.ipc.InputStream.from_path(case.forms["stream"]) as file:
                stream = self.na.c_array_stream(file)
                return stream.get_schema(), list(stream)
        except Exception as e:
            raise Skipped(f"nanoarrow's reader of files: {e}") from None

    def move(self, capsule, name, to, size):
        """Moves the struct out of a capsule."""
        address = self.api.PyCapsule_GetPointer(capsule, name)
        c.memmove(to, address, size)
        c.c_void_p.from_address(address + Struct.sizes["Schema" if b"schema" in name else "Array"][1]).value = None

    def export_(self, kind, case, *arguments):
        label = arguments[-2] if kind != "Schema" else LABELS["CPU"]
        if label != LABELS["CPU"]:
            raise Skipped("nanoarrow: its Python package has no device for tests")
        if kind == "Stream":
            raise Skipped("nanoarrow: its Python package has no device streams")
        schema, batches = self.read(case)
        if kind == "Schema":
            return self.move(schema.__arrow_c_schema__(), b"arrow_schema", arguments[-1], 72)
        array = self.na.device.c_device_array(batches[arguments[0]])
        self.move(array.__arrow_c_device_array__()[1], b"arrow_device_array", arguments[-1], 128)

    def import_(self, kind, case, exporter, *arguments):
        if kind == "Stream":
            raise Skipped("nanoarrow: its Python package has no device streams")
        if case.forms.keys() == {"json"}:
            raise Skipped("nanoarrow: it does not read JSON")
        expected, batches = case.with_pyarrow(self.pa)
        if kind == "Schema":
            given = self.capsules(arguments[-1], None)
            if not self.pa.schema(self.na.c_schema(given)).equals(expected, check_metadata=True):
                raise Failed("nanoarrow: another schema")
            return
        number, label, address = arguments
        schema = Struct("Schema")
        exporter.export_("Schema", case, schema.address)
        try:
            array = self.na.device.c_device_array(self.capsules(schema.address, address))
            if array.device_type_id != label:
                raise Failed(f"nanoarrow: device type {array.device_type_id}")
            if label != LABELS["CPU"]:
                again = Struct("Array")
                self.move(array.__arrow_c_device_array__()[1], b"arrow_device_array", again.address, 128)
                exporter.import_("Batch", case, exporter, number, label, again.address)
            elif not self.pa.record_batch(array).equals(batches[number]):
                raise Failed("nanoarrow: another batch")
        finally:
            schema.drop()

    def capsules(self, schema, array):
        """An object that hands out the structs at these addresses. nanoarrow leaves them where they are."""
        capsule = self.api.PyCapsule_New

        class Given:
            def __arrow_c_schema__(self):
                return capsule(schema, b"arrow_schema", None)

            def __arrow_c_device_array__(self, requested_schema=None, **_):
                return capsule(schema, b"arrow_schema", None), capsule(array, b"arrow_device_array", None)

        return Given()


class Case:
    """A file, in the forms that there are."""

    def __init__(self, name):
        self.name, self.forms, self.read = name, {}, None

    def with_pyarrow(self, pa):
        """Its schema and batches."""
        if self.read is None:
            form = next(form for form in FORMS[1:] if form in self.forms)
            reader = (pa.ipc.open_stream if form == "stream" else pa.ipc.open_file)(self.forms[form].read_bytes())
            batches = list(reader) if form == "stream" else [reader.get_batch(i) for i in range(reader.num_record_batches)]
            self.read = reader.schema, batches
        return self.read

    def number_of_batches(self):
        """pyarrow reads the file before anybody counts bytes: its memory is Arrow C++'s."""
        if self.forms.keys() == {"json"}:
            return len(json.loads(self.forms["json"].read_text())["batches"])
        import pyarrow as pa

        return len(self.with_pyarrow(pa)[1])


def cases(paths, unpacked):
    found = collections.OrderedDict()
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    for file in files:
        name = file.name.removesuffix(".gz")
        stem, _, form = name.rpartition(".")
        if form not in FORMS or not stem:
            continue
        case = found.setdefault(file.parent / stem, Case(f"{file.parent.name}/{stem}"))
        if file.suffix == ".gz":
            # As archery hands them out.
            file, packed = unpacked / f"{len(found)}-{name}", file
            file.write_bytes(gzip.decompress(packed.read_bytes()))
        case.forms[form] = file
    return list(found.values())


def check(exporter, importer, label, kind, case, number):
    """One struct from one to the other."""
    struct = Struct("Array" if kind == "Batch" else kind)
    arguments = {"Schema": (), "Batch": (number, LABELS[label]), "Stream": (LABELS[label],)}[kind]
    before = exporter.bytes(), importer.bytes()
    try:
        exporter.export_(kind, case, *arguments, struct.address)
        struct.watch()
        importer.import_(kind, case, exporter, *arguments, struct.address)
    finally:
        struct.drop()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        after = exporter.bytes(), importer.bytes()
        if after == before and struct.releases == 1:
            return
        if struct.releases > 1 or time.monotonic() > deadline:
            raise Failed(f"released {struct.releases} times; bytes of {exporter.name} and {importer.name}: {before} before, {after} after")
        time.sleep(0.005)
        gc.collect()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--nanoarrow", action="store_true")
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    libraries = [Library(*given.split("=", 1)) for given in args.library] + [Nanoarrow()] * args.nanoarrow
    # Garbage is collected often: imported modules are frozen, so that no collection walks them.
    gc.freeze()
    with tempfile.TemporaryDirectory() as unpacked:
        files = cases(args.paths, pathlib.Path(unpacked))
        sys.exit(run(libraries, files))


def run(libraries, files):
    cells, reasons = collections.defaultdict(lambda: [0, 0, 0]), collections.Counter()
    pairs = [(exporter, label, importer) for exporter in libraries for label in LABELS for importer in libraries]
    for done, (exporter, label, importer) in enumerate(pairs):
        for place, case in enumerate(files):
            if sys.stderr.isatty():
                step = f"{done + 1}/{len(pairs)} {exporter.name} to {importer.name}, {label}: {place + 1}/{len(files)} {case.name}"
                print(f"\r\033[K{step}", end="", file=sys.stderr, flush=True)
            # A schema has no device.
            todo = [("Schema", 0)] * (label == "CPU") + [("Batch", n) for n in range(case.number_of_batches())] + [("Stream", 0)]
            for kind, number in todo:
                cell = cells[exporter.name, label, importer.name]
                try:
                    check(exporter, importer, label, kind, case, number)
                    cell[0] += 1
                except Failed as e:
                    cell[1] += 1
                    reasons["failed", f"{exporter.name} to {importer.name}, {label}, {kind.lower()} of {case.name}: {e}"] += 1
                except Skipped as e:
                    cell[2] += 1
                    reasons["skipped", f"{label}, {kind.lower()}: {e}"] += 1
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    names = [library.name for library in libraries]
    print(f"{len(files)} files; passed / failed / skipped, exporters down, importers across:\n")
    print(f"| from | label | {' | '.join(names)} |\n| --- | --- |{' ---: |' * len(names)}")
    for exporter in names:
        for label in LABELS:
            row = [" / ".join(map(str, cells[exporter, label, importer])) for importer in names]
            print(f"| {exporter} | {label} | {' | '.join(row)} |")
    for outcome in ("failed", "skipped"):
        lines = [f"- {count} x {text}" for (of, text), count in reasons.items() if of == outcome]
        if lines:
            print(f"\n{outcome.capitalize()}:\n", *lines, sep="\n")
    passed, failed, _ = map(sum, zip(*cells.values()))
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    main()
