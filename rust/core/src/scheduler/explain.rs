//! Timelines of single requests, and who ran or was served while a request waited.

use super::Scheduler;
use crate::ledger::{Rule, ServedBefore, Timeline, TimelineState};
use crate::request::{SeqId, Time};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum number of tenants reported as ahead of a request, and of requests reported as served before it.
const NAMED: usize = 4;
const NAMED_REQUESTS: usize = 16;

impl Scheduler {
    /// The timeline of a live request, up to the last call, or of one of the last 10,000 requests that ended.
    pub fn explain(&self, tag: u64) -> Option<Timeline> {
        let ended = self.accounts.ended(tag).cloned();
        ended.or_else(|| Some(self.seqs[self.live(tag)?].timeline(None, &self.accounts)))
    }

    /// The live request with this tag. O(requests).
    pub fn live(&self, tag: u64) -> Option<SeqId> {
        self.seqs.iter().find(|(_, seq)| seq.spec().tag == tag).map(|(id, _)| id)
    }

    /// Adds microseconds that a request spent in each state before it was added. Its timeline begins that much earlier.
    /// An empty list means unknown.
    pub fn prepared(&mut self, id: SeqId, spent: &[(TimelineState, Time)]) {
        if let Some(seq) = self.seqs.get_mut(id) {
            for &(cause, time) in spent {
                // No event is earlier than the clock's zero.
                let time = time.min(seq.times().arrived - seq.account.prepared());
                seq.account.prepare(cause, time);
            }
        }
    }

    /// The requests that first started while this request waited for its first step, and the rule by which each was
    /// served first. Only remembered requests count.
    pub fn served_before(&self, of: &Timeline) -> ServedBefore {
        let wait = of.submitted..of.submitted + of.queued();
        let mut others: Vec<_> = self.others_started(of).filter(|(started, _)| wait.contains(started)).collect();
        others.sort_by_key(|(started, other)| (*started, other.tag));
        let mut served = ServedBefore::default();
        for (_, other) in others {
            let rule = Rule::of(self.rules, &other.queue_position, &of.queue_position);
            served.counts[rule as usize] += 1;
            if served.first.len() < NAMED_REQUESTS {
                served.first.push((other.tag, Arc::clone(&other.tenant), rule));
            }
        }
        served
    }

    /// Microseconds that other requests were in progress while this request waited for its first step, summed over
    /// sequences by tenant. Most microseconds first. Only remembered requests count.
    pub fn ahead(&self, of: &Timeline) -> Vec<(Arc<str>, Time)> {
        let (from, to) = (of.submitted, of.submitted + of.queued());
        let mut times: BTreeMap<Arc<str>, Time> = BTreeMap::new();
        for (started, other) in self.others_started(of) {
            let time = other.ended.min(to).saturating_sub(started.max(from));
            if time > 0 {
                *times.entry(Arc::clone(&other.tenant)).or_default() += time;
            }
        }
        let mut ahead: Vec<_> = times.into_iter().collect();
        ahead.sort_by_key(|&(_, time)| Reverse(time));
        ahead.truncate(NAMED);
        ahead
    }

    /// The other requests that live, or ended since this request was added, and when they started. Those that have not are left out.
    fn others_started<'a>(&'a self, of: &'a Timeline) -> impl Iterator<Item = (Time, Cow<'a, Timeline>)> {
        let ended = self.accounts.ended_since(of.submitted).map(Cow::Borrowed);
        let live = self.seqs.values().filter(|seq| seq.has_started()).map(|seq| Cow::Owned(seq.timeline(None, &self.accounts)));
        ended.chain(live).filter(|other| other.tag != of.tag).filter_map(|other| Some((other.started?, other)))
    }
}
