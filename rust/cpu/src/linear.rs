//! Linear layers: rows of activations times panels of weights.
//!
//! A tile is a few rows times one panel. It is summed in registers over ascending inputs, with one fused multiply-add for each, so a result
//! does not depend on which rows, or how many, are computed with it. The loops around the tiles keep data that is used again in the caches
//! (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).

mod epilogue;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::ggml;
use crate::pool::Worker;
use crate::quant::{self, QuantRows};
use crate::simd::{Isa, Kernel, Simd};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Element, Matrix, Merge, Panels, Part, Store};
use epilogue::{Finish, Gate, add_bias};

pub use epilogue::Activation;
pub(crate) use epilogue::{Epilogue, softcap};

/// Maximum inputs that are summed before the next panel. A panel's slice of this depth stays in the L2 cache together with the slice of the
/// rows.
const DEPTH: usize = 1024;
/// Maximum rows that use a panel's slice while it is in the cache.
const GROUP: usize = 128;
/// Minimum number of tiles for which panels of 16-bit weights are expanded to fp32 once for all tiles, and not within each tile.
const EXPANDED: usize = 3;
/// Inputs that are expanded to fp32 at once for a single tile. The slices of two panels of this depth stay in the L1 cache.
const SHALLOW: usize = 128;
/// Maximum panels that a thread takes at once.
const STRIP: usize = 4;

/// A linear layer.
#[derive(Debug)]
pub struct Linear {
    pub(crate) matrix: Matrix,
    /// One bias for each row of the matrix. In a gated matrix, the gate's biases come first.
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Creates a layer with the weights of `matrix` and, optionally, a `bias` for each of its rows. In a gated matrix, the gate's biases
    /// come first. Panics if the number of biases differs from the number of rows.
    pub fn new(matrix: Matrix, bias: Option<&[f32]>) -> Self {
        let rows: usize = matrix.parts.iter().map(|part| part.rows).sum();
        assert!(bias.is_none_or(|bias| bias.len() == rows), "a bias for each row");
        Self { matrix, bias: bias.map(<[f32]>::to_vec) }
    }

    /// Returns the weights, for a matrix whose rows are read as embeddings.
    pub fn into_matrix(self) -> Matrix {
        self.matrix
    }
}

/// Splits rows into as few tiles as possible, with sizes as equal as possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tiling {
    rows: usize,
    tiles: usize,
}

impl Tiling {
    pub(crate) fn new(isa: Isa, rows: usize) -> Self {
        Self { rows, tiles: rows.div_ceil(isa.rows()) }
    }

    pub(crate) fn tiles(self) -> usize {
        self.tiles
    }

    /// The rows of a tile.
    #[inline(always)]
    pub(crate) fn range(self, tile: usize) -> Range<usize> {
        let (each, more) = (self.rows / self.tiles, self.rows % self.tiles);
        let start = tile * each + tile.min(more);
        start..start + each + usize::from(tile < more)
    }
}

/// Packed rows of activations: fp32 numbers, [inputs][rows of the tile] for each tile, or 8-bit blocks.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    floats: AlignedVec<f32>,
    quant: QuantRows,
}

/// The packed rows of one call.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    tiling: Tiling,
    floats: UnsafeSlice<'a, f32>,
    quant: quant::SharedRows<'a>,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    row: Vec<f32>,
    expanded: AlignedVec<f32>,
    sums: AlignedVec<f32>,
}

impl Rows {
    /// Allocates room for `rows` rows of `ins` inputs.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        self.floats.reserve(rows * ins);
        self.quant.reserve(isa, rows, ins);
    }

    /// Returns a view for a call with `rows` rows.
    pub(crate) fn packed(&mut self, isa: Isa, rows: usize) -> Packed<'_> {
        Packed { tiling: Tiling::new(isa, rows), floats: self.floats.shared(), quant: self.quant.shared() }
    }
}

