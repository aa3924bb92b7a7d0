//! Random numbers that depend only on a seed and a position.

/// A number in [0, 1) for a seed and a position in a sequence, by Philox4x32-10 (Salmon et al., 2011).
///
/// The seed is the key, and the position is the lower half of the counter.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [low, high] = halves(position);
    let [first, second, ..] = philox(halves(seed), [low, high, 0, 0]);
    (((u64::from(first) << 32) | u64::from(second)) >> 11) as f64 * 2f64.powi(-53)
}

/// Four random words from a key and a counter.
fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        let ([low0, high0], [low1, high1]) = (halves(u64::from(c0) * 0xD251_1F53), halves(u64::from(c2) * 0xCD9E_8D57));
        counter = [high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The lower and the upper half of a number.
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_words() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox([0xa409_3822, 0x299f_31d0], pi), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn numbers_are_spread_over_the_interval() {
        let found: Vec<f64> = (0..1000).map(|position| uniform(u64::MAX, position)).collect();
        assert!(found.iter().all(|number| (0.0..1.0).contains(number)));
        assert!((found.iter().sum::<f64>() / 1000.0 - 0.5).abs() < 0.05);
        assert_ne!(uniform(1 << 32, 7).to_bits(), uniform(1, 7).to_bits());
        assert_ne!(uniform(1, 7).to_bits(), uniform(1, 7 << 32).to_bits());
    }
}
