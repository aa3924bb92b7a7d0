//! `LoRA` adapters: low-rank updates of linear layers, chosen row by row.
//!
//! An adapter adds `B (A x) * scale` to a layer's product with the row x (Hu et al., 2021). The rows of a step are grouped by adapter
//! (S-LoRA, Punica), and a group is computed a few rows at a time. Each sum has one order, which depends only on the shapes of A and B, so
//! a row's result has the same bits in every step.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::pool::{ThreadPool, Worker};
use crate::simd::{Isa, Kernel, Simd};
use crate::tensor::{Numbers, Tensor};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Bf16, Element, F16, Matrix, PackError, Panels, check_bytes};

/// Rows of A in a panel.
const PANEL: usize = 16;
/// Maximum rows that are computed at once. Their accumulators fit the registers of every instruction set.
const ROWS: usize = 4;

/// The update of one tensor, as in a file: `a` [rank, ins], `b` [outs, rank], and the factor of their product.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The first matrix.
    pub a: Tensor<'a>,
    /// The second matrix.
    pub b: Tensor<'a>,
    /// Factor of the product: alpha / rank, or alpha / sqrt(rank).
    pub scale: f32,
}

/// The updates of a decoder's linear layers.
#[derive(Debug)]
pub struct Adapter {
    /// For each block, the updates of its first and second linear layer.
    blocks: Vec<[LowRank; 2]>,
}

/// The updates of one linear layer.
#[derive(Debug, Default)]
pub struct LowRank {
    /// One entry for each tensor of the layer's matrix. Empty if no tensor is updated.
    parts: Vec<Option<Factors>>,
}

/// The packed update of one tensor.
#[derive(Debug)]
struct Factors {
    pair: Pair,
    rank: usize,
    ins: usize,
    outs: usize,
    scale: f32,
    isa: Isa,
}

/// A and B in panels, in the format of the file.
#[derive(Debug)]
enum Pair {
    F32(Panels<f32>, Panels<f32>),
    F16(Panels<F16>, Panels<F16>),
    Bf16(Panels<Bf16>, Panels<Bf16>),
}

impl Adapter {
    /// Creates an adapter. `blocks` has, for each block of the decoder, the updates of `qkv_proj` and `o_proj`, or of `gate_up_proj` and
    /// `down_proj`.
    pub fn new(blocks: Vec<[LowRank; 2]>) -> Self {
        Self { blocks }
    }

    /// Whether the updates fit the layers of the decoder's blocks. `None`: a block without layers that can be updated.
    pub(crate) fn fits<'a>(&self, blocks: impl ExactSizeIterator<Item = Option<[&'a Matrix; 2]>>) -> bool {
        let fits = |(layers, matrices): (&[LowRank; 2], Option<[&Matrix; 2]>)| match matrices {
            Some(matrices) => layers.iter().zip(matrices).all(|(layer, matrix)| layer.fits(matrix)),
            None => layers.iter().all(|layer| layer.parts.is_empty()),
        };
        self.blocks.len() == blocks.len() && self.blocks.iter().zip(blocks).all(fits)
    }
}

impl LowRank {
    /// Packs the updates of a layer's tensors: one entry for each tensor. The two matrices of an update must have the same number format,
    /// without blocks.
    pub fn pack(pool: &mut ThreadPool, isa: Isa, updates: &[Option<Update<'_>>]) -> Result<Self, PackError> {
        let mut parts = Vec::new();
        for update in updates {
            parts.push(update.as_ref().map(|update| Factors::pack(pool, isa, update)).transpose()?);
        }
        Ok(if parts.iter().any(Option::is_some) { Self { parts } } else { Self::default() })
    }

    fn fits(&self, matrix: &Matrix) -> bool {
        let fits = |(factors, rows): (&Option<Factors>, usize)| {
            factors.as_ref().is_none_or(|factors| (factors.isa, factors.ins, factors.outs) == (matrix.isa, matrix.ins, rows))
        };
        let rows = matrix.parts.iter().map(|part| part.rows);
        self.parts.is_empty() || (self.parts.len() == matrix.parts.len() && self.parts.iter().zip(rows).all(fits))
    }
}

impl Factors {
    fn pack(pool: &mut ThreadPool, isa: Isa, update: &Update<'_>) -> Result<Self, PackError> {
        let Update { a, b, scale } = update;
        let (rank, ins, outs) = (a.rows, a.ins, b.rows);
        if b.ins != rank || rank == 0 || a.numbers != b.numbers {
            return Err(PackError::Mismatch);
        }
        check_bytes(a)?;
        check_bytes(b)?;
        let pair = match a.numbers {
            Numbers::F32 => Pair::F32(Panels::pack(pool, PANEL, a.into())?, Panels::pack(pool, isa.panel(), b.into())?),
            Numbers::F16 => Pair::F16(Panels::pack(pool, PANEL, a.into())?, Panels::pack(pool, isa.panel(), b.into())?),
            Numbers::Bf16 => Pair::Bf16(Panels::pack(pool, PANEL, a.into())?, Panels::pack(pool, isa.panel(), b.into())?),
            Numbers::Ggml(number) => return Err(PackError::Blocks(number)),
        };
        Ok(Self { pair, rank, ins, outs, scale: *scale, isa })
    }
}

/// Buffers that are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    inputs: AlignedVec<f32>,
    deltas: AlignedVec<f32>,
}

