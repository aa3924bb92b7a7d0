//! A linear layer's weights, packed in panels. A panel has the columns that a tile computes together side by side.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::{BLOCK, BlockType};
use crate::ggml::{BlockPanels, CodeOrder, WordOrder, expand_rounded};
use crate::half;
use crate::pod::Pod;
use crate::pool::ThreadPool;
use crate::quant::QuantWeights;
use crate::simd::{Isa, Simd, TILE};
use crate::tensor::{Numbers, ReadError, RowReader, Source, Stack, Tensor};

/// Storage format of a matrix's weights, and the arithmetic of their products: fp32, but for `Int16`, `Rounded` and `Int8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// fp32.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// The checkpoint's format, for each tensor of a matrix separately: fp32, 16 bits, or ggml's blocks.
    Kept,
    /// The checkpoint's format, as `Kept`. Where products are those of bytes or of matrix tiles, activations are rounded to 16 bits: with
    /// blocks to integers times a power of two for each 32 of them, otherwise to two bfloat16 numbers.
    Int16,
    /// The checkpoint's blocks, or bfloat16. Weights and activations are rounded to bfloat16 and multiplied by matrix tiles. Only for
    /// instruction sets that have them ([`Isa::has_tiles`]).
    Rounded,
    /// 8-bit integers, or 4-bit integers if the checkpoint has them, in blocks of 32 with a scale each. They are multiplied by activations
    /// that are quantised to 8-bit integers.
    Int8,
}

/// How the rows of several tensors are merged to one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// The rows of one tensor follow those of the previous one.
    Stacked,
    /// Two tensors of the same shape: `gate_proj` and `up_proj`.
    Gated,
}

/// The reason why weights cannot be packed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PackError {
    /// A weight does not fit half precision, whose largest number is 65504.
    #[error("a weight of {0:e} does not fit float16: use float32 or bfloat16")]
    Overflow(f32),
    /// The length of a tensor in memory does not match its shape.
    #[error("{rows} rows of {ins} numbers are {expected} bytes, not {found}")]
    Shape {
        /// Number of rows in the shape.
        rows: usize,
        /// Number of columns in the shape.
        ins: usize,
        /// Expected length in bytes.
        expected: usize,
        /// Actual length in bytes.
        found: usize,
    },
    /// A matrix has no inputs.
    #[error("the tensors of a matrix have no inputs")]
    Empty,
    /// The tensors of a matrix have different numbers of inputs, or a gated matrix does not have two tensors of the same shape.
    #[error("the tensors of one matrix do not have the same shape")]
    Mismatch,
    /// A ggml type that is not supported without conversion.
    #[error("blocks of ggml type {0}, or rows that are not whole blocks, cannot be used as they are")]
    Blocks(u32),
    /// The file could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// An element of the weights.
pub(crate) trait Element: Pod {
    /// Loads a register of elements as fp32.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F;
    /// Rounds `x` to the nearest element.
    fn from_f32(x: f32) -> Self;
    /// Converts the element to fp32.
    fn to_f32(self) -> f32;
}

/// IEEE half precision.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// bfloat16: the upper half of an fp32.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

// SAFETY: a transparent wrapper of u16.
unsafe impl Pod for F16 {}
// SAFETY: as above.
unsafe impl Pod for Bf16 {}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load(p) }
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load_f16(p.cast()) }
    }
    fn from_f32(x: f32) -> Self {
        Self(half::from_f32(x))
    }
    fn to_f32(self) -> f32 {
        half::to_f32(self.0)
    }
}

impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load_bf16(p.cast()) }
    }
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self {
        Self(half::bf16_from_f32(x))
    }
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// Panels of one element type: [panels][ins][panel width].
#[derive(Debug)]
pub(crate) struct Panels<E> {
    pub(crate) numbers: AlignedVec<E>,
    pub(crate) ins: usize,
    pub(crate) width: usize,
}

impl<E: Element> Panels<E> {
    pub(crate) fn pack(pool: &mut ThreadPool, width: usize, stack: Stack<'_>) -> Result<Self, ReadError> {
        let ins = stack.ins();
        let mut numbers = AlignedVec::zeros(stack.panels(width) * width * ins);
        let shared = numbers.shared();
        stack.for_each_panel(pool, width, |panel, rows: &RowReader<'_>| {
            // SAFETY: each panel is written by one call.
            let out: &mut [E] = unsafe { shared.write(panel * width * ins, width * ins) };
            let mut row = vec![0.0; ins];
            for column in 0..rows.count() {
                stack.numbers().decode(rows.row(column), &mut row);
                for (to, &x) in out[column..].iter_mut().step_by(width).zip(&row) {
                    *to = E::from_f32(x);
                }
            }
        })?;
        Ok(Self { numbers, ins, width })
    }

    /// The numbers from this panel on.
    pub(crate) fn panel(&self, panel: usize) -> &[E] {
        &self.numbers[panel * self.width * self.ins..]
    }

    fn read_column(&self, column: usize, out: &mut [f32]) {
        let panel = &self.numbers[column / self.width * self.width * self.ins..];
        for (x, packed) in out.iter_mut().zip(panel[column % self.width..].iter().step_by(self.width)) {
            *x = packed.to_f32();
        }
    }
}

