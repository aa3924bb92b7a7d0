//! Timelines of single requests, and who ran or was served while a request waited.

use super::Scheduler;
use crate::ledger::{Rule, ServedBefore, Timeline, TimelineState};
use crate::request::{SeqId, Time};
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
        let (from, to) = (of.submitted, of.submitted + of.queued());
        if from == to {
            return ServedBefore::default();
        }
        let mut others = Vec::new();
        let mut add = |tag: u64, tenant: &Arc<str>, started: Option<Time>, position: &_| {
            if let Some(started) = started.filter(|started| tag != of.tag && (from..to).contains(started)) {
                others.push((started, tag, Arc::clone(tenant), Rule::of(self.rules, position, &of.queue_position)));
            }
        };
        for timeline in self.accounts.ended_since(from) {
            add(timeline.tag, &timeline.tenant, timeline.started, &timeline.queue_position);
        }
        for seq in self.seqs.values() {
            add(seq.spec().tag, self.accounts.tenant(seq.member()), seq.times().started, &seq.queue_position());
        }
        others.sort_by_key(|&(started, tag, ..)| (started, tag));
        let mut served = ServedBefore::default();
        for &(.., rule) in &others {
            served.counts[rule as usize] += 1;
        }
        served.first = others.into_iter().take(NAMED_REQUESTS).map(|(_, tag, tenant, rule)| (tag, tenant, rule)).collect();
        served
    }

    /// Microseconds that other requests were in progress while this request waited for its first step, summed over
    /// sequences by tenant. Most microseconds first. Only remembered requests count.
    pub fn ahead(&self, of: &Timeline) -> Vec<(Arc<str>, Time)> {
        let (from, to) = (of.submitted, of.submitted + of.queued());
        if from == to {
            return Vec::new();
        }
        let mut times: BTreeMap<&Arc<str>, Time> = BTreeMap::new();
        let mut add = |tag: u64, tenant, started: Option<Time>, ended: Time| {
            let time = ended.min(to).saturating_sub(started.unwrap_or(to).max(from));
            if tag != of.tag && time > 0 {
                *times.entry(tenant).or_default() += time;
            }
        };
        for timeline in self.accounts.ended_since(from) {
            add(timeline.tag, &timeline.tenant, timeline.started, timeline.ended);
        }
        for seq in self.seqs.values() {
            add(seq.spec().tag, self.accounts.tenant(seq.member()), seq.times().started, self.accounts.now());
        }
        let mut ahead: Vec<_> = times.into_iter().map(|(tenant, time)| (Arc::clone(tenant), time)).collect();
        ahead.sort_by_key(|&(_, time)| std::cmp::Reverse(time));
        ahead.truncate(NAMED);
        ahead
    }
}
