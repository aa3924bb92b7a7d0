//! The KV cache: blocks on the device, their names and holders, and the blocks in host memory; and the slots
//! for recurrent states.
//!
//! This room owns which blocks are free, held, cached or in host memory, and how many may have memory. It finds cached
//! prefixes by the names of blocks and verifies them by their tokens.
//!
//! It knows blocks, tokens, salts and tenants as numbers. It may not know sequences, the queue, the policy or time: the
//! caller says which tokens are computed, and by which step.

mod block;
mod blocks_used;
mod hash;
mod kv;
mod state_pool;

use block::ChangeLog;
pub use block::{BlockId, BlockPool, BlockTable, CacheChanges, Chain, StoredBlock, Taker};
pub(crate) use block::{BlockUse, CacheOwner, EvictionClass, User};
pub use blocks_used::BlocksUsed;
pub use hash::{BlockHash, BlockHasher};
pub use kv::Restored;
pub(crate) use kv::{Cached, Computed, Grant, Kv, KvSizes, SeqBlocks};
pub use state_pool::StateSlot;