/// Weights whose products matrix tiles sum in bfloat16.
#[derive(Debug)]
pub(crate) enum TilePanels {
    /// bfloat16 numbers.
    Numbers(PairPanels),
    /// ggml's blocks. The weights are rounded to bfloat16 before each product.
    Blocks(BlockPanels),
}

impl TilePanels {
    /// Number of inputs.
    pub(crate) fn ins(&self) -> usize {
        match self {
            Self::Numbers(panels) => panels.ins,
            Self::Blocks(panels) => panels.ins(),
        }
    }

    /// Weights are expanded in multiples of this number of inputs.
    pub(crate) fn unit_inputs(&self) -> usize {
        match self {
            Self::Numbers(_) => BLOCK,
            Self::Blocks(panels) => panels.unit_inputs(),
        }
    }

    /// The pairs of some inputs of a panel, \[blocks of 32 inputs\]\[columns\]\[16 pairs\], as they are stored, or written to `to`.
    pub(crate) fn expand<'a>(&'a self, isa: Isa, panel: usize, inputs: Range<usize>, to: &'a mut [u32]) -> &'a [u32] {
        match self {
            Self::Numbers(panels) => panels.pairs(panel, &inputs),
            Self::Blocks(panels) => {
                let to = &mut to[..inputs.len() / 2 * isa.panel()];
                expand_rounded(isa, panels, panel, inputs, to);
                to
            }
        }
    }

    fn read_column(&self, column: usize, out: &mut [f32]) {
        match self {
            Self::Numbers(panels) => panels.read_column(column, out),
            Self::Blocks(panels) => panels.read_column(column, out),
        }
    }
}

/// Pairs of bfloat16 weights, \[panels\]\[blocks of 32 inputs\]\[columns\]\[16 pairs\].
#[derive(Debug)]
pub(crate) struct PairPanels {
    pairs: AlignedVec<u32>,
    ins: usize,
    width: usize,
}

impl PairPanels {
    fn pack(pool: &mut ThreadPool, width: usize, stack: Stack<'_>) -> Result<Self, ReadError> {
        let ins = stack.ins();
        let mut panels = Self { pairs: AlignedVec::zeros(stack.panels(width) * width * ins / 2), ins, width };
        let size = width * ins / 2;
        let shared = panels.pairs.shared();
        stack.for_each_panel(pool, width, |panel, rows: &RowReader<'_>| {
            // SAFETY: each panel is written by one call.
            let out = unsafe { shared.write(panel * size, size) };
            let mut row = vec![0.0; ins];
            for column in 0..rows.count() {
                stack.numbers().decode(rows.row(column), &mut row);
                for (block, numbers) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let to = &mut out[(block * width + column) * BLOCK / 2..][..BLOCK / 2];
                    for (to, pair) in to.iter_mut().zip(numbers.as_chunks::<2>().0) {
                        let [low, high] = pair.map(|x| u32::from(Bf16::from_f32(x).0));
                        *to = low | high << 16;
                    }
                }
            }
        })?;
        Ok(panels)
    }

    /// The pairs of some inputs of a panel. The inputs start and end at multiples of 32.
    fn pairs(&self, panel: usize, inputs: &Range<usize>) -> &[u32] {
        let at = |input: usize| (panel * self.ins + input) * self.width / 2;
        &self.pairs[at(inputs.start)..at(inputs.end)]
    }

    fn read_column(&self, column: usize, out: &mut [f32]) {
        let panel = self.pairs(column / self.width, &(0..self.ins));
        for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let from = &panel[(block * self.width + column % self.width) * BLOCK / 2..];
            for (out, pair) in out.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *out = [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)];
            }
        }
    }
}

/// The weights [outs, ins] of a linear layer, or those of all experts of a mixture.
#[derive(Debug)]
pub struct Matrix {
    /// One part for each tensor. Each has its own panels, so the formats can differ.
    pub(crate) parts: Vec<Part>,
    /// Number of experts; 1 for an ordinary layer.
    pub(crate) count: usize,
    pub(crate) ins: usize,
    /// Number of outputs. For a gated matrix, the number after the gate is applied.
    pub(crate) outs: usize,
    pub(crate) merge: Merge,
    /// The instruction set that the panels are packed for.
    pub(crate) isa: Isa,
}

