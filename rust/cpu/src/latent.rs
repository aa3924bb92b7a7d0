//! Multi-head latent attention (`DeepSeek` V2, 2024), as data.
//!
//! A token's keys and values are linear functions of one latent vector, which is all that the cache has of them, beside a key that is
//! rotated. Queries are multiplied by the matrices of the keys, and the outputs by those of the values. So all heads attend to the same
//! vectors, as with one KV head.

use crate::cache::{KvHeads, KvPlace};
use crate::linear::Linear;
use crate::mlp::{ShapeError, check};
use crate::rope::Rope;
use crate::simd::Isa;
use crate::weights::Merge;

/// Attention to latents.
#[derive(Debug)]
pub struct LatentAttention {
    /// The projections of the input, stacked: queries, or their latent; then the latent of keys and values, and the rotated key.
    pub in_proj: Linear,
    /// What makes queries of their latent. `None`: `in_proj` makes them. Each head of the queries has a part for the keys that are made of
    /// latents, and then one for the rotated key.
    pub query: Option<QueryLatent>,
    /// Weight of the norm of the latent.
    pub norm: Vec<f32>,
    /// What is added to the squares in the norms of both latents.
    pub eps: f32,
    /// For each head, the transposed matrix of its keys.
    pub key_up: Linear,
    /// For each head, the matrix of its values.
    pub value_up: Linear,
    /// `o_proj`.
    pub o_proj: Linear,
    /// Where latents and rotated keys are: a cache with one head whose value is the latent.
    pub kv: KvPlace,
    /// Index of the rotary embedding in `DecoderConfig::ropes`.
    pub rope: usize,
    /// Whether neighbours are rotated together, instead of numbers that are half of the rotated width apart.
    pub adjacent: bool,
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
}

/// The latent of queries.
#[derive(Debug)]
pub struct QueryLatent {
    /// Weight of its norm.
    pub norm: Vec<f32>,
    /// Its projection to the queries of all heads.
    pub up: Linear,
}

impl LatentAttention {
    /// The width of the rotated key.
    pub(crate) fn rotated(&self, ropes: &[Rope]) -> usize {
        ropes[self.rope].width()
    }

    /// The layers that all tokens use.
    pub(crate) fn common(&self) -> impl Iterator<Item = &Linear> {
        [&self.in_proj, &self.o_proj].into_iter().chain(self.query.as_ref().map(|query| &query.up))
    }

    /// Whether its matrices fit each other, a decoder of this hidden size and number of query heads, its caches and its rotary embeddings.
    pub(crate) fn check(&self, isa: Isa, hidden: usize, heads: usize, caches: &[KvHeads], ropes: &[Rope]) -> Result<(), ShapeError> {
        let latent = self.norm.len();
        check(self.kv.cache < caches.len() && !self.kv.shared, "KV caches")?;
        check(self.rope < ropes.len(), "rotary embeddings")?;
        let (kv, rotated) = (caches[self.kv.cache], self.rotated(ropes));
        check((kv.count, kv.head_dim, kv.latent) == (1, latent + rotated, Some(latent)), "latents")?;
        let queries = heads * (self.key_up.matrix.ins + rotated);
        let projected = self.query.as_ref().map_or(queries, |query| query.norm.len());
        check(self.in_proj.matrix.is(isa, projected + latent + rotated, hidden, Merge::Stacked), "projections to latents")?;
        if let Some(QueryLatent { norm, up }) = &self.query {
            check(up.matrix.is(isa, queries, norm.len(), Merge::Stacked), "projections of queries")?;
        }
        let (keys, values) = (&self.key_up.matrix, &self.value_up.matrix);
        check(keys.is_of(heads, isa, latent, keys.ins, Merge::Stacked), "matrices of keys")?;
        check(values.is_of(heads, isa, values.outs, latent, Merge::Stacked), "matrices of values")?;
        check(self.o_proj.matrix.is(isa, hidden, heads * values.outs, Merge::Stacked), "weights of o_proj")?;
        check(self.scale.is_finite(), "attention scales")
    }
}