/// Per-thread scratch memory: A x of some rows.
pub(crate) type Scratch = AlignedVec<f32>;

/// The rows of a step that have adapters.
#[derive(Debug)]
pub(crate) struct AdaptedRows<'a> {
    /// The adapter of each row of the step.
    adapters: Vec<Option<&'a Adapter>>,
    /// Rows with an adapter, those with the same adapter side by side.
    rows: Vec<usize>,
    /// Ranges of `rows` with one adapter, each at most [`ROWS`] long.
    groups: Vec<(&'a Adapter, Range<usize>)>,
    /// Inputs of the current layer, \[rows\]\[ins\].
    inputs: UnsafeSlice<'a, f32>,
    /// Updates of the current layer's outputs, \[rows\]\[panels of all tensors\].
    deltas: UnsafeSlice<'a, f32>,
}

impl<'a> AdaptedRows<'a> {
    /// Groups rows by adapter, in pieces for `threads` threads. `numbers` has each row's adapter: 0 for none, i for `adapters[i - 1]`. `ins`
    /// and `outs` are the largest numbers of inputs and of outputs of a layer, with whole panels for each tensor. Returns `None` if no row
    /// has an adapter.
    pub(crate) fn new(
        numbers: &[usize],
        adapters: &'a [Option<Adapter>],
        threads: usize,
        (ins, outs): (usize, usize),
        buffers: &'a mut Buffers,
    ) -> Option<Self> {
        let mut rows: Vec<_> = (0..numbers.len()).filter(|&row| numbers[row] > 0).collect();
        if rows.is_empty() {
            return None;
        }
        rows.sort_by_key(|&row| numbers[row]);
        let adapter = |number: usize| number.checked_sub(1).and_then(|index| adapters[index].as_ref());
        let mut groups = Vec::new();
        let mut start = 0;
        for run in rows.chunk_by(|&a, &b| numbers[a] == numbers[b]) {
            let pieces = run.len().div_ceil(ROWS).next_multiple_of(threads).min(run.len());
            for piece in 0..pieces {
                let range = start + run.len() * piece / pieces..start + run.len() * (piece + 1) / pieces;
                groups.push((adapter(numbers[run[0]]).expect("Step::check knows the adapters"), range));
            }
            start += run.len();
        }
        let Buffers { inputs, deltas } = buffers;
        inputs.reserve(numbers.len() * ins);
        deltas.reserve(numbers.len() * outs);
        let adapters = numbers.iter().map(|&number| adapter(number)).collect();
        Some(Self { adapters, rows, groups, inputs: inputs.shared(), deltas: deltas.shared() })
    }

    /// The updates of the layer with this matrix: the first or second (`layer` 0 or 1) of a block. `None` if no adapter of the step has any.
    pub(crate) fn layer(&'a self, block: usize, layer: usize, matrix: &'a Matrix) -> Option<Deltas<'a>> {
        let updated = self.groups.iter().any(|(adapter, _)| !adapter.blocks[block][layer].parts.is_empty());
        updated.then_some(Deltas { rows: self, block, layer, matrix })
    }
}

/// The updates of one layer's outputs for the rows of a step.
///
/// SAFETY of all blocks below: a phase of the pool writes the inputs, a second one reads them and writes the updates, and a third one reads
/// these. In each, one index writes a row, or the part of a row that belongs to a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deltas<'a> {
    rows: &'a AdaptedRows<'a>,
    block: usize,
    layer: usize,
    matrix: &'a Matrix,
}