/// The weights of one tensor, or of one tensor of each expert.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) store: Store,
    /// Number of rows of one tensor.
    pub(crate) rows: usize,
}

/// The panels, by the arithmetic of their products.
#[derive(Debug)]
pub(crate) enum Store {
    /// Products in fp32, in vector registers.
    Float(FloatPanels),
    /// Products of fp32 rows in three pieces, by matrix tiles.
    Pieces(TilePanels),
    /// As `Pieces`, with rows in two pieces.
    TwoPieces(TilePanels),
    /// Products of rows rounded to bfloat16, by matrix tiles.
    Rounded(TilePanels),
    /// The codes of blocks by the three digits of fp32 rows: products of bytes, or of matrix tiles for many rows.
    Digits(BlockPanels),
    /// As `Digits`, with rows in two digits.
    TwoDigits(BlockPanels),
    /// Products of integers.
    Int8(QuantWeights),
}

/// Panels of weights that are multiplied by fp32 rows, by storage format.
#[derive(Debug)]
pub(crate) enum FloatPanels {
    F32(Panels<f32>),
    F16(Panels<F16>),
    Bf16(Panels<Bf16>),
    Blocks(BlockPanels),
}

impl FloatPanels {
    fn read_column(&self, column: usize, out: &mut [f32]) {
        match self {
            Self::F32(panels) => panels.read_column(column, out),
            Self::F16(panels) => panels.read_column(column, out),
            Self::Bf16(panels) => panels.read_column(column, out),
            Self::Blocks(panels) => panels.read_column(column, out),
        }
    }
}

impl Part {
    fn pack(pool: &mut ThreadPool, isa: Isa, stack: Stack<'_>, dtype: DType) -> Result<Self, PackError> {
        let (width, ins, rows) = (isa.panel(), stack.ins(), stack.rows());
        // Small codes are not rounded: tiles would need another layout of them.
        let small = stack.numbers().blocks().is_some_and(BlockType::is_small);
        let dtype = if dtype == DType::Rounded && small { DType::Kept } else { dtype };
        let panels = match (dtype, stack.numbers()) {
            (DType::Int8, _) => {
                return Ok(Self { store: Store::Int8(QuantWeights::pack(pool, isa, stack)?), rows });
            }
            (DType::F32, _) | (DType::Kept | DType::Int16, Numbers::F32) => FloatPanels::F32(Panels::pack(pool, width, stack)?),
            (DType::Bf16, _) | (DType::Kept | DType::Int16, Numbers::Bf16) if isa.has_tiles() && ins.is_multiple_of(BLOCK) => {
                let panels = TilePanels::Numbers(PairPanels::pack(pool, width, stack)?);
                let store = if dtype == DType::Int16 { Store::TwoPieces(panels) } else { Store::Pieces(panels) };
                return Ok(Self { store, rows });
            }
            (DType::Rounded, numbers) if isa.has_tiles() && ins.is_multiple_of(BLOCK) => {
                let panels = match numbers.blocks() {
                    Some(kind) => TilePanels::Blocks(BlockPanels::pack(pool, isa, stack, kind, CodeOrder::Columns)?),
                    None => TilePanels::Numbers(PairPanels::pack(pool, width, stack)?),
                };
                return Ok(Self { store: Store::Rounded(panels), rows });
            }
            (DType::Bf16 | DType::Rounded, _) | (DType::Kept | DType::Int16, Numbers::Bf16) => {
                FloatPanels::Bf16(Panels::pack(pool, width, stack)?)
            }
            (DType::Kept | DType::Int16, Numbers::F16) => FloatPanels::F16(Panels::pack(pool, width, stack)?),
            (DType::F16, _) => {
                let panels = Panels::<F16>::pack(pool, width, stack)?;
                if panels.numbers.iter().any(|x| x.to_f32().is_infinite()) {
                    // Packs again in fp32 to find the weight that overflows.
                    let numbers = Panels::<f32>::pack(pool, width, stack)?.numbers;
                    let largest = numbers.iter().copied().find(|&x| F16::from_f32(x).to_f32().is_infinite());
                    return Err(PackError::Overflow(largest.unwrap_or(f32::INFINITY)));
                }
                FloatPanels::F16(panels)
            }
            (DType::Kept | DType::Int16, Numbers::Ggml(number)) => {
                let kind = stack.numbers().blocks().ok_or(PackError::Blocks(number))?;
                let order = if isa.has_digits() { WordOrder::Bytes } else { WordOrder::Bits };
                let panels = BlockPanels::pack(pool, isa, stack, kind, CodeOrder::Words(order))?;
                if isa.has_digits() {
                    let store = if dtype == DType::Int16 { Store::TwoDigits(panels) } else { Store::Digits(panels) };
                    return Ok(Self { store, rows });
                }
                FloatPanels::Blocks(panels)
            }
        };
        Ok(Self { store: Store::Float(panels), rows })
    }

