//! Random numbers that are the same in every run.

/// A generator of pseudorandom numbers (xorshift64, Marsaglia 2003).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator for `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..10 {
            random.next(); // the first numbers of similar seeds are similar
        }
        random
    }

    /// A number from 0 to 1, without 1.
    pub(crate) fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The numbers below `count` in a random order.
    pub(crate) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            order.swap(at, (self.next() * (at + 1) as f64) as usize);
        }
        order
    }
}
