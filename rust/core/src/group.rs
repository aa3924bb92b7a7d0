//! Tenants and classes: who there is, and what each has used.

use crate::request::Time;
use crate::timeline::Timeline;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// What the requests of a tenant or of a class used, and how many there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests that wait, those preempted included.
    pub waiting: u32,
    /// Requests that hold a slot.
    pub running: u32,
    /// Requests that ended.
    pub requests: u64,
    /// Their prompts' tokens.
    pub prompt_tokens: u64,
    /// Of those, found in the cache.
    pub cached_tokens: u64,
    /// Tokens they generated.
    pub output_tokens: u64,
    /// Tokens computed for them.
    pub computed_tokens: u64,
    /// Blocks times microseconds that they held.
    pub block_us: u64,
    /// Times that they lost their blocks.
    pub preemptions: u64,
    /// Microseconds that they waited to start.
    pub queued: Time,
}

impl Usage {
    /// Adds a request that ended.
    pub(crate) fn book(&mut self, timeline: &Timeline) {
        self.requests += 1;
        self.prompt_tokens += u64::from(timeline.prompt_tokens);
        self.cached_tokens += u64::from(timeline.cached_tokens);
        self.output_tokens += u64::from(timeline.output_tokens);
        self.computed_tokens += timeline.computed_tokens;
        self.block_us += timeline.block_us;
        self.preemptions += u64::from(timeline.preemptions);
        self.queued += timeline.queued();
    }
}

/// The groups that a request belongs to, by number.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Member {
    pub(crate) tenant: u32,
    pub(crate) class: u32,
    /// The one whose turn it must be in the queue.
    pub(crate) group: u32,
}

/// Groups that are remembered when none of their requests is there any more.
const REMEMBERED: usize = 4096;

#[derive(Debug)]
struct Group<K> {
    name: K,
    live: u32,
    usage: Usage,
}

/// Numbers for names, with what is known of each. The number of a group that
/// was idle for long is given to another, or a stream of made-up names would fill the memory.
#[derive(Debug)]
pub(crate) struct Groups<K> {
    /// Keyed at random, since clients choose names.
    numbers: HashMap<K, u32>,
    list: Vec<Group<K>>,
    /// Groups that had no request at some time, longest ago first.
    idle: VecDeque<u32>,
}

impl<K: Clone + Eq + Hash> Groups<K> {
    pub(crate) fn new() -> Self {
        Self { numbers: HashMap::new(), list: Vec::new(), idle: VecDeque::new() }
    }

    /// The group's number, for one request more; and whether the number is new to that name.
    pub(crate) fn enter(&mut self, name: &K) -> (u32, bool) {
        if let Some(&number) = self.numbers.get(name) {
            self.list[number as usize].live += 1;
            return (number, false);
        }
        let group = Group { name: name.clone(), live: 1, usage: Usage::default() };
        let number = if let Some(number) = self.free_number() {
            self.numbers.remove(&self.list[number as usize].name);
            self.list[number as usize] = group;
            number
        } else {
            self.list.push(group);
            self.list.len() as u32 - 1
        };
        self.numbers.insert(name.clone(), number);
        (number, true)
    }

    /// Takes back one request of the group.
    pub(crate) fn leave(&mut self, number: u32) {
        let group = &mut self.list[number as usize];
        group.live -= 1;
        if group.live == 0 {
            self.idle.push_back(number);
            // A group that comes and goes is listed each time: the list must not outgrow the groups.
            if self.idle.len() > 2 * self.list.len() + 16 {
                let mut listed = vec![false; self.list.len()];
                let list = &self.list;
                self.idle.retain(|&n| list[n as usize].live == 0 && !std::mem::replace(&mut listed[n as usize], true));
            }
        }
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
            groups.leave(number);
        }
        assert_eq!(groups.list.len(), REMEMBERED);
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
