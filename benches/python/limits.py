"""What nobody can beat: the physical limit of each row, in words; docs/performance.md says what each row means."""

# The target of a row of counts is the limit itself.
TARGET = "target"

# id: the limit, and how near a row comes. Of counts that is the value at the limit, or TARGET. Of ratios it is measured (`Figure.to_limit`),
# or nothing but the words can be said: None.
LIMITS = {
    "E2": ("a memcpy of the C structs' bytes, and one allocation", None),
    "E3": ("1: an export reads no row", 1),
    "I1": ("a memcpy of the C structs' bytes, and one allocation", None),
    "V2": ("the target itself", TARGET),
    "X1": ("as E2 and I1 at ten columns", None),
    "A1": ("as X1, without a wake-up on one thread", None),
    "A2": ("std's channel between two threads, which passes pointers", None),
    "P1": ("one memcpy of the bytes", None),
    "C1": ("the target itself", TARGET),
    "C2": ("1: the rows' bytes", 1),
    "C3": ("63 bytes of padding a buffer", 63),
    "D3": ("2 waits, for the sizes and for the data; 4 bytes a column", TARGET),
    "S3": ("the slower of producer and copies, and one batch", None),
    "O1": ("the runtime's own copy", None),
    "WG1": ("plain wgpu's copy of as many bytes", None),
    "H1": ("waking the other process, and a mapping: no byte moves", None),
    "DF1": ("MemTable: the same scan without a device", None),
    "DF2": ("0: no rule", None),
    "DF3": ("the target itself", TARGET),
    "DF4": ("execute_stream: the same partitions without a device", None),
    "DF5": ("the same query without operators", None),
    "DF6": ("the target itself", TARGET),
    "Z1": ("the target itself", TARGET),
    "F3": ("one memcpy of the bytes", None),
    "M1": ("1: the bytes that are used; 0 after trim", 1),
    "L1": ("1: each part costs what the first did", 1),
    # With a GPU.
    "U1": ("one raw copy of as many bytes", None),
    "U2": ("the slower of one raw copy and memcpy by T threads", None),
    "U3": ("as U2", None),
    "U4": ("packed by hand from the batch, and one raw copy", None),
    "U5": ("as U4", None),
    "U6": ("one raw copy of as many bytes", None),
    "U7": ("a block and a copy for each column", None),
    "U8": ("the target itself", TARGET),
    "S1": ("the slower of producer and uploads, and one batch", None),
    "S2": ("raw copies both ways at once", None),
    "D1": ("one raw copy of as many bytes", None),
    "D2": ("as D1, or the first touch of memory if that is slower", None),
}
