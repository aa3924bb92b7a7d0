//! Attention of a step's tokens over the KV cache.

use std::marker::PhantomData;
use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::cache::{Bf16Pair, Cell, KvDType, Pages};
use crate::linear::softcap;
use crate::simd::{Isa, Kernel, PairTiles, Simd};
use crate::unsafe_slice::UnsafeSlice;

mod plan;
#[cfg(test)]
mod tests;
mod tile;
mod tiled;
mod vectors;

use plan::Task;
pub(crate) use plan::{Plan, Sequences};
use tile::Tile;
use vectors::{MICRO, VECTORS, Weighted, most_rows, multiply, powers, products};

/// Keys per tile. Tiles start at multiples of this number, whatever the query's position.
const TILE: usize = 64;

/// Per-thread scratch memory for [`Attention::attend`].
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// \[rows\]\[head dim\]: queries times the scale, as factors of the cache's cells.
    query: AlignedVec<f32>,
    /// \[rows\]\[value dim, padded\]: sums of the values, weighted by the exponentials.
    sums: AlignedVec<f32>,
    /// \[rows\]\[lanes\]: sums of the exponentials, by position modulo lanes.
    weights: AlignedVec<f32>,
    /// \[rows\]: what is subtracted from the scores before the exponential.
    bases: AlignedVec<f32>,
    /// \[rows\]: the positions that the row attends to.
    seen: Vec<Range<usize>>,
    /// \[head dim, padded\]\[TILE\]: gathered keys, in the cache's format, or in fp32 (see [`Attend::widens`]). Used when the block size is
    /// not a multiple of the lanes, and for keys that are values too.
    keys: AlignedVec<i32>,
    /// \[2\]\[value dim, padded\]: the values of the tile's first and last pair of tokens without the tokens that are not visible.
    edges: AlignedVec<u32>,
    /// \[TILE / 2\]\[value dim, padded\]: gathered pairs of values, for matrix tiles.
    values: AlignedVec<u32>,
    /// Scores of some rows, and of the next ones, for matrix tiles.
    scores: AlignedVec<f32>,
}

/// Attention in one layer: scaled dot products, softmax, weighted sum of the values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) pages: Pages<'a>,
    pub(crate) layer: usize,
    /// Sliding window: how many tokens a token attends to, including itself. `None`: all tokens.
    pub(crate) window: Option<usize>,
    /// Factor of the dot products of queries and keys.
    pub(crate) scale: f32,
    /// The cap c if a score x is replaced by `c * tanh(x / c)`.
    pub(crate) softcap: Option<f32>,
    /// For each head, the score of a token without a value that all tokens attend to.
    pub(crate) sinks: Option<&'a [f32]>,
    /// The query of a token's head, \[head dim\], begins at `token * stride + head * head_stride`.
    pub(crate) query: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) head_stride: usize,
    /// \[tokens\]\[heads\]\[value dim\].
    pub(crate) out: UnsafeSlice<'a, f32>,
}

impl Attention<'_> {
    /// Runs the plan's task with this index.
    ///
    /// The softmax is online (Milakov and Gimelshein, 2018), over tiles at fixed positions. The operations for a query, and their order,
    /// depend only on its position, the window and the shape of the heads. Tiles that several sequences share are read once for the
    /// queries of all of them, before each sequence's own tiles (Hydragen: Juravsky et al., 2024).
    ///
    /// # Safety
    ///
    /// Each task runs on one thread. Meanwhile no other thread reads `out` or writes the pages. All keys and values that the queries attend
    /// to have been written.
    pub(crate) unsafe fn attend(&self, isa: Isa, task: usize, scratch: &mut Scratch) {
        let task = self.plan.task(task);
        match self.pages.dtype {
            KvDType::F32 => isa.run(Attend::<f32> { isa, of: self, task, scratch, cell: PhantomData }),
            KvDType::F16 => isa.run(Attend::<u16> { isa, of: self, task, scratch, cell: PhantomData }),
            KvDType::Bf16 => isa.run_bf16(Attend::<Bf16Pair> { isa, of: self, task, scratch, cell: PhantomData }),
            KvDType::Int8 => isa.run(Attend::<i8> { isa, of: self, task, scratch, cell: PhantomData }),
        }
    }

    /// The positions that the token at `position` of a sequence attends to.
    #[inline(always)]
    fn seen(&self, position: usize) -> Range<usize> {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
    }
}