impl<'a> Deltas<'a> {
    fn factors(&self, adapter: &'a Adapter, part: usize) -> Option<&'a Factors> {
        adapter.blocks[self.block][self.layer].parts.get(part)?.as_ref()
    }

    /// Keeps the layer's input of a row, if the row has an adapter.
    pub(crate) fn keep(&self, row: usize, x: &[f32]) {
        if self.rows.adapters[row].is_some() {
            // SAFETY: see `Deltas`.
            unsafe { self.rows.inputs.write(row * x.len(), x.len()) }.copy_from_slice(x);
        }
    }

    /// Computes the updates of all rows. This is one phase of the thread pool: every worker must call it.
    pub(crate) fn compute(&self, worker: &mut Worker<'_>, scratch: &mut Scratch) {
        let AdaptedRows { rows, groups, inputs, deltas, .. } = self.rows;
        let Matrix { isa, ins, ref parts, .. } = *self.matrix;
        let stride = self.matrix.panel_column(parts.len());
        worker.parallel_for(groups.len() * parts.len(), |index| {
            let ((adapter, range), part) = (&groups[index / parts.len()], index % parts.len());
            let Some(factors) = self.factors(adapter, part) else { return };
            let (rows, column) = (&rows[range.clone()], self.matrix.panel_column(part));
            let width = self.matrix.panel_column(part + 1) - column;
            scratch.reserve(ROWS * factors.rank.next_multiple_of(PANEL));
            // SAFETY: see `Deltas`.
            let x = |row: usize| unsafe { inputs.read(row * ins, ins) };
            // SAFETY: see `Deltas`.
            let out = |row: usize| unsafe { deltas.write(row * stride + column, width) };
            match &factors.pair {
                Pair::F32(a, b) => isa.run(LowRankProduct { rows, x, a, b, factors, reduced: scratch, out }),
                Pair::F16(a, b) => isa.run(LowRankProduct { rows, x, a, b, factors, reduced: scratch, out }),
                Pair::Bf16(a, b) => isa.run(LowRankProduct { rows, x, a, b, factors, reduced: scratch, out }),
            }
        });
    }

    /// Adds the updates of a row to the sums of a tensor's outputs from `column` on.
    pub(crate) fn add(&self, row: usize, part: usize, column: usize, sums: &mut [f32]) {
        let Some(adapter) = self.rows.adapters[row] else { return };
        if self.factors(adapter, part).is_none() {
            return;
        }
        let start = row * self.matrix.panel_column(self.matrix.parts.len()) + self.matrix.panel_column(part) + column;
        // SAFETY: see `Deltas`.
        let deltas = unsafe { self.rows.deltas.read(start, sums.len()) };
        sums.iter_mut().zip(deltas).for_each(|(sum, delta)| *sum += delta);
    }
}

/// Computes `B (A x) * scale` for up to [`ROWS`] rows. `x` and `out` return a row's inputs and its place for the outputs.
struct LowRankProduct<'a, E, X, Y> {
    rows: &'a [usize],
    x: X,
    a: &'a Panels<E>,
    b: &'a Panels<E>,
    factors: &'a Factors,
    reduced: &'a mut [f32],
    out: Y,
}

impl<'a, E: Element, X: Fn(usize) -> &'a [f32], Y: Fn(usize) -> &'a mut [f32]> Kernel for LowRankProduct<'a, E, X, Y> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        macro_rules! by_rows {
            // Constants, so that versions that would never run are not compiled.
            ($($rows:literal)*) => {
                match (self.rows.len(), S::LANES) {
                    $(($rows, 16) => if const { S::LANES == 16 } { self.multiply::<S, $rows, 1, 4>(s) },
                      ($rows, 8) => if const { S::LANES == 8 } { self.multiply::<S, $rows, 2, 1>(s) },
                      ($rows, 4) => if const { S::LANES == 4 } { self.multiply::<S, $rows, 4, 1>(s) },)*
                    _ => unreachable!("groups have at most as many rows as registers allow"),
                }
            };
        }
        by_rows!(1 2 3 4);
    }
}

