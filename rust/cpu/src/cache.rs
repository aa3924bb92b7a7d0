//! The KV cache: keys and values of all tokens, in blocks that requests own.

use crate::half;
use crate::pod::Pod;
use crate::simd::Simd;
use crate::unsafe_slice::UnsafeSlice;
use crate::zeroed::{OutOfMemory, Zeroed};

#[cfg(test)]
mod tests;

/// A token's values are padded to a multiple of this number, the lanes of the widest register, so that kernels need no remainder loops.
const PADDING: usize = 16;

/// Bytes of a cache line. KV pages start at multiples of it in the cache, which starts at a memory page.
const LINE: usize = 64;

/// Dimensions of a KV cache. None of them is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of blocks that sequences can own.
    pub blocks: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// The number of a key's first elements that are its value too (latent attention). The cache then stores no other values. `None`: values
    /// are as wide as keys.
    pub latent: Option<usize>,
}

impl KvShape {
    /// Size of a head's values.
    pub(crate) fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }

    /// A size of which the parts of a head that are rotated together are a divisor: that of a head, or one that divides its value too.
    pub(crate) fn rotated(&self) -> usize {
        self.head_dim | self.value_dim()
    }
}

/// The heads of the layers in one KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    /// Number of KV heads.
    pub count: usize,
    /// Size of a head, also of query heads.
    pub head_dim: usize,
    /// As [`KvShape::latent`].
    pub latent: Option<usize>,
}

/// The place of a block's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// Index of the KV cache.
    pub cache: usize,
    /// Layer of the cache.
    pub layer: usize,
    /// Whether an earlier block writes them (the last layers of Gemma 4).
    pub shared: bool,
}

/// Storage format of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDType {
    /// fp32.
    F32,
    /// IEEE half precision. Finite numbers beyond 65504 become 65504.
    F16,
    /// bfloat16, in which queries and weights are multiplied too. Needs an even head size and an even block size.
    Bf16,
    /// Integers from -127 to 127. Each head of a token has one fp32 scale for its keys and one for its values. Heads are rotated before
    /// they are stored, so that an outlier does not decide the scale of the other dimensions (`hadamard.rs`).
    Int8,
}

/// What the memory of a cache is for.
const WHAT: &str = "KV blocks";

/// Keys and values of all layers, and a second pool of blocks for swapped-out data.
///
/// A KV page is a block's part in one layer and head. It has up to three parts. For [`KvDType::Int8`] the first part is the scales of the
/// keys and of the values, \[2\]\[block size\]. The values follow, \[block size\]\[head dim, padded\], and then the keys,
/// \[head dim\]\[block size\]. With this layout a register holds scores of several tokens, or several dimensions of an output, and no
/// kernel sums across the lanes of a register. For [`KvDType::Bf16`] the pairs that a kernel multiplies at once are next to each other:
/// values are \[pairs of tokens\]\[head dim, padded\]\[2\], and keys \[pairs of dimensions\]\[block size\]\[2\]. With [`KvShape::latent`]
/// keys are stored where values are otherwise, and a page has no other keys.
pub struct KvCache {
    shape: KvShape,
    dtype: KvDType,
    /// \[layers\]\[blocks\]\[heads\] pages.
    device: Zeroed,
    /// \[blocks\]\[layers\]\[heads\] pages.
    host: Zeroed,
}

impl KvCache {
    /// Creates a cache of zeros with `host_blocks` additional blocks for swapping. Physical memory is used only when blocks are written.
    /// Panics if the dtype needs an even head size and block size and one of them is odd.
    pub fn new(shape: KvShape, dtype: KvDType, host_blocks: usize) -> Result<Self, OutOfMemory> {
        let even = shape.head_dim.is_multiple_of(2) && shape.block_size.is_multiple_of(2);
        assert!(even || dtype != KvDType::Bf16, "bfloat16 needs an even head size and an even block size");
        // 16 bytes for each number of a padded key have room for a value, the scales and the end of a page. So no size below overflows.
        let KvShape { layers, blocks, kv_heads, block_size, head_dim, .. } = shape;
        let sizes = [layers, blocks.max(host_blocks), kv_heads, block_size, head_dim.saturating_add(PADDING)];
        sizes.into_iter().try_fold(16, usize::checked_mul).ok_or(OutOfMemory { bytes: usize::MAX, what: WHAT })?;
        let zeroed = |blocks: usize| Zeroed::new(blocks * Self::bytes_per_block(shape, dtype), WHAT);
        Ok(Self { shape, dtype, device: zeroed(blocks)?, host: zeroed(host_blocks)? })
    }