/// A task with the type of the cache's cells.
struct Attend<'a, C> {
    isa: Isa,
    of: &'a Attention<'a>,
    task: Task<'a>,
    scratch: &'a mut Scratch,
    cell: PhantomData<C>,
}

impl<C: Cell> Kernel for Attend<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.begin(s);
        let mut tile = Tile::new();
        // SAFETY: a task uses tiles in no other way.
        let mut tiles = self.tiled().then(|| unsafe { PairTiles::begin(self.isa) });
        // First the tiles that all sequences share, then those of each sequence.
        let (parts, shared) = (self.task.parts, self.task.shared);
        let mut end = 0;
        for i in usize::from(shared == 0)..=parts.len() {
            let part = &parts[i.saturating_sub(1)];
            let (tokens, rows) = if i == 0 {
                (0..shared, 0..self.scratch.seen.len())
            } else {
                (shared..usize::MAX, end..end + part.queries * self.of.plan.group())
            };
            end = if i == 0 { 0 } else { rows.end };
            self.scan(s, &mut tile, &mut tiles, part.sequence, tokens, rows);
        }
        if let Some(tiles) = tiles {
            // SAFETY: as above.
            unsafe { tiles.end() };
        }
        self.end(s);
    }
}

impl<C: Cell> Attend<'_, C> {
    /// Clears the accumulators and copies the scaled queries.
    #[inline(always)]
    fn begin<S: Simd>(&mut self, s: S) {
        let (plan, head_dim) = (self.of.plan, self.of.pages.shape.head_dim);
        let (group, padded) = (plan.group(), self.of.pages.padded_value());
        let rows = self.task.parts.iter().map(|part| part.queries).sum::<usize>() * group;
        let tiled = self.tiled();
        let Scratch { query, sums, weights, bases, seen, keys, edges, values, scores } = &mut *self.scratch;
        query.reserve(rows * head_dim);
        sums.reserve(rows * padded);
        sums[..rows * padded].fill(0.0);
        weights.reserve(rows * S::LANES);
        weights[..rows * S::LANES].fill(0.0);
        bases.reserve(rows);
        bases[..rows].fill(f32::NEG_INFINITY);
        keys.reserve(self.of.pages.padded() * TILE);
        edges.reserve(2 * padded);
        if tiled {
            values.reserve(TILE / 2 * padded);
            scores.reserve(tiled::SCORES);
        }
        seen.clear();
        let mut queries = query.chunks_exact_mut(head_dim);
        for part in self.task.parts {
            let (first, position) = (plan.first_token(part), plan.position(part));
            for i in 0..part.queries {
                for (head, query) in (self.task.kv_head * group..).zip(queries.by_ref().take(group)) {
                    let from = &self.of.query[(first + i) * self.of.stride + head * self.of.head_stride..][..head_dim];
                    for (to, from) in query.iter_mut().zip(from) {
                        *to = from * self.of.scale;
                    }
                    C::factors(s, query);
                    seen.push(self.of.seen(position + i));
                }
            }
        }
        if let Some(sinks) = self.of.sinks {
            let sinks = &sinks[self.task.kv_head * group..][..group];
            bases[..rows].iter_mut().zip(sinks.iter().cycle()).for_each(|(base, &sink)| *base = sink);
            // Each sink's exponential relative to the base.
            weights[..rows * S::LANES].iter_mut().step_by(S::LANES).for_each(|weight| *weight = 1.0);
        }
    }

    /// Processes the tiles of `sequence` that start within `within`, for some rows.
    #[inline(always)]
    fn scan<S: Simd>(
        &mut self,
        s: S,
        tile: &mut Tile<C>,
        tiles: &mut Option<PairTiles>,
        sequence: usize,
        within: Range<usize>,
        rows: Range<usize>,
    ) {
        let seen = union(&self.scratch.seen[rows.clone()]);
        let seen = seen.start.max(within.start)..seen.end.min(within.end);
        let most = most_rows::<S>();
        for start in (seen.start / TILE * TILE..seen.end).step_by(TILE) {
            tile.start = start;
            tile.tokens = seen.start.max(start) - start..seen.end.min(start + TILE) - start;
            self.fill(s, tile, sequence);
            if let Some(tiles) = tiles.as_mut() {
                self.gather_values(s, tile);
                // SAFETY: nothing else uses tiles before `end`.
                unsafe { self.look_tiled(s, tile, &rows, tiles) };
                continue;
            }
            let mut row = rows.start;
            while row < rows.end {
                let count = match most.min(rows.end - row) {
                    6.. => 6,
                    3.. => 3,
                    _ => 1,
                };
                self.look(s, tile, row..row + count);
                row += count;
            }
        }
    }

    /// The tile's tokens that at least one of the rows attends to. Empty if there are none.
    #[inline(always)]
    fn visible(&self, tile: &Tile<C>, rows: &Range<usize>) -> Range<usize> {
        let seen = union(&self.scratch.seen[rows.clone()]);
        tile.tokens.start.max(seen.start.saturating_sub(tile.start))..tile.tokens.end.min(seen.end.saturating_sub(tile.start))
    }

    /// Processes 1, 3 or 6 rows of the tile. Returns at once if they attend to none of its tokens.
    #[inline(always)]
    fn look<S: Simd>(&mut self, s: S, tile: &Tile<C>, rows: Range<usize>) {
        let tokens = self.visible(tile, &rows);
        if tokens.is_empty() {
            return;
        }
        // Pairs of registers become registers of pairs.
        let vectors = tokens.start / S::LANES / C::NUMBERS * C::NUMBERS..tokens.end.div_ceil(S::LANES).next_multiple_of(C::NUMBERS);
        let mut scores = [[0.0; TILE]; MICRO];
        let mut factors = [[0.0; 16]; MICRO];
        // SAFETY: `begin` sized the scratch memory for all rows, and `fill` set the tile's pointers for all of its tokens.
        unsafe {
            for v in (vectors.start / VECTORS * VECTORS..vectors.end).step_by(VECTORS) {
                let keys: [_; VECTORS] = std::array::from_fn(|i| tile.keys[v + i]);
                let scores = scores.each_mut().map(|scores| scores.as_mut_ptr().add(v * S::LANES));
                if self.widens() {
                    self.multiply_keys::<S, f32>(s, &rows, keys.map(<*const C>::cast), tile.step, scores);
                } else {
                    self.multiply_keys(s, &rows, keys, tile.step, scores);
                }
            }
            for (r, row) in rows.clone().enumerate() {
                let factor = self.weigh(s, tile, row, vectors.clone(), &mut scores[r]);
                s.store(factors[r].as_mut_ptr(), factor.unwrap_or(s.splat(1.0)));
            }
            let padded = self.of.pages.padded_value();
            let sums = self.scratch.sums.as_mut_ptr().add(rows.start * padded);
            let cells = tokens.start / C::NUMBERS..tokens.end.div_ceil(C::NUMBERS);
            let weighted = Weighted { weights: &scores, cells, values: &tile.values, factors: &factors, sums, padded };
            let mut d = 0;
            while d < padded {
                let wide = padded - d >= VECTORS * S::LANES;
                match (rows.len(), wide) {
                    (6, true) if most_rows::<S>() >= 6 => weighted.add::<S, 6, VECTORS>(s, d),
                    (3, true) if most_rows::<S>() >= 3 => weighted.add::<S, 3, VECTORS>(s, d),
                    (_, true) => weighted.add::<S, 1, VECTORS>(s, d),
                    (6, false) if most_rows::<S>() >= 6 => weighted.add::<S, 6, 1>(s, d),
                    (3, false) if most_rows::<S>() >= 3 => weighted.add::<S, 3, 1>(s, d),
                    (_, false) => weighted.add::<S, 1, 1>(s, d),
                }
                d += if wide { VECTORS * S::LANES } else { S::LANES };
            }
        }
    }

    /// Computes the scores of 1, 3 or 6 rows and of the keys in [`VECTORS`] registers.
    ///
    /// # Safety
    ///
    /// The keys have the dimensions of a head, `step` cells apart, and each row has room for the scores.
    #[inline(always)]
    unsafe fn multiply_keys<S: Simd, K: Cell>(
        &self,
        s: S,
        rows: &Range<usize>,
        keys: [*const K; VECTORS],
        step: usize,
        scores: [*mut f32; MICRO],
    ) {
        let head_dim = self.of.pages.shape.head_dim;
        // SAFETY: the caller guarantees it. `begin` sized the scratch memory for all rows.
        unsafe {
            let query = self.scratch.query.as_ptr().add(rows.start * head_dim);
            match rows.len() {
                6 if most_rows::<S>() >= 6 => products::<S, K, 6>(s, query, head_dim, keys, step, scores),
                3 if most_rows::<S>() >= 3 => products::<S, K, 3>(s, query, head_dim, keys, step, scores),
                _ => products::<S, K, 1>(s, query, head_dim, keys, step, scores),
            }
        }
    }

    /// Replaces a row's scores in some registers by its weights, as factors of the values' cells. Returns the factor that rescales older sums, if it
    /// is not 1.
    ///
    /// # Safety
    ///
    /// `begin` has sized the scratch memory for this row.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&mut self, s: S, tile: &Tile<C>, row: usize, vectors: Range<usize>, scores: &mut [f32; TILE]) -> Option<S::F> {
        let lanes = vectors.start * S::LANES..vectors.end * S::LANES;
        if C::SCALED {
            multiply(s, scores, &tile.key_scales, vectors.clone());
        }
        if let Some(cap) = self.of.softcap {
            for scores in scores[lanes.clone()].chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has `S::LANES` numbers.
                unsafe { s.store(scores.as_mut_ptr(), softcap(s, s.load(scores.as_ptr()), cap)) };
            }
        }
        let seen = &self.scratch.seen[row];
        let start = seen.start.saturating_sub(tile.start).clamp(lanes.start, lanes.end);
        let end = seen.end.saturating_sub(tile.start).clamp(start, lanes.end);
        // Most rows see the whole tile. To fill nothing would still be a call, around which no register is kept.
        if (start..end) != lanes {
            scores[lanes.start..start].fill(f32::NEG_INFINITY);
            scores[end..lanes.end].fill(f32::NEG_INFINITY);
        }
        // SAFETY: the caller guarantees it.
        let factor = unsafe {
            let weights = self.scratch.weights.as_mut_ptr().add(row * S::LANES);
            powers::<S, C>(s, scores, vectors.clone(), &mut self.scratch.bases[row], weights)
        };
        if C::SCALED {
            multiply(s, scores, &tile.value_scales, vectors);
        }
        factor
    }

    /// Divides the weighted sums by the sums of the weights and writes the output.
    #[inline(always)]
    fn end<S: Simd>(&mut self, s: S) {
        let (plan, pages) = (self.of.plan, self.of.pages);
        let (group, width, padded) = (plan.group(), pages.shape.value_dim(), pages.padded_value());
        let mut row = 0;
        for part in self.task.parts {
            let end = row + part.queries * group;
            let mut start = (plan.first_token(part) * plan.heads() + self.task.kv_head * group) * width;
            while row < end {
                for head in 0..group {
                    // SAFETY: `begin` sized the scratch memory for all rows, and only this task writes this part of the output.
                    let out = unsafe {
                        let weight = s.sum(s.load(self.scratch.weights.as_ptr().add(row * S::LANES)));
                        for x in &mut self.scratch.sums[row * padded..][..padded] {
                            *x /= weight;
                        }
                        self.of.out.write(start + head * width, width)
                    };
                    out.copy_from_slice(&self.scratch.sums[row * padded..][..width]);
                    row += 1;
                }
                start += plan.heads() * width;
            }
        }
    }
}

/// The smallest range with all of these ranges, of which there is at least one.
#[inline(always)]
fn union(ranges: &[Range<usize>]) -> Range<usize> {
    ranges.iter().fold(ranges[0].clone(), |all, range| all.start.min(range.start)..all.end.max(range.end))
}
