//! Divides bytes for KV blocks among several models in one process.
//!
//! Each model has a limit of blocks. Three things are given one after another, each to the models with the fewest bytes
//! first (max-min fairness):
//!
//! 1. The blocks that a model's sequences hold, and those that its waiting requests want.
//! 2. The blocks that a model has cached, and a few more if it has used up its limit.
//! 3. The rest, so that a model can grow without asking.
//!
//! A limit never falls below the blocks that sequences hold, so that no sequence is preempted for another model. As
//! sequences end, the limit follows. The promised minimum of a model is never given away.

use crate::memory::BlocksUsed;
use std::collections::BTreeMap;

/// Part of all bytes by which a cache can grow at the cost of others in one division.
const GROWTH: u64 = 32;

#[derive(Debug)]
struct Model {
    block_bytes: u64,
    /// Bytes of its recurrent states, which it keeps.
    state_bytes: u64,
    /// The promised minimum.
    least: u32,
    most: u32,
    limit: u32,
    used: BlocksUsed,
    /// Whether it had used up its limit at the latest report.
    is_full: bool,
}

/// Divides bytes for KV blocks among models. Models have numbers that the caller gives.
///
/// The caller reports the use of each model, applies the limits of [`shrink`](Self::shrink), reports each limit that
/// applies by [`set`](Self::set), and then applies the limits of [`grow`](Self::grow).
#[derive(Debug, Default)]
pub struct KvBudget {
    models: BTreeMap<u32, Model>,
}

impl KvBudget {
    /// Adds a model, or replaces the one with this number. It begins with its promised minimum of `least` blocks, or with
    /// all of its `most` blocks if it is the only one. Beside its blocks it keeps `state_bytes` of recurrent states.
    pub fn add(&mut self, model: u32, block_bytes: u64, state_bytes: u64, least: u32, most: u32) {
        let (block_bytes, least) = (block_bytes.max(1), least.min(most));
        self.models.remove(&model);
        let limit = if self.models.is_empty() { most } else { least };
        let added = Model { block_bytes, state_bytes, least, most, limit, used: BlocksUsed::default(), is_full: false };
        self.models.insert(model, added);
    }

    /// Removes a model, if it is known.
    pub fn remove(&mut self, model: u32) {
        self.models.remove(&model);
    }

    /// Bytes of all models together: the most bytes of one model, and at least the promised minimums.
    pub fn total(&self) -> u64 {
        let most = self.models.values().map(|model| model.bytes(model.most)).max();
        most.unwrap_or(0).max(self.promised())
    }

    /// Bytes of all promised minimums.
    pub fn promised(&self) -> u64 {
        self.models.values().map(|model| model.bytes(model.least)).sum()
    }

    /// Records the use of a model's blocks.
    pub fn report(&mut self, model: u32, used: BlocksUsed) {
        if let Some(known) = self.models.get_mut(&model) {
            known.used = used;
            known.is_full = used.kept >= known.limit;
        }
    }

    /// Records the limit that applies to a model.
    pub fn set(&mut self, model: u32, limit: u32) {
        if let Some(known) = self.models.get_mut(&model) {
            known.limit = limit;
        }
    }

    /// Whether a model has used up its limit or wants more, or the limits are more than all bytes.
    pub fn is_short(&self) -> bool {
        self.limits() > self.total()
            || self.models.values().any(|model| model.limit < model.most && (model.is_full || model.used.wanted > model.limit))
    }

    /// The models that must have fewer blocks, each with its new limit.
    ///
    /// A model keeps the blocks that its sequences hold, unless a new model's minimum cannot be had without them.
    pub fn shrink(&self) -> Vec<(u32, u32)> {
        let forced = self.limits() > self.total();
        let targets = self.models.iter().zip(self.targets());
        let limits = targets.map(|((&number, model), target)| {
            let least = if forced { 0 } else { model.used.held };
            (number, model.limit, target.max(least).min(model.limit))
        });
        limits.filter(|(_, before, limit)| limit < before).map(|(number, _, limit)| (number, limit)).collect()
    }

