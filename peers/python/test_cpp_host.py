"""Arrow C++ on the CPU: arrays and batches of every type, there and back."""

import unittest

from shim import Array, Balanced, Batch, Cases, Kind, release


class Arrays(Balanced):
    def each(self, check):
        """Every array of every type of ours, in Arrow C++."""
        cases = Cases()
        self.assertGreater(len(cases.types), 100)
        for name in cases.types:
            of_type = cases.of(name)
            self.assertGreater(len(of_type), 10)
            with self.subTest(name):
                for case in of_type:
                    check(case, Array.take(case.export()))

    def test_in(self):
        """Arrow C++ finds our arrays valid, and the same as arrow-rs's."""

        def check(case, ours):
            ours.validate()
            ours.assert_same(Array.take_host(case.export_host()))

        self.each(check)

    def test_back(self):
        """What Arrow C++ hands back are our arrays, in the same memory."""
        self.each(lambda case, ours: case.check(ours.export()))

    def test_memory_of_cpp(self):
        """And in memory that Arrow C++ allocated."""

        def check(case, ours):
            copy = ours.copy()
            ours.drop()
            case.check(copy.export())

        self.each(check)

    def test_slices_of_cpp(self):
        """Arrow C++ slices by an offset at the top, whatever lies below."""

        def check(case, ours):
            rows = max(case.rows - 3, 0)
            offset = min(case.rows, 1)
            case.check(ours.slice(offset, rows).export(), offset, rows)
            case.check(ours.slice(offset, rows).copy().export(), offset, rows)
            case.check(ours.slice(case.rows, 0).export(), case.rows, 0)

        self.each(check)

    def test_several_holders(self):
        """An array is exported twice, released in any order, and lives on in Arrow C++."""
        case = Cases().of("list<utf8 required>")[2]
        ours = Array.take(case.export())
        first, second = ours.export(), ours.export()
        release(first[0])
        first[1].release(first[1])
        ours.drop()
        case.check(second)


class Batches(Balanced):
    def test_in_and_back(self):
        """Batches with every type, with none, with many columns: valid, the same, and the same on their way back."""
        for kind in Kind.all():
            with self.subTest(kind.name):
                ours, host = Batch.take(kind.export()), Batch.take_host(kind.export_host())
                ours.validate()
                ours.assert_same(host)
                kind.check(ours.export())
                kind.check(ours.copy().export())

    def test_differences_are_seen(self):
        """Another batch is another batch, to both sides."""
        kind = Kind.named("fixed width")
        first = Batch.take(kind.export(seed=1))
        self.assert_fails(9, "actual", first.assert_same, Batch.take_host(kind.export_host(seed=2)))
        self.assert_fails(-1, "column 0", kind.check, first.export(), seed=2)

    def test_move_child(self):
        """MoveChild of Arrow C++'s tests: a child is taken, the parent released, the child lives on."""
        kind = Kind.named("every type")
        host = Batch.take_host(kind.export_host())
        for column in range(100):
            moved = Batch.move_columns(kind.export(), [column])
            moved.validate()
            moved.assert_same(host.select([column]))

    def test_move_several_children(self):
        """MoveSeveralChildren: some are taken, in any order; each is released by itself."""
        kind = Kind.named("every type")
        host = Batch.take_host(kind.export_host())
        for columns in ([0, 1, 2], [99, 3, 50, 49, 70], list(range(100))):
            moved = Batch.move_columns(kind.export(), columns)
            moved.assert_same(host.select(columns))
            last = len(columns) // 2
            alone = moved.select([last])
            moved.drop()
            alone.assert_same(host.select([columns[last]]))


if __name__ == "__main__":
    unittest.main()
