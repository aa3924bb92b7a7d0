//! Products of fp32 rows and weights that become fp32, in vector registers.
//!
//! A tile is a few rows times one panel. It is summed in registers over ascending inputs, with one fused multiply-add for each, so a result
//! does not depend on which rows, or how many, are computed with it. The loops around the tiles keep data that is used again in the caches
//! (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles, slices};
use crate::ggml;
use crate::simd::{Isa, Kernel, Simd};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Element, FloatPanels, Panels};

/// Maximum inputs that are summed before the next panel. A panel's slice of this depth stays in the L2 cache together with the slice of the
/// rows.
const DEPTH: usize = 1024;
/// Panels whose slices are expanded to fp32 together.
const TOGETHER: usize = 4;
/// Minimum number of tiles for which panels of 16-bit weights are expanded to fp32 once for all tiles, and not within each tile.
const EXPANDED: usize = 3;
/// Inputs that are expanded to fp32 at once for a single tile. The slices of two panels of this depth stay in the L1 cache.
const SHALLOW: usize = 128;

/// Rows of fp32 numbers, \[inputs\]\[rows of the tile\] for each tile.
#[derive(Debug, Default)]
pub(crate) struct FloatRows(AlignedVec<f32>);

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedFloats<'a>(UnsafeSlice<'a, f32>);

impl FloatRows {
    /// Allocates room for `rows` rows of `ins` numbers.
    pub(crate) fn reserve(&mut self, rows: usize, ins: usize) {
        self.0.reserve(rows * ins);
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedFloats<'_> {
        SharedFloats(self.0.shared())
    }
}

impl Gemm for SharedFloats<'_> {
    type Weights = FloatPanels;

    unsafe fn pack(self, _: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let (ins, height) = (numbers.len(), tile.len());
        // SAFETY: the caller guarantees it.
        let to = unsafe { self.0.write(tile.start * ins, height * ins) };
        for (to, &x) in to[row - tile.start..].iter_mut().step_by(height).zip(numbers) {
            *to = x;
        }
    }

    unsafe fn multiply(
        self,
        isa: Isa,
        weights: &FloatPanels,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let expanded = &mut scratch.expanded;
        // SAFETY: the caller guarantees it.
        unsafe {
            match weights {
                FloatPanels::F32(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
                FloatPanels::F16(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
                FloatPanels::Bf16(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
                FloatPanels::Blocks(blocks) => {
                    let (rows, ins) = (tiles.rows(), blocks.ins());
                    if tiles.range.len() == 1 && ggml::fused_rows(isa, rows.len()) {
                        let a = self.0.read(rows.start * ins, rows.len() * ins);
                        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * isa.panel())) {
                            ggml::multiply(isa, blocks, panel, rows.len(), a, sums);
                        }
                        return;
                    }
                    let expand = |panel, inputs: Range<usize>, to: &mut [f32]| ggml::expand(isa, blocks, panel, inputs, to);
                    self.sum_expanded(isa, (ins, blocks.unit_inputs()), expand, panels, tiles, sums, expanded);
                }
            }
        }
    }
}

// SAFETY of all blocks below: callers guarantee what `Gemm::multiply` asks for.
#[allow(clippy::undocumented_unsafe_blocks)]
impl SharedFloats<'_> {
    unsafe fn sum_numbers<E: Element>(
        self,
        isa: Isa,
        panels: &Panels<E>,
        part: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        expanded: &mut AlignedVec<f32>,
    ) {
        let (width, ins) = (panels.width, panels.ins);
        if size_of::<E>() < size_of::<f32>() && tiles.range.len() >= EXPANDED {
            let expand = |panel, inputs: Range<usize>, to: &mut [f32]| {
                isa.run(Expand { from: &panels.panel(panel)[inputs.start * width..inputs.end * width], to });
            };
            return unsafe { self.sum_expanded(isa, (ins, BLOCK), expand, part, tiles, sums, expanded) };
        }
        for inputs in slices(ins, BLOCK, DEPTH) {
            let b = &panels.panel(part.start)[inputs.start * width..];
            unsafe { self.sum(isa, ins, inputs, tiles, b, part.len(), ins * width, sums) };
        }
    }

    /// Sums panels that `expand` converts to fp32. `expand` gets a panel and a range of its inputs, which is a multiple of `unit`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn sum_expanded(
        self,
        isa: Isa,
        (ins, unit): (usize, usize),
        expand: impl Fn(usize, Range<usize>, &mut [f32]),
        part: Range<usize>,
        tiles: &Tiles,
        all_sums: &mut [f32],
        expanded: &mut AlignedVec<f32>,
    ) {
        let (width, rows) = (isa.panel(), tiles.rows().len());
        // Expanded weights that a single tile uses need to stay in the L1 cache only. Two panels, because a single row multiplies two
        // panels at once.
        let (depth, together) = if tiles.range.len() == 1 { (SHALLOW.max(unit), 2) } else { (DEPTH, TOGETHER) };
        expanded.reserve(together * depth * width);
        for start in part.clone().step_by(together) {
            let panels = start..part.end.min(start + together);
            let sums = &mut all_sums[(start - part.start) * rows * width..];
            for inputs in slices(ins, unit, depth) {
                let size = inputs.len() * width;
                for (panel, to) in panels.clone().zip(expanded.chunks_exact_mut(size)) {
                    expand(panel, inputs.clone(), to);
                }
                unsafe { self.sum(isa, ins, inputs, tiles, expanded, panels.len(), size, sums) };
            }
        }
    }

    /// Adds the products of `inputs` to the sums of `count` panels `b`. Each panel starts `apart` numbers after the previous one.
    #[allow(clippy::too_many_arguments)]
    unsafe fn sum<E: Element>(
        self,
        isa: Isa,
        ins: usize,
        inputs: Range<usize>,
        tiles: &Tiles,
        b: &[E],
        count: usize,
        apart: usize,
        sums: &mut [f32],
    ) {
        let (width, rows) = (isa.panel(), tiles.rows());
        for range in tiles.each() {
            let height = range.len();
            let a = unsafe { self.0.read(range.start * ins + inputs.start * height, inputs.len() * height) };
            let sums = &mut sums[(range.start - rows.start) * width..];
            isa.run(Sum { height, a, b, count, b_apart: apart, sums, sums_apart: rows.len() * width, fresh: inputs.start == 0 });
        }
    }
}