impl<'a, E: Element, X: Fn(usize) -> &'a [f32], Y: Fn(usize) -> &'a mut [f32]> LowRankProduct<'a, E, X, Y> {
    /// Multiplies `R` rows. A panel of A has `V` registers. Its inputs are summed in `P` separate sums, so that a single row does not wait
    /// for each addition.
    #[inline(always)]
    fn multiply<S: Simd, const R: usize, const V: usize, const P: usize>(self, s: S) {
        let &Factors { rank, ins, scale, .. } = self.factors;
        let stride = rank.next_multiple_of(PANEL);
        let x: [&[f32]; R] = std::array::from_fn(|r| (self.x)(self.rows[r]));
        assert!(x.iter().all(|x| x.len() == ins) && self.reduced.len() >= R * stride && self.a.numbers.len() == stride * ins);
        for (panel, a) in self.a.numbers.chunks_exact(PANEL * ins).enumerate() {
            // SAFETY: the lengths are asserted above.
            let sums = unsafe { reduce::<S, E, R, V, P>(s, x.map(<[f32]>::as_ptr), a.as_ptr(), ins) };
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    // SAFETY: `V` registers are a panel's width, and the length is asserted above.
                    unsafe { s.store(self.reduced.as_mut_ptr().add(r * stride + panel * PANEL + v * S::LANES), s.mul(sum, s.splat(scale))) }
                }
            }
        }
        let mut out: [&mut [f32]; R] = std::array::from_fn(|r| (self.out)(self.rows[r]));
        let width = S::VECTORS * S::LANES;
        for (panel, b) in self.b.numbers.chunks_exact(rank * width).enumerate() {
            let out: [&mut [f32]; R] = out.each_mut().map(|out| &mut out[panel * width..(panel + 1) * width]);
            let out = out.map(<[f32]>::as_mut_ptr);
            // SAFETY: the lengths are asserted above and by the slices.
            unsafe {
                if const { S::VECTORS == 2 } {
                    expand::<S, E, R, 2>(s, self.reduced.as_ptr(), stride, b.as_ptr(), rank, out);
                } else {
                    expand::<S, E, R, 4>(s, self.reduced.as_ptr(), stride, b.as_ptr(), rank, out);
                }
            }
        }
    }
}

/// Multiplies `R` rows by a panel of A.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn reduce<S: Simd, E: Element, const R: usize, const V: usize, const P: usize>(
    s: S,
    x: [*const f32; R],
    a: *const E,
    ins: usize,
) -> [[S::F; V]; R] {
    let mut sums = [[[s.splat(0.0); V]; R]; P];
    let whole = ins - ins % P;
    // SAFETY: the caller has checked all lengths.
    unsafe {
        for k in (0..whole).step_by(P) {
            for p in 0..P {
                accumulate::<S, E, R, V>(s, x, a, k + p, &mut sums[p]);
            }
        }
        for k in whole..ins {
            accumulate::<S, E, R, V>(s, x, a, k, &mut sums[0]);
        }
    }
    let mut total = sums[0];
    for p in 1..P {
        for r in 0..R {
            for v in 0..V {
                total[r][v] = s.add(total[r][v], sums[p][r][v]);
            }
        }
    }
    total
}

/// Adds the products of input `k` to the sums. Not a closure: a closure might not be inlined into the function with the target features.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn accumulate<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    x: [*const f32; R],
    a: *const E,
    k: usize,
    sums: &mut [[S::F; V]; R],
) {
    // SAFETY: the caller has checked all lengths.
    unsafe {
        for v in 0..V {
            let w = E::load(s, a.add((k * V + v) * S::LANES));
            for r in 0..R {
                sums[r][v] = s.fma(s.splat(*x[r].add(k)), w, sums[r][v]);
            }
        }
    }
}

/// Multiplies `R` rows `reduced` by a panel of B, which has `V` registers.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn expand<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    reduced: *const f32,
    stride: usize,
    b: *const E,
    rank: usize,
    out: [*mut f32; R],
) {
    // SAFETY: the caller has checked all lengths.
    unsafe {
        let mut sums = [[s.splat(0.0); V]; R];
        for j in 0..rank {
            for v in 0..V {
                let w = E::load(s, b.add((j * V + v) * S::LANES));
                for r in 0..R {
                    sums[r][v] = s.fma(s.splat(*reduced.add(r * stride + j)), w, sums[r][v]);
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                s.store(out[r].add(v * S::LANES), sums[r][v]);
            }
        }
    }
}
