//! Tenants and classes, and the usage of each.

use super::timeline::Timeline;
use crate::request::Time;
use serde::Serialize;
use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Usage and request counts of a tenant or a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Waiting requests, including preempted ones.
    pub waiting: u32,
    /// Requests with a slot.
    pub running: u32,
    /// Requests that have ended.
    pub requests: u64,
    /// Prompt tokens of ended requests.
    pub prompt_tokens: u64,
    /// Prompt tokens that were cached, as the tenant is told: see [`Timeline::own_cached_tokens`].
    pub cached_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Computed tokens.
    pub computed_tokens: u64,
    /// Parts of the times of steps, in nanoseconds.
    pub compute_ns: u64,
    /// Energy in microjoules, where a meter measured it.
    pub energy_uj: u64,
    /// Blocks multiplied by the microseconds they were held.
    pub block_us: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Microseconds from addition to start.
    #[serde(rename = "queued_us")]
    pub queued: Time,
    /// Held sequences.
    pub held: u32,
    /// Blocks of held sequences multiplied by the microseconds they were held. A shared block counts once for each holder.
    pub held_block_us: u64,
}

impl Usage {
    /// Adds an ended request.
    pub(crate) fn book(&mut self, timeline: &Timeline) {
        self.requests += 1;
        self.prompt_tokens += u64::from(timeline.prompt_tokens);
        self.cached_tokens += u64::from(timeline.own_cached_tokens);
        self.output_tokens += u64::from(timeline.output_tokens);
        self.computed_tokens += timeline.computed_tokens;
        self.compute_ns += timeline.compute_ns;
        self.energy_uj += timeline.energy_uj.unwrap_or(0);
        self.block_us += timeline.block_us;
        self.preemptions += u64::from(timeline.preemptions);
        self.queued += timeline.queued();
    }
}

/// The numbers of a request's groups.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Member {
    pub(crate) tenant: u32,
    pub(crate) class: u32,
    /// The group that orders the request in the queue.
    pub(crate) group: u32,
}

/// Number of groups without requests that are remembered.
const REMEMBERED: usize = 4096;

#[derive(Debug)]
struct Group<K> {
    name: K,
    /// Number of the name, which is never reused, in the order in which names became known.
    serial: u64,
    live: u32,
    usage: Usage,
}

/// Assigns numbers to names and keeps data for each. The number of a group that was idle for long is reused. Otherwise
/// a client could fill the memory with made-up names.
#[derive(Debug)]
pub(crate) struct Groups<K> {
    /// Hashed with a random key, because clients choose names.
    numbers: HashMap<K, u32>,
    list: Vec<Group<K>>,
    last_serial: u64,
    /// Usage of forgotten names: nanoseconds of steps, and microjoules.
    forgotten: (u64, u64),
    /// Groups that had no requests at some time, longest ago first.
    idle: VecDeque<u32>,
}

impl<K: Clone + Eq + Hash> Groups<K> {
    pub(crate) fn new() -> Self {
        Self { numbers: HashMap::new(), list: Vec::new(), last_serial: 0, forgotten: (0, 0), idle: VecDeque::new() }
    }

    /// Adds a request to a group. Returns the group's number and whether the number is new for this name.
    pub(crate) fn enter(&mut self, name: &K) -> (u32, bool) {
        if let Some(&number) = self.numbers.get(name) {
            self.list[number as usize].live += 1;
            return (number, false);
        }
        self.last_serial += 1;
        let group = Group { name: name.clone(), serial: self.last_serial, live: 1, usage: Usage::default() };
        let number = if let Some(number) = self.free_number() {
            let Group { name, usage, .. } = std::mem::replace(&mut self.list[number as usize], group);
            self.numbers.remove(&name);
            self.forgotten = (self.forgotten.0 + usage.compute_ns, self.forgotten.1 + usage.energy_uj);
            number
        } else {
            self.list.push(group);
            self.list.len() as u32 - 1
        };
        self.numbers.insert(name.clone(), number);
        (number, true)
    }

    /// Removes one request from the group.
    pub(crate) fn leave(&mut self, number: u32) {
        let group = &mut self.list[number as usize];
        group.live -= 1;
        if group.live == 0 {
            self.idle.push_back(number);
            // A group is listed each time it becomes idle. Trim the list so that it does not outgrow the groups.
            if self.idle.len() > 2 * self.list.len() + 16 {
                let mut listed = vec![false; self.list.len()];
                let list = &self.list;
                self.idle.retain(|&n| list[n as usize].live == 0 && !std::mem::replace(&mut listed[n as usize], true));
            }
        }
    }

    /// The number of a known name.
    pub(crate) fn number<Q: Eq + Hash + ?Sized>(&self, name: &Q) -> Option<u32>
    where
        K: Borrow<Q>,
    {
        self.numbers.get(name).copied()
    }

    /// The number of a group's name that is never given to another name, at least 1.
    pub(crate) fn serial(&self, number: u32) -> u64 {
        self.list[number as usize].serial
    }

    pub(crate) fn usage(&mut self, number: u32) -> &mut Usage {
        &mut self.list[number as usize].usage
    }

    pub(crate) fn peek(&self, number: u32) -> &Usage {
        &self.list[number as usize].usage
    }

    pub(crate) fn name(&self, number: u32) -> &K {
        &self.list[number as usize].name
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &Usage)> {
        self.list.iter().map(|group| (&group.name, &group.usage))
    }

    /// Nanoseconds of steps and microjoules of all names, with those that were forgotten.
    pub(crate) fn compute_and_energy(&self) -> (u64, u64) {
        self.iter().fold(self.forgotten, |(ns, uj), (_, usage)| (ns + usage.compute_ns, uj + usage.energy_uj))
    }

    fn free_number(&mut self) -> Option<u32> {
        if self.list.len() < REMEMBERED {
            return None;
        }
        while let Some(number) = self.idle.pop_front() {
            if self.list[number as usize].live == 0 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_names_do_not_fill_the_memory_and_those_in_use_keep_their_number() {
        let mut groups = Groups::new();
        let (kept, _) = groups.enter(&0_u32);
        for name in 1..100_000 {
            let (number, new) = groups.enter(&name);
            assert!(new && number != kept);
            groups.usage(number).compute_ns = 3;
            groups.leave(number);
        }
        assert_eq!((groups.list.len(), groups.compute_and_energy()), (REMEMBERED, (3 * 99_999, 0)));
        assert!(groups.idle.len() < 3 * REMEMBERED);
        assert_eq!(groups.enter(&0), (kept, false));
    }

    #[test]
    fn a_group_that_comes_and_goes_is_not_listed_without_end() {
        let mut groups = Groups::new();
        for _ in 0..10_000 {
            let (number, _) = groups.enter(&7_u32);
            groups.leave(number);
        }
        assert!(groups.idle.len() < 100);
    }
}
