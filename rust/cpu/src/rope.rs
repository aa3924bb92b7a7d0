//! Rotary position embedding (Su and others, 2021). It rotates pairs of a head's numbers by angles proportional to the position.

use crate::simd::{Kernel, Simd};

/// A rotary embedding.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Radians per position for each pair. The numbers of a head beyond the pairs are not rotated.
    pub frequencies: Vec<f32>,
    /// Factor of the cosines and sines. 1 except for `LongRoPE`.
    pub scale: f32,
}

impl Rope {
    /// The rotated width of a head. [`Rope::write`] writes this number of values.
    pub(crate) fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Writes the cosines, then the sines, for a position.
    pub(crate) fn write(&self, position: i32, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.frequencies.len());
        for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(&self.frequencies) {
            let (y, x) = (position as f32 * frequency).sin_cos();
            (*sine, *cosine) = (y * self.scale, x * self.scale);
        }
    }
}

/// Rotates consecutive heads.
pub(crate) struct Rotate<'a> {
    pub(crate) heads: &'a mut [f32],
    pub(crate) head_dim: usize,
    /// The cosines and sines from [`Rope::write`].
    pub(crate) cos_sin: &'a [f32],
    /// Whether neighbours are a pair (`DeepSeek`), instead of numbers that are half of the rotated width apart.
    pub(crate) adjacent: bool,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let half = self.cos_sin.len() / 2;
        let (cosines, sines) = self.cos_sin.split_at(half);
        for head in self.heads.chunks_exact_mut(self.head_dim) {
            if self.adjacent {
                for (pair, (cosine, sine)) in head.as_chunks_mut::<2>().0.iter_mut().zip(cosines.iter().zip(sines)) {
                    let [x, y] = *pair;
                    *pair = [x * cosine - y * sine, y * cosine + x * sine];
                }
                continue;
            }
            let (first, second) = head[..2 * half].split_at_mut(half);
            for i in 0..half {
                let (x, y) = (first[i], second[i]);
                first[i] = x * cosines[i] - y * sines[i];
                second[i] = y * cosines[i] + x * sines[i];
            }
        }
    }
}
