//! Reading an input, front to back; zeros follow its end.

/// The rest of an input.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

macro_rules! integers {
    ($($name:ident)*) => { $(
        pub fn $name(&mut self) -> $name {
            let mut bytes = [0; size_of::<$name>()];
            let found = self.bytes(bytes.len());
            bytes[..found.len()].copy_from_slice(found);
            $name::from_le_bytes(bytes)
        }
    )* };
}

/// Counts that overflow something.
const EXTREMES: [i64; 10] = [
    -1,
    i64::MIN,
    i64::MAX,
    i64::MAX / 2,
    i64::MAX / 8,
    1 << 60,
    1 << 32,
    i32::MAX as i64,
    i32::MAX as i64 + 1,
    1 << 31 << 6,
];

impl<'a> Input<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    integers!(u8 i8 u16 i32 i64);

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One of `n` choices.
    pub fn choice(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n.max(1)
    }

    pub fn bool(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// A number of rows, bytes and such: small, or extreme.
    pub fn count(&mut self) -> i64 {
        match self.u8() {
            252 => self.u16().into(),
            253 => self.i64(),
            n @ 254..=255 => {
                EXTREMES[(self.choice(EXTREMES.len()) + usize::from(n)) % EXTREMES.len()]
            }
            n => n.into(),
        }
    }

    /// At most `n` bytes.
    fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Bytes with a length before them, of one byte.
    pub fn text(&mut self) -> &'a [u8] {
        let n = self.u8();
        self.bytes(n.into())
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }
}