    /// Bytes of a block, over all layers.
    pub fn bytes_per_block(shape: KvShape, dtype: KvDType) -> usize {
        shape.layers * shape.kv_heads * Page::new(shape, dtype).bytes
    }

    /// Bytes of a block of this cache.
    pub fn block_bytes(&self) -> usize {
        Self::bytes_per_block(self.shape, self.dtype)
    }

    /// The dimensions of the cache.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Copies whole blocks. Each pair is (source, target), and pairs are copied in order. Panics if a block does not exist.
    pub fn copy(&mut self, pairs: &[(u32, u32)]) {
        for &(source, target) in pairs {
            for layer in 0..self.shape.layers {
                let [source, target] = [source, target].map(|block| self.part(layer, block));
                self.device.copy_within(source, target.start);
            }
        }
    }

    /// Copies blocks to the host pool, (block, host block), and then blocks from it, (host block, block). Panics if a block does not exist.
    pub fn swap(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) {
        for layer in 0..self.shape.layers {
            for &(block, host) in outs {
                let (inside, outside) = (self.part(layer, block), self.host_part(layer, host));
                self.host[outside].copy_from_slice(&self.device[inside]);
            }
            for &(host, block) in ins {
                let (inside, outside) = (self.part(layer, block), self.host_part(layer, host));
                self.device[inside].copy_from_slice(&self.host[outside]);
            }
        }
    }

    /// Copies the bytes of a block, \[layers\]\[heads\] pages, to `out`. Panics if the block does not exist, or if `out` has another size.
    pub fn read(&self, block: u32, out: &mut [u8]) {
        assert_eq!(out.len(), self.block_bytes(), "bytes of a block");
        for (layer, out) in out.chunks_exact_mut(self.block_bytes() / self.shape.layers).enumerate() {
            out.copy_from_slice(&self.device[self.part(layer, block)]);
        }
    }

    /// Overwrites a block with bytes of [`read`](Self::read). Panics if the block does not exist, or if it has another size.
    pub fn write(&mut self, block: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.block_bytes(), "bytes of a block");
        for (layer, bytes) in bytes.chunks_exact(bytes.len() / self.shape.layers).enumerate() {
            let part = self.part(layer, block);
            self.device[part].copy_from_slice(bytes);
        }
    }

    /// Returns the memory of blocks to the system, apart from memory pages that they share with other blocks. The content of the blocks is
    /// lost: they are zeros, or unchanged. Only on Linux. Panics if a block does not exist.
    pub fn discard(&mut self, blocks: &[u32]) {
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable();
        for run in blocks.chunk_by(|one, next| next - one <= 1) {
            for layer in 0..self.shape.layers {
                let (first, last) = (self.part(layer, run[0]), self.part(layer, run[run.len() - 1]));
                self.device.discard(first.start..last.end);
            }
        }
    }

    /// Returns a view that several threads can write to.
    pub(crate) fn pages(&mut self) -> Pages<'_> {
        Pages { cells: UnsafeSlice::new(&mut self.device), shape: self.shape, dtype: self.dtype, page: Page::new(self.shape, self.dtype) }
    }

    /// Byte range of a block's pages in one layer.
    fn part(&self, layer: usize, block: u32) -> std::ops::Range<usize> {
        assert!((block as usize) < self.shape.blocks, "there is no block {block}");
        let bytes = Self::bytes_per_block(self.shape, self.dtype) / self.shape.layers;
        let start = (layer * self.shape.blocks + block as usize) * bytes;
        start..start + bytes
    }

    /// Byte range of a swapped-out block's pages in one layer.
    fn host_part(&self, layer: usize, block: u32) -> std::ops::Range<usize> {
        let bytes = Self::bytes_per_block(self.shape, self.dtype) / self.shape.layers;
        let start = (block as usize * self.shape.layers + layer) * bytes;
        start..start + bytes
    }
}

/// Byte offsets in a page, and its size.
#[derive(Clone, Copy, Debug)]
struct Page {
    values: usize,
    keys: usize,
    bytes: usize,
}

impl Page {
    fn new(shape: KvShape, dtype: KvDType) -> Self {
        let (cell, scales) = match dtype {
            KvDType::F32 => (size_of::<f32>(), 0),
            KvDType::F16 | KvDType::Bf16 => (size_of::<u16>(), 0),
            KvDType::Int8 => (size_of::<i8>(), 2 * shape.block_size * size_of::<f32>()),
        };
        let keys = scales + shape.block_size * shape.head_dim.next_multiple_of(PADDING) * cell;
        let end = if shape.latent.is_some() { keys } else { keys + shape.head_dim * shape.block_size * cell };
        Self { values: scales, keys, bytes: end.next_multiple_of(LINE) }
    }
}

