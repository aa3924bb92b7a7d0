//! A map that forgets its oldest entries.

use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::hash::Hash;

/// A map of the latest entries.
#[derive(Debug)]
pub(crate) struct Latest<K, V> {
    /// With the number of the entry.
    values: FxHashMap<K, (u64, V)>,
    /// Keys with their numbers, the oldest first. One that was removed or added again is there until its turn.
    order: VecDeque<(K, u64)>,
    number: u64,
    /// Number of entries that are remembered.
    most: usize,
}

impl<K: Copy + Eq + Hash, V> Latest<K, V> {
    pub(crate) fn new(most: usize) -> Self {
        Self { values: FxHashMap::default(), order: VecDeque::new(), number: 0, most }
    }

    /// Adds an entry, which takes the place of one with the same key.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.number += 1;
        self.values.insert(key, (self.number, value));
        self.order.push_back((key, self.number));
        if self.order.len() > self.most
            && let Some((oldest, number)) = self.order.pop_front()
            && self.values.get(&oldest).is_some_and(|&(latest, _)| latest == number)
        {
            self.values.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.values.get(key).map(|(_, value)| value)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.values.remove(key).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_entries_are_remembered() {
        let mut latest = Latest::new(2);
        latest.insert('a', 1);
        latest.insert('b', 2);
        assert_eq!([latest.remove(&'a'), latest.remove(&'a')], [Some(1), None]);
        // The older one of two entries with a key does not count.
        latest.insert('b', 3);
        latest.insert('c', 4);
        assert_eq!(['a', 'b', 'c'].map(|key| latest.get(&key).copied()), [None, Some(3), Some(4)]);
        for key in '0'..='9' {
            latest.insert(key, 5);
        }
        assert_eq!((latest.values.len(), latest.order.len()), (2, 2));
        assert_eq!(['7', '8', '9'].map(|key| latest.get(&key).is_some()), [false, true, true]);
    }
}
