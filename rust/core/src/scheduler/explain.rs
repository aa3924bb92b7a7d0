//! Timelines of single requests, and the tenants that ran while a request waited.

use super::Scheduler;
use crate::request::{SeqId, Time};
use crate::timeline::{Timeline, TimelineState};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum number of tenants reported as ahead of a request.
const NAMED: usize = 4;

impl Scheduler {
    /// The timeline of a live request, up to the last call, or of one of the last 10,000 requests that ended.
    pub fn explain(&self, tag: u64) -> Option<Timeline> {
        let ended = self.accounts.ended().rev().find(|timeline| timeline.tag == tag).cloned();
        ended.or_else(|| self.seqs.values().find(|seq| seq.spec().tag == tag).map(|seq| self.accounts.timeline(seq, None)))
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

    /// Microseconds that other requests were in progress while this request waited for its first step, summed over
    /// sequences by tenant. Most microseconds first. Only remembered requests count.
    pub fn ahead(&self, of: &Timeline) -> Vec<(Arc<str>, Time)> {
        let (from, to) = (of.submitted, of.submitted + of.queued());
        let mut times: BTreeMap<&Arc<str>, Time> = BTreeMap::new();
        let mut add = |tag: u64, tenant, started: Option<Time>, ended: Time| {
            let time = ended.min(to).saturating_sub(started.unwrap_or(to).max(from));
            if tag != of.tag && time > 0 {
                *times.entry(tenant).or_default() += time;
            }
        };
        for timeline in self.accounts.ended() {
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
