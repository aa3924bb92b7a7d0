//! The Hadamard rotation, which spreads a head's outliers over all of its dimensions before they are stored in 8 bits.
//!
//! Rotated queries and keys have the same dot products, and the output is rotated back, because the transform is its own inverse.
//! Source: `QuaRot` (Ashkboos et al., 2024).

use crate::simd::{Kernel, Simd};

/// Rotates each of consecutive heads by the orthonormal Hadamard transform. A head whose size is not a power of two is rotated in parts of
/// the largest power of two that divides it.
pub(crate) struct Hadamard<'a> {
    pub(crate) heads: &'a mut [f32],
    pub(crate) head_dim: usize,
}

impl Kernel for Hadamard<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let size = 1 << self.head_dim.trailing_zeros();
        let norm = 1.0 / (size as f32).sqrt();
        for part in self.heads.chunks_exact_mut(size) {
            let mut half = 1;
            while half < size {
                for pair in part.chunks_exact_mut(2 * half) {
                    let (first, second) = pair.split_at_mut(half);
                    for (x, y) in first.iter_mut().zip(second) {
                        (*x, *y) = (*x + *y, *x - *y);
                    }
                }
                half *= 2;
            }
            for x in part {
                *x *= norm;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    fn rotated(heads: &[f32], head_dim: usize) -> Vec<f32> {
        let mut heads = heads.to_vec();
        Isa::PORTABLE.run(Hadamard { heads: &mut heads, head_dim });
        heads
    }

    #[test]
    fn an_outlier_is_spread_over_its_part() {
        let mut heads = [0.0; 12];
        heads[1] = 2.0;
        // A head of 12 numbers has parts of 4.
        assert_eq!(rotated(&heads, 12), [1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn it_is_its_own_inverse_and_all_instruction_sets_agree() {
        let heads: Vec<f32> = (0..384).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
        for head_dim in [64, 96, 128] {
            let once = rotated(&heads, head_dim);
            assert_ne!(once, heads);
            assert!(rotated(&once, head_dim).iter().zip(&heads).all(|(x, y)| (x - y).abs() < 1e-5));
            for isa in Isa::without_digits() {
                let mut heads = heads.clone();
                isa.run(Hadamard { heads: &mut heads, head_dim });
                assert_eq!(heads, once);
            }
        }
    }
}