impl Packed<'_> {
    /// Packs rows for `layer`. `fill` gets the index of a row and writes it. This is one phase of the thread pool: every worker must call
    /// it.
    pub(crate) fn pack(
        self,
        worker: &mut Worker<'_>,
        isa: Isa,
        layer: &Linear,
        scratch: &mut Scratch,
        mut fill: impl FnMut(usize, &mut [f32]),
    ) {
        let ins = layer.matrix.ins;
        scratch.row.resize(ins, 0.0);
        let row = &mut scratch.row;
        worker.parallel_for(self.tiling.tiles(), |tile| {
            let range = self.tiling.range(tile);
            let height = range.len();
            for m in range.clone() {
                fill(m, row);
                if let Store::Int8(_) = layer.matrix.parts[0].store {
                    // SAFETY: one index of the loop writes each tile.
                    unsafe { self.quant.pack(isa, range.clone(), m, row) };
                    continue;
                }
                // SAFETY: one index of the loop writes each tile.
                let to = unsafe { self.floats.write(range.start * ins, height * ins) };
                for (to, &x) in to[m - range.start..].iter_mut().step_by(height).zip(&*row) {
                    *to = x;
                }
            }
        });
    }

    /// Multiplies the packed rows by the layer's weights, adds its bias, and applies `epilogue` to the results. Row m goes to
    /// `out[m * stride..]`. This is one phase of the thread pool: every worker must call it.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn multiply(
        self,
        worker: &mut Worker<'_>,
        isa: Isa,
        layer: &Linear,
        out: UnsafeSlice<'_, f32>,
        stride: usize,
        epilogue: Epilogue,
        scratch: &mut Scratch,
    ) {
        let Linear { matrix, bias } = layer;
        let width = isa.panel();
        let group = (GROUP / isa.rows()).max(1);
        let groups = self.tiling.tiles().div_ceil(group);
        let strips = Strips::new(matrix, isa, groups, worker.size());
        worker.parallel_for(strips.count * groups, |piece| {
            let first = piece / strips.count * group;
            let tiles = first..(first + group).min(self.tiling.tiles());
            let rows = self.tiling.range(tiles.start).start..self.tiling.range(tiles.end - 1).end;
            scratch.sums.reserve(STRIP * (GROUP + isa.rows()) * width);
            let (part, first_row, panels) = strips.find(piece % strips.count);
            let size = panels.len() * rows.len() * width;
            let of = |row: usize, count: usize| bias.as_ref().map(|bias| &bias[row..row + count]);
            let (sums, ups) = scratch.sums.split_at_mut(size);
            self.sum_part(isa, &matrix.parts[part], matrix.ins, panels.clone(), tiles.clone(), sums, &mut scratch.expanded);
            if let Epilogue::Gate(_) = epilogue {
                self.sum_part(isa, &matrix.parts[1], matrix.ins, panels.clone(), tiles, ups, &mut scratch.expanded);
            }
            for (i, panel) in panels.enumerate() {
                let column = panel * width;
                let count = width.min(matrix.parts[part].rows - column);
                for m in rows.clone() {
                    let at = (i * rows.len() + m - rows.start) * width;
                    // SAFETY: one index of the loop writes the columns of a panel in each row.
                    let out = unsafe { out.write(m * stride + first_row + column, count) };
                    let sums = &mut sums[at..at + width];
                    if let Epilogue::Gate(activation) = epilogue {
                        let biases = [of(column, count), of(matrix.outs + column, count)];
                        isa.run(Gate { gates: sums, ups: &mut ups[at..at + width], biases, activation, out });
                    } else {
                        add_bias(sums, of(first_row + column, count));
                        isa.run(Finish { sums, out, epilogue });
                    }
                }
            }
        });
    }

    /// Sums some panels of a tensor for some tiles. Writes the result to `sums`, [panels][rows][width].
    #[allow(clippy::too_many_arguments)]
    fn sum_part(
        self,
        isa: Isa,
        part: &Part,
        ins: usize,
        panels: Range<usize>,
        tiles: Range<usize>,
        sums: &mut [f32],
        expanded: &mut AlignedVec<f32>,
    ) {
        let width = isa.panel();
        let first = self.tiling.range(tiles.start).start;
        let rows = self.tiling.range(tiles.end - 1).end - first;
        match &part.store {
            Store::F32(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
            Store::F16(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
            Store::Bf16(numbers) => self.sum_numbers(isa, numbers, panels, tiles, sums, expanded),
            Store::Blocks(blocks) if tiles.len() == 1 && ggml::fused_rows(isa, rows) => {
                // SAFETY: an earlier phase packed these rows, and no thread writes them now.
                let a = unsafe { self.floats.read(first * ins, rows * ins) };
                for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows * width)) {
                    ggml::multiply(isa, blocks, panel, rows, a, sums);
                }
            }
            Store::Blocks(blocks) => {
                let expand = |panel, inputs: Range<usize>, to: &mut [f32]| ggml::expand(isa, blocks, panel, inputs, to);
                self.sum_expanded(isa, (ins, blocks.unit_inputs()), expand, panels, tiles, sums, expanded);
            }
            Store::Int8(weights) => {
                for tile in tiles {
                    let range = self.tiling.range(tile);
                    for (i, panel) in panels.clone().enumerate() {
                        let at = (i * rows + range.start - first) * width;
                        let sums = &mut sums[at..at + range.len() * width];
                        // SAFETY: an earlier phase packed these rows, and no thread writes them now.
                        unsafe { quant::tile(isa, weights, panel, self.quant, range.clone(), sums) };
                    }
                }
            }
        }
    }

    fn sum_numbers<E: Element>(
        self,
        isa: Isa,
        panels: &Panels<E>,
        part: Range<usize>,
        tiles: Range<usize>,
        sums: &mut [f32],
        expanded: &mut AlignedVec<f32>,
    ) {
        let (width, ins) = (panels.width, panels.ins);
        if size_of::<E>() < size_of::<f32>() && tiles.len() >= EXPANDED {
            let expand = |panel, inputs: Range<usize>, to: &mut [f32]| {
                isa.run(Expand { from: &panels.panel(panel)[inputs.start * width..inputs.end * width], to });
            };
            return self.sum_expanded(isa, (ins, BLOCK), expand, part, tiles, sums, expanded);
        }
        for inputs in pieces(ins, BLOCK, DEPTH) {
            let b = &panels.panel(part.start)[inputs.start * width..];
            self.sum(isa, ins, inputs, tiles.clone(), b, part.len(), ins * width, sums);
        }
    }

    /// Sums panels that `expand` converts to fp32. `expand` gets a panel and a range of its inputs, which is a multiple of `unit`.
    #[allow(clippy::too_many_arguments)]
    fn sum_expanded(
        self,
        isa: Isa,
        (ins, unit): (usize, usize),
        expand: impl Fn(usize, Range<usize>, &mut [f32]),
        part: Range<usize>,
        tiles: Range<usize>,
        all_sums: &mut [f32],
        expanded: &mut AlignedVec<f32>,
    ) {
        let width = isa.panel();
        let rows = self.tiling.range(tiles.end - 1).end - self.tiling.range(tiles.start).start;
        // Expanded weights that a single tile uses need to stay in the L1 cache only. Two panels, because a single row multiplies two
        // panels at once.
        let (depth, together) = if tiles.len() == 1 { (SHALLOW.max(unit), 2) } else { (DEPTH, STRIP) };
        expanded.reserve(together * depth * width);
        for start in part.clone().step_by(together) {
            let panels = start..part.end.min(start + together);
            let sums = &mut all_sums[(start - part.start) * rows * width..];
            for inputs in pieces(ins, unit, depth) {
                let size = inputs.len() * width;
                for (panel, to) in panels.clone().zip(expanded.chunks_exact_mut(size)) {
                    expand(panel, inputs.clone(), to);
                }
                self.sum(isa, ins, inputs, tiles.clone(), expanded, panels.len(), size, sums);
            }
        }
    }

    /// Adds the products of `inputs` to the sums of `count` panels `b`. Each panel starts `apart` numbers after the previous one.
    #[allow(clippy::too_many_arguments)]
    fn sum<E: Element>(
        self,
        isa: Isa,
        ins: usize,
        inputs: Range<usize>,
        tiles: Range<usize>,
        b: &[E],
        count: usize,
        apart: usize,
        sums: &mut [f32],
    ) {
        let width = isa.panel();
        let rows = self.tiling.range(tiles.start).start..self.tiling.range(tiles.end - 1).end;
        for tile in tiles {
            let range = self.tiling.range(tile);
            let height = range.len();
            // SAFETY: an earlier phase packed these rows, and no thread writes them now.
            let a = unsafe { self.floats.read(range.start * ins + inputs.start * height, inputs.len() * height) };
            let sums = &mut sums[(range.start - rows.start) * width..];
            isa.run(Sum { height, a, b, count, b_apart: apart, sums, sums_apart: rows.len() * width, fresh: inputs.start == 0 });
        }
    }
}