/// A view of the cache that a thread pool reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages<'a> {
    cells: UnsafeSlice<'a, u8>,
    pub(crate) shape: KvShape,
    pub(crate) dtype: KvDType,
    page: Page,
}

/// Pointers to the parts of a page. [`KvCache`] describes them.
#[derive(Clone, Copy)]
pub(crate) struct Parts<C> {
    /// Scales of the keys, then of the values. Meaningless unless [`Cell::SCALED`].
    pub(crate) scales: *const f32,
    pub(crate) values: *const C,
    /// Meaningless with [`KvShape::latent`].
    pub(crate) keys: *const C,
}

impl Pages<'_> {
    /// Stride between the values of two tokens, in elements.
    #[inline(always)]
    pub(crate) fn padded(self) -> usize {
        self.shape.head_dim.next_multiple_of(PADDING)
    }

    /// Stores a token's keys and values, \[heads\]\[head dim\], in one layer. The slot is `block * block_size + offset`. With
    /// [`KvShape::latent`] the values are the keys.
    ///
    /// # Safety
    ///
    /// No other thread reads or writes the same slot meanwhile.
    pub(crate) unsafe fn write(self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        // SAFETY: the caller guarantees it.
        unsafe {
            match self.dtype {
                KvDType::F32 => self.write_cells::<f32>(layer, slot, keys, values),
                KvDType::F16 => self.write_cells::<u16>(layer, slot, keys, values),
                KvDType::Bf16 => self.write_cells::<Bf16Pair>(layer, slot, keys, values),
                KvDType::Int8 => self.write_cells::<i8>(layer, slot, keys, values),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Pages::write`], and `C` is the cache's element type.
    unsafe fn write_cells<C: Cell>(self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        let KvShape { kv_heads, block_size, head_dim, latent, .. } = self.shape;
        let (block, offset) = (slot / block_size, slot % block_size);
        assert!(keys.len() == kv_heads * head_dim && values.len() == keys.len());
        // The index of a number where cells are [rows / NUMBERS][columns], and its row and column.
        let index = |row: usize, columns: usize, column: usize| (row / C::NUMBERS * columns + column) * C::NUMBERS + row % C::NUMBERS;
        for (head, (keys, values)) in keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate() {
            let page = self.cells.pointer(self.start(layer, block, head), self.page.bytes);
            // SAFETY: a slot has its own cells and scales, within the page. All of them are aligned, because pages and their parts are.
            unsafe {
                let scales = page.cast::<f32>();
                let inverse = put_scale::<C>(scales.wrapping_add(offset), keys);
                if latent.is_none() {
                    let to = page.add(self.page.keys).cast::<C::Number>();
                    for (d, &x) in keys.iter().enumerate() {
                        to.add(index(d, block_size, offset)).write(C::store(x, inverse));
                    }
                }
                let (to, inverse) =
                    (page.add(self.page.values).cast::<C::Number>(), put_scale::<C>(scales.wrapping_add(block_size + offset), values));
                for (d, &x) in values.iter().enumerate() {
                    to.add(index(offset, self.padded(), d)).write(C::store(x, inverse));
                }
            }
        }
    }

    /// Size of a head's values, padded.
    #[inline(always)]
    pub(crate) fn padded_value(self) -> usize {
        self.shape.value_dim().next_multiple_of(PADDING)
    }

    /// Returns a page for reading.
    ///
    /// # Safety
    ///
    /// `C` is the cache's element type, and no thread writes the page while it is read.
    #[inline(always)]
    pub(crate) unsafe fn page<C: Cell>(self, layer: usize, block: usize, head: usize) -> Parts<C> {
        // SAFETY: the caller guarantees it, and the offsets are within the page.
        unsafe {
            let page = self.cells.read(self.start(layer, block, head), self.page.bytes).as_ptr();
            Parts { scales: page.cast(), values: page.add(self.page.values).cast(), keys: page.add(self.page.keys).cast() }
        }
    }

    /// Byte offset of a page. Panics if the block does not exist.
    #[inline(always)]
    fn start(self, layer: usize, block: usize, head: usize) -> usize {
        assert!(block < self.shape.blocks, "there is no block {block}");
        ((layer * self.shape.blocks + block) * self.shape.kv_heads + head) * self.page.bytes
    }
}

/// Stores the scale for `numbers`, if the format has scales. Returns the factor that converts the numbers to codes.
#[inline(always)]
unsafe fn put_scale<C: Cell>(to: *mut f32, numbers: &[f32]) -> f32 {
    if !C::SCALED {
        return 1.0;
    }
    // Compares magnitudes as integers. NaN is then the largest, and the scale becomes NaN.
    let largest = f32::from_bits(numbers.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)));
    // SAFETY: the caller guarantees it.
    unsafe { to.write(largest / 127.0) };
    if largest > 0.0 { 127.0 / largest } else { 0.0 }
}

/// A cell of the cache: a number, or a pair of numbers that kernels multiply at once.
pub(crate) trait Cell: Pod {
    /// A number as it is stored.
    type Number: Pod;
    /// Numbers of a cell.
    const NUMBERS: usize = size_of::<Self>() / size_of::<Self::Number>();
    /// Whether the format has scales.
    const SCALED: bool;

    /// Converts `x` to the stored format. `inverse` is 1 / scale.
    fn store(x: f32, inverse: f32) -> Self::Number;

    /// Loads a register of cells, without applying the scale. `p` need not be aligned.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F;

    /// Converts numbers in place to factors of cells, which are the first `numbers.len() / NUMBERS` numbers then.
    #[inline(always)]
    fn factors<S: Simd>(_: S, _numbers: &mut [f32]) {}

    /// e^(`x` - `base`) for exponents that are not above 88, as exact as factors of cells need it.
    #[inline(always)]
    fn exp<S: Simd>(s: S, x: S::F, base: S::F) -> S::F {
        s.exp(s.sub(x, base))
    }

    /// Adds the products of factors and cells to `sums`.
    #[inline(always)]
    fn multiply<S: Simd>(s: S, factors: S::F, cells: S::F, sums: S::F) -> S::F {
        s.fma(factors, cells, sums)
    }
}

impl Cell for f32 {
    type Number = Self;
    const SCALED: bool = false;

    #[inline(always)]
    fn store(x: f32, _: f32) -> Self {
        x
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load(p) }
    }
}

impl Cell for u16 {
    type Number = Self;
    const SCALED: bool = false;

    #[inline(always)]
    fn store(x: f32, _: f32) -> Self {
        // An infinite key or value would make every later answer of its sequence NaN.
        half::from_f32(if x.is_finite() { x.clamp(-65504.0, 65504.0) } else { x })
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load_f16(p) }
    }
}

/// Two bfloat16 numbers, the first one in the lower half.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Bf16Pair(pub(crate) u32);

// SAFETY: a transparent wrapper of u32.
unsafe impl Pod for Bf16Pair {}

impl Cell for Bf16Pair {
    type Number = u16;
    const SCALED: bool = false;

    #[inline(always)]
    fn store(x: f32, _: f32) -> u16 {
        half::bf16_from_f32(x)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load(p.cast()) }
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, numbers: &mut [f32]) {
        for start in (0..numbers.len()).step_by(2 * S::LANES) {
            let end = numbers.len().min(start + 2 * S::LANES);
            let (mut from, mut to) = ([0.0; 32], [0.0; 16]);
            from[..end - start].copy_from_slice(&numbers[start..end]);
            // SAFETY: the arrays are as long as two of the widest registers, and one.
            unsafe {
                let (low, high) = (s.load(from.as_ptr()), s.load(from.as_ptr().add(S::LANES)));
                s.store(to.as_mut_ptr(), s.round_bf16_pairs(low, high));
            }
            numbers[start / 2..end / 2].copy_from_slice(&to[..(end - start) / 2]);
        }
    }

    #[inline(always)]
    fn exp<S: Simd>(s: S, x: S::F, base: S::F) -> S::F {
        s.exp_13_bits(x, base)
    }

    #[inline(always)]
    fn multiply<S: Simd>(s: S, factors: S::F, cells: S::F, sums: S::F) -> S::F {
        s.dot_bf16_pairs(factors, cells, sums)
    }
}

impl Cell for i8 {
    type Number = Self;
    const SCALED: bool = true;

    /// Rounds to the nearest integer, ties to even, by adding 1.5 * 2^23. The integer is then in the lowest bits of the sum.
    #[inline(always)]
    fn store(x: f32, inverse: f32) -> Self {
        (x * inverse + 12_582_912.0).to_bits() as i8
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller guarantees it.
        unsafe { s.load_i8(p) }
    }
}