    /// Number of panels of one tensor.
    pub(crate) fn panels(&self, isa: Isa) -> usize {
        self.rows.div_ceil(isa.panel())
    }

    pub(crate) fn read_row(&self, row: usize, to: &mut [f32]) {
        match &self.store {
            Store::Float(panels) => panels.read_column(row, to),
            Store::Pieces(panels) | Store::TwoPieces(panels) | Store::Rounded(panels) => panels.read_column(row, to),
            Store::Digits(panels) | Store::TwoDigits(panels) => panels.read_column(row, to),
            Store::Int8(panels) => panels.read_row(row, to),
        }
    }
}

/// Checks that a tensor's bytes match its shape.
pub(crate) fn check_bytes(tensor: &Tensor<'_>) -> Result<(), PackError> {
    let &Tensor { numbers, rows, ins, source, .. } = tensor;
    let Some(row) = numbers.row_bytes(ins) else {
        return Err(PackError::Blocks(if let Numbers::Ggml(number) = numbers { number } else { 0 }));
    };
    match source {
        Source::Memory(bytes) if bytes.len() != rows * row => Err(PackError::Shape { rows, ins, expected: rows * row, found: bytes.len() }),
        _ => Ok(()),
    }
}

impl Matrix {
    /// Packs tensors with the same number of inputs. Each of `tensors` has one tensor, or for a mixture one of every expert, in the
    /// experts' order. All threads of the pool read tensors that are in files.
    pub fn pack(pool: &mut ThreadPool, isa: Isa, tensors: &[&[Tensor<'_>]], merge: Merge, dtype: DType) -> Result<Self, PackError> {
        let stacks: Option<Vec<_>> = tensors.iter().map(|tensors| Stack::new(tensors)).collect();
        let stacks = stacks.ok_or(PackError::Mismatch)?;
        let Some(first) = stacks.first() else { return Err(PackError::Mismatch) };
        let (ins, count) = (first.ins(), first.tensors().len());
        if ins == 0 {
            return Err(PackError::Empty);
        }
        let rows: usize = stacks.iter().map(|stack| stack.rows()).sum();
        let equal = stacks.iter().all(|stack| stack.ins() == ins && stack.tensors().len() == count);
        if !equal || (merge == Merge::Gated && (stacks.len() != 2 || stacks[0].rows() != stacks[1].rows())) {
            return Err(PackError::Mismatch);
        }
        let mut parts = Vec::new();
        for stack in stacks {
            for tensor in stack.tensors() {
                check_bytes(tensor)?;
                let head = tensor.interleaved;
                if !head.is_multiple_of(2) || (head > 0 && !tensor.rows.is_multiple_of(head)) {
                    return Err(PackError::Mismatch);
                }
            }
            parts.push(Part::pack(pool, isa, stack, dtype)?);
        }
        let outs = if merge == Merge::Gated { rows / 2 } else { rows };
        Ok(Self { parts, count, ins, outs, merge, isa })
    }

    /// First column of tensor `part` in rows that have whole panels for each tensor. The column after the last tensor is their width.
    pub(crate) fn panel_column(&self, part: usize) -> usize {
        self.parts[..part].iter().map(|part| part.panels(self.isa) * self.isa.panel()).sum()
    }

    /// Reads row `out` of the matrix, as an embedding. The matrix must not be gated or have experts.
    pub(crate) fn read_row(&self, out: usize, to: &mut [f32]) {
        let mut row = out;
        for part in &self.parts {
            if row < part.rows {
                return part.read_row(row, to);
            }
            row -= part.rows;
        }
        panic!("there is no row {out}");
    }

    /// Maximum rows of a tile of activations for this matrix.
    pub(crate) fn tile_rows(&self) -> usize {
        let in_vectors = |part: &Part| matches!(part.store, Store::Float(_) | Store::Int8(_));
        if self.parts.iter().any(in_vectors) { self.isa.rows() } else { TILE }
    }

    /// Whether this is one matrix of this shape, packed for `isa`.
    pub(crate) fn is(&self, isa: Isa, outs: usize, ins: usize, merge: Merge) -> bool {
        self.is_of(1, isa, outs, ins, merge)
    }

    /// Whether there are `count` matrices of this shape, packed for `isa`.
    pub(crate) fn is_of(&self, count: usize, isa: Isa, outs: usize, ins: usize, merge: Merge) -> bool {
        (self.count, self.isa, self.outs, self.ins, self.merge) == (count, isa, outs, ins, merge)
    }
}
