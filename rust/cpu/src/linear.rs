//! Linear layers: rows of activations times panels of weights.
//!
//! A layer's work is cut into panels of weights and tiles of rows. The products are summed by the [`Gemm`] of the weights' format.

mod digits;
mod epilogue;
mod floats;
mod pieces;
#[cfg(test)]
mod tests;

use std::mem::discriminant;
use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::gemm::{self, GROUP, Gemm, RowGroup, STRIP, Tiles};
use crate::lora::Deltas;
use crate::pool::Worker;
use crate::quant::{QuantRows, SharedRows};
use crate::simd::{Isa, prefetch_to_write};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Matrix, Merge, Part, Store};
use digits::{DigitRows, SharedDigits};
use epilogue::Finish;
use floats::{FloatRows, SharedFloats};
use pieces::{PieceRows, SharedPieces};

pub use epilogue::Activation;
pub(crate) use epilogue::{Activate, Epilogue, softcap};

/// A linear layer.
#[derive(Debug)]
pub struct Linear {
    pub(crate) matrix: Matrix,
    /// One bias for each row of the matrix, or of each expert's matrix. In a gated matrix, the gate's biases come first.
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Creates a layer with the weights of `matrix` and, optionally, a `bias` for each of its rows, expert by expert. In a gated matrix,
    /// the gate's biases come first. Panics if the number of biases differs from the number of rows.
    pub fn new(matrix: Matrix, bias: Option<&[f32]>) -> Self {
        let layer = Self { matrix, bias: bias.map(<[f32]>::to_vec) };
        assert!(bias.is_none_or(|bias| bias.len() == layer.matrix.count * layer.rows()), "a bias for each row");
        layer
    }

    /// Number of rows of one expert's tensors, or of all tensors of an ordinary layer.
    fn rows(&self) -> usize {
        self.matrix.parts.iter().map(|part| part.rows).sum()
    }

    /// Returns the weights, for a matrix whose rows are read as embeddings.
    pub fn into_matrix(self) -> Matrix {
        self.matrix
    }
}

/// Rows of activations, packed for the arithmetic of a layer's weights.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    groups: Vec<RowGroup>,
    floats: FloatRows,
    pieces: PieceRows<3>,
    two_pieces: PieceRows<2>,
    rounded: PieceRows<1>,
    digits: DigitRows<3>,
    two_digits: DigitRows<2>,
    quant: QuantRows,
}

/// The packed rows of one call.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    groups: &'a [RowGroup],
    floats: SharedFloats<'a>,
    pieces: SharedPieces<'a, 3>,
    two_pieces: SharedPieces<'a, 2>,
    rounded: SharedPieces<'a, 1>,
    digits: SharedDigits<'a, 3>,
    two_digits: SharedDigits<'a, 2>,
    quant: SharedRows<'a>,
    deltas: Option<Deltas<'a>>,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    row: Vec<f32>,
    tiles: Vec<Range<usize>>,
    gemm: gemm::Scratch,
    sums: AlignedVec<f32>,
}

impl Rows {
    /// Allocates room for `rows` rows of each layer's inputs, of which about `together` are multiplied by one matrix.
    pub(crate) fn reserve<'l>(&mut self, isa: Isa, rows: usize, together: usize, layers: impl IntoIterator<Item = &'l Linear>) {
        for Matrix { parts, ins, .. } in layers.into_iter().map(|layer| &layer.matrix) {
            for part in parts {
                match part.store {
                    Store::Float(_) => self.floats.reserve(rows, *ins),
                    Store::Pieces(_) => self.pieces.reserve(rows, *ins),
                    Store::TwoPieces(_) => self.two_pieces.reserve(rows, *ins),
                    Store::Rounded(_) => self.rounded.reserve(rows, *ins),
                    Store::Digits(_) => self.digits.reserve(isa, rows, together, *ins),
                    Store::TwoDigits(_) => self.two_digits.reserve(isa, rows, together, *ins),
                    Store::Int8(_) => self.quant.reserve(isa, rows, *ins),
                }
            }
        }
    }

    /// Returns a view for a call with `rows` rows, of which about `together` are multiplied by one matrix.
    pub(crate) fn packed(&mut self, isa: Isa, rows: usize, together: usize) -> Packed<'_> {
        self.groups.clear();
        self.groups.extend(RowGroup::split(0, 0..rows));
        Packed {
            groups: &self.groups,
            floats: self.floats.shared(),
            pieces: self.pieces.shared(),
            two_pieces: self.two_pieces.shared(),
            rounded: self.rounded.shared(),
            digits: self.digits.shared(isa, together),
            two_digits: self.two_digits.shared(isa, together),
            quant: self.quant.shared(),
            deltas: None,
        }
    }
}