    /// The models that can have more blocks, each with its new limit. The bytes of all limits are at most the total.
    pub fn grow(&self) -> Vec<(u32, u32)> {
        let bounds = self.models.values().zip(self.targets()).map(|(model, target)| (model.limit, model.limit.max(target)));
        let limits = self.fill(&bounds.collect::<Vec<_>>());
        let limits = self.models.iter().zip(limits).map(|((&number, model), limit)| (number, model.limit, limit));
        limits.filter(|(_, before, limit)| limit > before).map(|(number, _, limit)| (number, limit)).collect()
    }

    /// Bytes of all limits.
    fn limits(&self) -> u64 {
        self.models.values().map(|model| model.bytes(model.limit)).sum()
    }

    /// The limits if all blocks could be moved.
    fn targets(&self) -> Vec<u32> {
        let growth = self.total() / GROWTH;
        let mut given: Vec<u32> = self.models.values().map(|model| model.least).collect();
        let rounds: [&dyn Fn(&Model) -> u32; 3] =
            [&|model| model.used.wanted.max(model.used.held), &|model| model.cache(growth), &|model| model.most];
        for wants in rounds {
            let bounds = self.models.values().zip(&given).map(|(model, &given)| (given, wants(model).clamp(given, model.most.max(given))));
            given = self.fill(&bounds.collect::<Vec<_>>());
        }
        given
    }

    /// Divides all bytes. Each model gets at least the first number of its bounds in blocks, and at most the second. Those
    /// between have equally many bytes, up to a block.
    fn fill(&self, bounds: &[(u32, u32)]) -> Vec<u32> {
        let at = |level: u64| {
            let models = self.models.values().zip(bounds);
            models.map(move |(model, &(least, most))| (level / model.block_bytes).clamp(least.into(), most.into()) as u32)
        };
        let bytes = |level: u64| at(level).zip(self.models.values()).map(|(blocks, model)| model.bytes(blocks)).sum::<u64>();
        let total = self.total();
        let (mut low, mut high) = (0, total + 1);
        // At level 0 each model has the least, which fits or is the caller's choice.
        while low + 1 < high {
            let middle = low.midpoint(high);
            (low, high) = if bytes(middle) <= total { (middle, high) } else { (low, middle) };
        }
        at(low).collect()
    }
}

impl Model {
    /// Bytes of this many blocks, and of the states.
    fn bytes(&self, blocks: u32) -> u64 {
        self.state_bytes + u64::from(blocks) * self.block_bytes
    }