/// Splits a matrix's panels into strips. A strip has panels of one tensor. In a gated matrix, it has the same panels of both tensors.
struct Strips<'a> {
    matrix: &'a Matrix,
    isa: Isa,
    /// Maximum panels of a strip.
    each: usize,
    count: usize,
}

impl<'a> Strips<'a> {
    /// Chooses strips that are small enough for the cache, and enough of them for all threads.
    fn new(matrix: &'a Matrix, isa: Isa, groups: usize, threads: usize) -> Self {
        let panels: usize = matrix.parts.iter().map(|part| part.panels(isa)).sum();
        let panels_at_once = if matrix.merge == Merge::Gated { 2 } else { 1 };
        let each = (panels * groups / (4 * threads)).clamp(panels_at_once, STRIP) / panels_at_once;
        let tensors = matrix.parts.len() / panels_at_once;
        let count = matrix.parts[..tensors].iter().map(|part| part.panels(isa).div_ceil(each)).sum();
        Self { matrix, isa, each, count }
    }

    /// A strip's tensor, the tensor's first row, and the strip's panels.
    fn find(&self, mut strip: usize) -> (usize, usize, Range<usize>) {
        let mut first_row = 0;
        for (index, part) in self.matrix.parts.iter().enumerate() {
            let panels = part.panels(self.isa);
            let strips = panels.div_ceil(self.each);
            if strip < strips {
                return (index, first_row, strip * self.each..panels.min((strip + 1) * self.each));
            }
            strip -= strips;
            first_row += part.rows;
        }
        unreachable!("strips are counted by the same rule")
    }
}

/// Splits inputs into equal pieces of at most `depth`. Each piece is a multiple of `unit`.
fn pieces(ins: usize, unit: usize, depth: usize) -> impl Iterator<Item = Range<usize>> {
    let each = ins.div_ceil(ins.div_ceil(depth)).next_multiple_of(unit).min(depth);
    (0..ins).step_by(each).map(move |start| start..ins.min(start + each))
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
            ($($height:literal)*) => {
                match (self.height, S::VECTORS) {
                    $(($height, 2) => if $height <= S::ROWS { self.panels::<S, $height, 2>(s) },
                      ($height, 4) => if $height <= S::ROWS && S::VECTORS == 4 { self.panels::<S, $height, 4>(s) },)*
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
        while R == 1 && panel + 2 <= self.count {
            // SAFETY: the lengths are asserted above.
            unsafe { tile::<S, E, R, V, 2>(s, depth, a, b.add(panel * apart.0), sums.add(panel * apart.1), apart, self.fresh) };
            panel += 2;
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
