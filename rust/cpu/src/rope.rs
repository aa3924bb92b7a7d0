//! Rotary position embedding (Su and others, 2021): pairs of a head's numbers, half a head apart, are turned by angles
//! that grow with the position.

use crate::simd::{Kernel, Simd};

/// Writes the cosines, then the sines, of a position's angles; `frequencies` are radians per position, half as many as `out`.
pub(crate) fn turns(position: i32, frequencies: &[f32], out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(frequencies.len());
    for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
        (*sine, *cosine) = (position as f32 * frequency).sin_cos();
    }
}

/// Turns heads that lie one after the other, each as long as `turns`.
pub(crate) struct Rotate<'a> {
    pub(crate) heads: &'a mut [f32],
    pub(crate) turns: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let half = self.turns.len() / 2;
        let (cosines, sines) = self.turns.split_at(half);
        for head in self.heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (x, y) = (first[i], second[i]);
                first[i] = x * cosines[i] - y * sines[i];
                second[i] = y * cosines[i] + x * sines[i];
            }
        }
    }
}