/// Converts numbers to fp32.
struct Expand<'a, E> {
    from: &'a [E],
    to: &'a mut [f32],
}

impl<E: Element> Kernel for Expand<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.from.len() >= self.to.len() && self.to.len().is_multiple_of(S::LANES));
        for at in (0..self.to.len()).step_by(S::LANES) {
            // SAFETY: both slices have at least `S::LANES` numbers from `at` on.
            unsafe { s.store(self.to.as_mut_ptr().add(at), E::load(s, self.from.as_ptr().add(at))) }
        }
    }
}

/// Multiplies `height` rows `a` [depth][height] by `count` panels `b` [depth][width]. Each panel starts `b_apart` numbers after the
/// previous one. The results go to `sums` [height][width]. Each panel's sums start `sums_apart` numbers after the previous ones. If `fresh`
/// is false, the results are added to the existing sums.
struct Sum<'a, E> {
    height: usize,
    a: &'a [f32],
    b: &'a [E],
    count: usize,
    b_apart: usize,
    sums: &'a mut [f32],
    sums_apart: usize,
    fresh: bool,
}

impl<E: Element> Kernel for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        macro_rules! by_height {
            // Constants, so that versions that would never run are not compiled.
            ($($height:literal)*) => {
                match (self.height, S::VECTORS) {
                    $(($height, 2) => if const { $height <= S::ROWS } { self.panels::<S, $height, 2>(s) },
                      ($height, 4) => if const { $height <= S::ROWS && S::VECTORS == 4 } { self.panels::<S, $height, 4>(s) },)*
                    _ => unreachable!("tiles have at most as many rows as registers allow"),
                }
            };
        }
        by_height!(1 2 3 4 5 6 7 8 9 10 11 12 13);
    }
}

impl<E: Element> Sum<'_, E> {
    #[inline(always)]
    fn panels<S: Simd, const R: usize, const V: usize>(self, s: S) {
        let width = V * S::LANES;
        let depth = self.a.len() / R;
        assert!(self.b.len() >= (self.count - 1) * self.b_apart + depth * width);
        assert!(self.sums.len() >= (self.count - 1) * self.sums_apart + R * width);
        let (a, b, sums) = (self.a.as_ptr(), self.b.as_ptr(), self.sums.as_mut_ptr());
        let apart = (self.b_apart, self.sums_apart);
        let mut panel = 0;
        // A single row has too few accumulators to hide the latency of the additions. Two panels at once have enough.
        if const { R == 1 } {
            while panel + 2 <= self.count {
                // SAFETY: the lengths are asserted above.
                unsafe { tile::<S, E, R, V, 2>(s, depth, a, b.add(panel * apart.0), sums.add(panel * apart.1), apart, self.fresh) };
                panel += 2;
            }
        }
        while panel < self.count {
            // SAFETY: the lengths are asserted above.
            unsafe { tile::<S, E, R, V, 1>(s, depth, a, b.add(panel * apart.0), sums.add(panel * apart.1), apart, self.fresh) };
            panel += 1;
        }
    }
}

/// Sums `P` panels, each `V` registers wide, for `R` rows in registers.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const V: usize, const P: usize>(
    s: S,
    depth: usize,
    a: *const f32,
    b: *const E,
    sums: *mut f32,
    (b_apart, sums_apart): (usize, usize),
    fresh: bool,
) {
    // SAFETY: the caller has checked all lengths.
    unsafe {
        let mut acc = [[[s.splat(0.0); V]; R]; P];
        if !fresh {
            for p in 0..P {
                for r in 0..R {
                    for v in 0..V {
                        acc[p][r][v] = s.load(sums.add(p * sums_apart + (r * V + v) * S::LANES));
                    }
                }
            }
        }
        for k in 0..depth {
            for p in 0..P {
                let mut w = [s.splat(0.0); V];
                for v in 0..V {
                    w[v] = E::load(s, b.add(p * b_apart + (k * V + v) * S::LANES));
                }
                for r in 0..R {
                    let x = s.splat(*a.add(k * R + r));
                    for v in 0..V {
                        acc[p][r][v] = s.fma(x, w[v], acc[p][r][v]);
                    }
                }
            }
        }
        for p in 0..P {
            for r in 0..R {
                for v in 0..V {
                    s.store(sums.add(p * sums_apart + (r * V + v) * S::LANES), acc[p][r][v]);
                }
            }
        }
    }
}
