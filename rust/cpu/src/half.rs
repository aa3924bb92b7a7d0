//! Conversion of IEEE half precision and bfloat16, one number at a time.

/// Converts a half-precision number to fp32.
#[inline]
pub fn to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let rest = u32::from(half & 0x7fff) << 13;
    // After the shift the exponent is 112 too small. The multiplication corrects it, also for subnormal numbers.
    let scaled = f32::from_bits(rest) * f32::from_bits((127 + 112) << 23);
    let bits = if half & 0x7c00 == 0x7c00 { rest | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(sign | bits)
}

/// Rounds to the nearest half-precision number, ties to even. The result is infinity from 65520 on.
#[inline]
pub fn from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00
    } else if magnitude >= 0x4780_0000 {
        0x7c00
    } else if magnitude < 0x3880_0000 {
        // Subnormal result: the last place of the sum with 0.5 is the last place of the result, so the addition rounds correctly.
        (f32::from_bits(magnitude) + 0.5).to_bits() as u16
    } else {
        // Rebiases the exponent and rounds to nearest even.
        let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
        ((rounded - (112 << 23)) >> 13) as u16
    };
    sign | half
}

/// Rounds to the nearest bfloat16 number, ties to even.
#[inline]
pub(crate) fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding a NaN could carry into the sign.
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // The tests compare exact bits.
mod tests {
    use super::*;

    const INFINITY: u16 = 0x7c00;

    /// A finite number by its definition. The bits of infinity give the next power of two.
    fn value(half: u16) -> f64 {
        let (exponent, fraction) = (i32::from(half >> 10), f64::from(half & 0x3ff) / 1024.0);
        if exponent == 0 { fraction * (-14_f64).exp2() } else { (1.0 + fraction) * f64::from(exponent - 15).exp2() }
    }

    /// The number with the smallest distance, the even one of two with equal distance.
    fn nearest(x: f32, values: &[f64]) -> u16 {
        let x = f64::from(x);
        let above = values.partition_point(|&value| value < x).min(values.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (x - values[below], values[above] - x);
        (if down < up || (down == up && below % 2 == 0) { below } else { above }) as u16
    }

    #[test]
    fn all_halves_are_what_they_stand_for_and_come_back() {
        for magnitude in 0..INFINITY {
            for half in [magnitude, 0x8000 | magnitude] {
                let x = to_f32(half);
                assert_eq!(f64::from(x.abs()), value(magnitude), "{half:#x}");
                assert_eq!(x.is_sign_negative(), half > 0x7fff, "{half:#x}");
                assert_eq!(from_f32(x), half);
            }
        }
        for half in [INFINITY, 0x8000 | INFINITY] {
            assert_eq!(to_f32(half), if half == INFINITY { f32::INFINITY } else { f32::NEG_INFINITY });
            assert_eq!(from_f32(to_f32(half)), half);
            for fraction in 1..0x400 {
                let x = to_f32(half | fraction);
                assert!(x.is_nan() && to_f32(from_f32(x)).is_nan());
                assert_eq!(x.is_sign_negative(), half > 0x7fff);
            }
        }
    }

    #[test]
    fn numbers_become_the_nearest_half() {
        let values: Vec<f64> = (0..=INFINITY).map(value).collect();
        let check = |x: f32| {
            let half = nearest(x, &values);
            assert_eq!((from_f32(x), from_f32(-x)), (half, 0x8000 | half), "{x:e}");
        };
        // Tests each half, the midpoint between it and the next one, and the neighbours of both.
        for pair in values.windows(2) {
            for x in [pair[0], f64::midpoint(pair[0], pair[1])] {
                let bits = (x as f32).to_bits();
                (bits.saturating_sub(1)..=bits + 1).for_each(|bits| check(f32::from_bits(bits)));
            }
        }
        // The step has no common factor with the spacing of the numbers.
        (0..f32::INFINITY.to_bits()).step_by(20_011).for_each(|bits| check(f32::from_bits(bits)));
        assert_eq!(from_f32(65519.996), INFINITY - 1);
        for x in [65520.0, 65536.0, f32::MAX, f32::INFINITY] {
            check(x);
            assert_eq!(from_f32(x), INFINITY);
        }
    }
}