    /// The blocks that the model keeps cached, and `growth` bytes more if it has used up its limit.
    fn cache(&self, growth: u64) -> u32 {
        let more = if self.is_full { (growth / self.block_bytes).max(1) } else { 0 };
        self.used.kept.saturating_add(more as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A world in which the models' limits apply at once.
    struct World {
        budget: KvBudget,
        limits: BTreeMap<u32, u32>,
    }

    impl World {
        fn of(models: &[(u64, u32, u32)]) -> Self {
            let mut world = Self { budget: KvBudget::default(), limits: BTreeMap::new() };
            for (number, &(bytes, least, most)) in (0..).zip(models) {
                world.add(number, (bytes, 0), least, most);
            }
            world
        }

        /// Adds a model whose blocks and states have so many bytes.
        fn add(&mut self, number: u32, (block, states): (u64, u64), least: u32, most: u32) {
            self.limits.insert(number, if self.limits.is_empty() { most } else { least });
            self.budget.add(number, block, states, least, most);
            self.divide();
        }

        fn divide(&mut self) {
            for (number, limit) in self.budget.shrink() {
                self.apply(number, limit);
            }
            for (number, limit) in self.budget.grow() {
                self.apply(number, limit);
            }
            assert!(self.budget.limits() <= self.budget.total());
        }

        fn apply(&mut self, number: u32, limit: u32) {
            self.limits.insert(number, limit);
            self.budget.set(number, limit);
        }

        /// Reports that sequences hold and want so many blocks, and that the cache has `cached` more.
        fn report(&mut self, number: u32, held: u32, wanted: u32, cached: u32) {
            self.budget.report(number, BlocksUsed { held, kept: held + cached, wanted });
            self.divide();
        }

        /// All models fill their limits with cached blocks.
        fn fill_caches(&mut self) {
            for (&number, &limit) in &self.limits {
                self.budget.report(number, BlocksUsed { held: 0, kept: limit, wanted: 0 });
            }
            assert!(self.budget.is_short());
            self.divide();
        }
    }

    #[test]
    fn the_only_busy_model_gets_all_but_the_other_minimum() {
        let mut world = World::of(&[(100, 10, 1000), (200, 20, 500)]);
        assert_eq!((world.budget.total(), world.budget.promised()), (100_000, 5000));
        world.report(0, 0, 5000, 0);
        assert_eq!((world.limits[&0], world.limits[&1]), (960, 20));
        world.report(0, 960, 960, 0);
        assert!(world.budget.is_short());
        // The other's requests get what the first one's sequences release, until both have the same bytes.
        world.report(1, 0, 400, 0);
        assert_eq!((world.limits[&0], world.limits[&1]), (960, 20));
        world.report(0, 800, 960, 0);
        assert_eq!((world.limits[&0], world.limits[&1]), (800, 100));
        world.report(0, 100, 960, 0);
        assert_eq!((world.limits[&0], world.limits[&1]), (500, 250));
    }

    #[test]
    fn a_cache_grows_at_the_cost_of_a_larger_one_and_not_of_a_smaller_one() {
        let mut world = World::of(&[(100, 10, 1000), (100, 10, 1000)]);
        world.report(0, 0, 1000, 0);
        world.report(0, 0, 0, 900);
        assert_eq!((world.limits[&0], world.limits[&1]), (900, 100));
        for growing in [100, 131, 162] {
            assert_eq!((world.limits[&0], world.limits[&1]), (1000 - growing, growing), "a little more each time");
            world.fill_caches();
        }
        (0..30).for_each(|_| world.fill_caches());
        assert_eq!((world.limits[&0], world.limits[&1]), (500, 500));
    }

    #[test]
    fn a_new_model_has_its_minimum_at_once_also_from_held_blocks() {
        let mut world = World::of(&[(100, 10, 1000)]);
        world.report(0, 1000, 1000, 0);
        world.add(1, (50, 0), 100, 200);
        assert_eq!((world.limits[&0], world.limits[&1]), (950, 100));
        world.budget.remove(1);
        world.divide();
        assert_eq!(world.limits[&0], 1000);
    }

    #[test]
    fn the_states_of_a_model_are_taken_from_what_all_models_have() {
        let mut world = World::of(&[(100, 10, 1000)]);
        world.report(0, 0, 1000, 0);
        // Its states take as much as 300 blocks of the other, and its minimum as much as 50.
        world.add(1, (50, 30_000), 100, 200);
        assert_eq!((world.budget.total(), world.budget.promised()), (100_000, 36_000));
        assert_eq!((world.limits[&0], world.limits[&1]), (650, 100));
        world.budget.remove(1);
        world.divide();
        assert_eq!(world.limits[&0], 1000);
    }

    proptest! {
        #[test]
        fn limits_keep_their_bounds_and_no_byte_that_somebody_wants_is_idle(
            models in prop::collection::vec((1..500u64, 1..50u32, 0..500u32), 1..6),
            reports in prop::collection::vec((0..6u32, 0..600u32, 0..600u32, 0..600u32), 0..40),
        ) {
            let models: Vec<_> = models.iter().map(|&(bytes, least, more)| (bytes, least, least + more)).collect();
            let mut world = World::of(&models);
            for (number, held, wanted, cached) in reports {
                let number = number % models.len() as u32;
                let before = world.limits.clone();
                let limit = before[&number];
                let (held, cached) = (held.min(limit), cached.min(limit - held.min(limit)));
                world.report(number, held, held + wanted, cached);
                let total = world.budget.total();
                let bytes = |limits: &BTreeMap<u32, u32>| limits.iter().map(|(&at, &limit)| u64::from(limit) * models[at as usize].0).sum::<u64>();
                prop_assert!(bytes(&world.limits) <= total);
                let largest = models.iter().map(|model| model.0).max().unwrap_or(0);
                for (&number, &limit) in &world.limits {
                    let (block, least, most) = models[number as usize];
                    let used = world.budget.models[&number].used;
                    prop_assert!((least..=most).contains(&limit));
                    prop_assert!(limit >= used.held.min(before[&number]), "held blocks were taken");
                    if limit < used.wanted.min(most) {
                        let lost = total - bytes(&world.limits);
                        prop_assert!(lost < largest * models.len() as u64, "{lost} bytes are idle while {number} wants more of {block}");
                    }
                }
            }
        }
    }
}