/// Calls a method of the rows for the arithmetic of a store.
macro_rules! by_store {
    ($rows:expr, $store:expr, $weights:pat => $method:ident($($argument:expr),*)) => {
        match $store {
            Store::Float($weights) => $rows.floats.$method($($argument),*),
            Store::Pieces($weights) => $rows.pieces.$method($($argument),*),
            Store::TwoPieces($weights) => $rows.two_pieces.$method($($argument),*),
            Store::Rounded($weights) => $rows.rounded.$method($($argument),*),
            Store::Digits($weights) => $rows.digits.$method($($argument),*),
            Store::TwoDigits($weights) => $rows.two_digits.$method($($argument),*),
            Store::Int8($weights) => $rows.quant.$method($($argument),*),
        }
    };
}

impl<'a> Packed<'a> {
    /// The same rows. `multiply` adds the updates `deltas` to their products.
    pub(crate) fn with(self, deltas: Option<Deltas<'a>>) -> Self {
        Self { deltas, ..self }
    }

    /// The same rows, of which those of each group are multiplied by its matrix.
    pub(crate) fn grouped<'b>(self, groups: &'b [RowGroup]) -> Packed<'b>
    where
        'a: 'b,
    {
        Packed { groups, ..self }
    }

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
        let Matrix { parts, ins, .. } = &layer.matrix;
        let ins = *ins;
        scratch.row.resize(ins, 0.0);
        let row = &mut scratch.row;
        scratch.tiles.clear();
        scratch.tiles.extend(self.groups.iter().flat_map(|group| group.tiles(layer.matrix.tile_rows()).each()));
        // Parts of one kind read the same rows.
        let is_first = |part: usize| parts[..part].iter().all(|other| discriminant(&other.store) != discriminant(&parts[part].store));
        let stores = || (0..parts.len()).filter(|&part| is_first(part)).map(|part| &parts[part].store);
        worker.parallel_for(scratch.tiles.len(), |tile| {
            let tile = scratch.tiles[tile].clone();
            for m in tile.clone() {
                fill(m, row);
                for store in stores() {
                    // SAFETY: one index of the loop writes each tile.
                    unsafe { by_store!(self, store, _ => pack(isa, tile.clone(), m, row)) };
                }
            }
            for store in stores() {
                // SAFETY: as above.
                unsafe { by_store!(self, store, _ => seal(isa, &tile, ins)) };
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
        let tile_rows = matrix.tile_rows();
        let strips = Strips::new(matrix, isa, self.groups.len(), worker.size());
        worker.parallel_for(strips.count * self.groups.len(), |piece| {
            let group = &self.groups[piece / strips.count];
            let (tiles, rows) = (group.tiles(tile_rows), group.rows.clone());
            scratch.sums.reserve(STRIP * GROUP * width);
            let (part, first_row, panels) = strips.find(piece % strips.count);
            let size = panels.len() * rows.len() * width;
            let first_bias = group.matrix * layer.rows();
            let of = |row: usize, count: usize| bias.as_ref().map(|bias| &bias[first_bias + row..][..count]);
            for row in rows.clone() {
                let to = out.pointer(row * stride + first_row + panels.start * width, 0);
                prefetch_to_write(to.cast(), panels.len() * width * size_of::<f32>());
            }
            let (sums, ups) = scratch.sums.split_at_mut(size);
            let sum = |part: &Part, sums: &mut [f32], scratch: &mut gemm::Scratch| {
                let first = group.matrix * part.panels(isa);
                self.sum(isa, part, first + panels.start..first + panels.end, &tiles, sums, scratch);
            };
            sum(&matrix.parts[part], sums, &mut scratch.gemm);
            if let Epilogue::Gate(_) = epilogue {
                sum(&matrix.parts[1], ups, &mut scratch.gemm);
            }
            for (i, panel) in panels.enumerate() {
                let column = panel * width;
                let count = width.min(matrix.parts[part].rows - column);
                let of_panel = i * rows.len() * width..(i + 1) * rows.len() * width;
                let sums = &mut sums[of_panel.clone()];
                let (ups, biases) = if let Epilogue::Gate(_) = epilogue {
                    (&mut ups[of_panel], [of(column, count), of(matrix.outs + column, count)])
                } else {
                    (&mut [][..], [of(first_row + column, count), None])
                };
                if let Some(deltas) = self.deltas {
                    for (row, sums) in rows.clone().zip(sums.chunks_exact_mut(width)) {
                        deltas.add(row, part, column, sums);
                    }
                    for (row, ups) in rows.clone().zip(ups.chunks_exact_mut(width)) {
                        deltas.add(row, 1, column, ups);
                    }
                }
                let first = rows.start * stride + first_row + column;
                isa.run(Finish { sums, ups, biases, epilogue, out, first, stride, count });
            }
        });
    }

    /// Sums some panels of a tensor for some tiles. Writes the result to `sums`, \[panels\]\[rows\]\[columns of a panel\].
    fn sum(self, isa: Isa, part: &Part, panels: Range<usize>, tiles: &Tiles, sums: &mut [f32], scratch: &mut gemm::Scratch) {
        // SAFETY: an earlier phase packed these rows, and no thread writes them now.
        unsafe { by_store!(self, &part.store, weights => multiply(isa, weights, panels, tiles, sums, scratch)) }
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
