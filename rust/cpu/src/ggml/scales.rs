//! The scales and shifts of a unit.

use std::mem::MaybeUninit;

use super::decode::{V, WIDTH};
use super::panels::Unit;
use crate::block_type::{BlockType, ScaleKind};
use crate::simd::Int8;

/// Maximum number of scale groups in a unit.
pub(super) const GROUPS: usize = 16;

/// Scales and shifts of a unit in fp32, \[groups\]\[columns\].
#[repr(align(64))]
pub(super) struct Scales {
    // Not zeroed: that took 3 % of the time of an expert's short panels.
    factors: MaybeUninit<[f32; GROUPS * WIDTH]>,
    shifts: MaybeUninit<[f32; GROUPS * WIDTH]>,
}

impl Scales {
    /// Room for scales and shifts. [`Scales::fill`] writes those of a unit.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { factors: MaybeUninit::uninit(), shifts: MaybeUninit::uninit() }
    }

    #[inline(always)]
    pub(super) fn factors(&self) -> *const f32 {
        self.factors.as_ptr().cast()
    }

    #[inline(always)]
    pub(super) fn shifts(&self) -> *const f32 {
        self.shifts.as_ptr().cast()
    }

    #[inline(always)]
    pub(super) fn shifts_mut(&mut self) -> *mut f32 {
        self.shifts.as_mut_ptr().cast()
    }

    /// Reads the scales and shifts of a unit.
    #[inline(always)]
    pub(super) unsafe fn fill<S: Int8, const V: usize>(&mut self, s: S, kind: BlockType, unit: Unit, from: &[u8], groups: usize) {
        let width = V * S::LANES;
        assert!(from.len() >= unit.bytes && groups <= GROUPS && width <= WIDTH);
        let from = from.as_ptr();
        let (factors, shifts) = (self.factors.as_mut_ptr().cast::<f32>(), self.shifts_mut());
        for column in (0..width).step_by(S::LANES) {
            // SAFETY: as asserted. The unit's layout has room for all numbers of each kind.
            unsafe {
                let scale = from.add(2 * column).cast::<u16>();
                let second = from.add(unit.second + 2 * column).cast::<u16>();
                let none = s.splat(-0.0);
                match kind.scale_kind() {
                    ScaleKind::Half => {
                        s.store(factors.add(column), s.load_f16(scale));
                        s.store(shifts.add(column), none);
                    }
                    ScaleKind::Bf16 => {
                        s.store(factors.add(column), s.load_bf16(scale));
                        s.store(shifts.add(column), none);
                    }
                    ScaleKind::HalfShift => {
                        s.store(factors.add(column), s.load_f16(scale));
                        s.store(shifts.add(column), s.load_f16(second));
                    }
                    ScaleKind::ScaleMin => {
                        // Factors have 6 bits, so their signed and unsigned values are equal.
                        let (scale, minimum) = (s.load_f16(scale), s.load_f16(second));
                        let negative = s.mul(minimum, s.splat(-1.0));
                        for g in 0..groups {
                            let at = g * width + column;
                            s.store(factors.add(at), s.mul(scale, s.load_i8(from.add(unit.scales + at).cast())));
                            s.store(shifts.add(at), s.mul(negative, s.load_i8(from.add(unit.mins + at).cast())));
                        }
                    }
                    ScaleKind::Nibbles => {
                        let (scale, minimum) = (s.load_f16(scale), s.load_f16(second));
                        let negative = s.mul(minimum, s.splat(-1.0));
                        for g in 0..groups {
                            let at = g * width + column;
                            let word = s.words(from.add(unit.scales + 4 * (g / 4 * width + column)));
                            let shift = 8 * (g % 4) as i32;
                            s.store(factors.add(at), s.mul(scale, s.to_f32(s.field(word, shift, 15))));
                            s.store(shifts.add(at), s.mul(negative, s.to_f32(s.field(word, shift + 4, 15))));
                        }
                    }
                    ScaleKind::Signed => {
                        let scale = s.load_f16(scale);
                        for g in 0..groups {
                            let at = g * width + column;
                            s.store(factors.add(at), s.mul(scale, s.load_i8(from.add(unit.scales + at).cast())));
                            s.store(shifts.add(at), none);
                        }
                    }
                    ScaleKind::Odd(grid) => {
                        let scale = s.mul(s.load_f16(scale), s.splat(grid.unit()));
                        let each = grid.group() / kind.group();
                        for g in 0..groups {
                            let (at, stored) = (g * width + column, g / each);
                            let word = s.words(from.add(unit.scales + 4 * (stored / 8 * width + column)));
                            let number = s.to_f32(s.or(s.field(word, 4 * (stored % 8) as i32 - 1, 30), s.splat_i32(1)));
                            s.store(factors.add(at), s.mul(scale, number));
                            s.store(shifts.add(at), none);
                        }
                    }
                }
            }
        }
    }

    /// Loads the scales and shifts of a panel's columns, which are filled.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    pub(super) unsafe fn load<S: Int8>(&self, s: S, at: usize) -> [(S::F, S::F); V] {
        assert!(at + V * S::LANES <= GROUPS * WIDTH);
        let mut scales = [(s.splat(0.0), s.splat(0.0)); V];
        for v in 0..V {
            let at = at + v * S::LANES;
            // SAFETY: asserted above, and the caller guarantees that they are filled.
            scales[v] = unsafe { (s.load(self.factors().add(at)), s.load(self.shifts().add(at))) };
        }
        scales
    }

    /// Subtracts `offset` times its scale from each of the first `count` shifts, which are filled.
    #[inline(always)]
    pub(super) unsafe fn subtract<S: Int8>(&mut self, s: S, offset: f32, count: usize) {
        assert!(count <= GROUPS * WIDTH && count.is_multiple_of(S::LANES));
        if offset == 0.0 {
            return;
        }
        for at in (0..count).step_by(S::LANES) {
            let (factors, shifts) = (self.factors(), self.shifts_mut());
            // SAFETY: asserted above, and the caller guarantees that they are filled.
            unsafe { s.store(shifts.add(at), s.fma(s.load(factors.add(at)), s.splat(-offset), s.load(shifts.add(at)))) }
        }
    }
}
