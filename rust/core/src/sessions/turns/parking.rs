//! Which active sessions are parked: those that make room for another, and those that are quiet for long.

use super::super::reloads::Reload;
use super::super::session::SessionId;
use super::{Machine, Sessions};
use crate::memory::Kv;
use crate::request::Time;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// A session's turn lasts for at least so many times the time to bring its context back.
const MIN_TURN: f64 = 5.0;
/// A session makes room for others in any case if it has been quiet for so many microseconds, and for so many times the time of both reloads.
const LONG_QUIET: (Time, f64) = (60_000_000, 3.0);
/// Microseconds after which a quiet session is parked.
const QUIET: Time = 600_000_000;
/// Number of sessions that are considered to make room, the one whose turn began first at the front.
const CONSIDERED: usize = 64;

impl Sessions {
    /// Parks sessions that were quiet for long, and the ones of the least urgent tier whose turn began first while contexts take more than
    /// `most` blocks: one whose turn began later would have to be brought back once more.
    pub(crate) fn park_excess(&mut self, most: u32, now: Time, kv: &mut Kv) {
        let first = |sessions: &Self| sessions.quiet_for(QUIET, now).next();
        while let Some((_, id)) = first(self) {
            self.park(id, now, kv);
        }
        while self.load() > most {
            let first = self.turns.iter().take(CONSIDERED);
            let Some(&(_, id)) = first.min_by_key(|&&(_, id)| Reverse(self.tier(id))) else { break };
            self.park(id, now, kv);
        }
    }

    /// Parks active sessions until a parked one fits that has a `reload`. Returns whether it comes in.
    pub(crate) fn make_room(&mut self, id: SessionId, reload: Reload, is_due: bool, machine: &Machine<'_>, kv: &mut Kv) -> bool {
        self.reloads.fill(machine.now);
        let wanted = self.directory[id].blocks();
        let urgent = self.loads[..=self.tier(id) as usize].iter().sum::<u32>();
        while self.load() + wanted > machine.blocks {
            let victim = self.victim(id, reload, machine);
            let Some(victim) = victim.or_else(|| self.turns.first().filter(|_| is_due).map(|&(_, victim)| victim)) else {
                if is_due || self.load() == 0 || urgent < self.load() && urgent + wanted <= machine.blocks {
                    return true;
                }
                // Further requests of a session whose turn is over wait. It makes room when those that it has have ended.
                if self.load() + wanted > machine.blocks + self.leaving
                    && let Some(victim) = self.served(&self.busy, id, reload, machine)
                {
                    self.park(victim, machine.now, kv);
                }
                return false;
            };
            self.park(victim, machine.now, kv);
        }
        true
    }

    /// An active session that makes room for a parked one.
    fn victim(&self, id: SessionId, reload: Reload, machine: &Machine<'_>) -> Option<SessionId> {
        let tier = self.tier(id);
        let mut quiet = self.quiet_for(LONG_QUIET.0, machine.now).filter(|&(_, victim)| self.tier(victim) >= tier);
        let quiet = quiet.find(|&(rest, victim)| is_long_quiet(rest, reload.takes + self.reload(victim, machine.model)));
        if let Some((_, victim)) = quiet {
            return Some(victim);
        }
        let less_urgent = self.turns.iter().take(CONSIDERED).find(|&&(_, victim)| self.tier(victim) > tier);
        less_urgent.map(|&(_, victim)| victim).or_else(|| self.served(&self.turns, id, reload, machine))
    }

    /// Active sessions that have been without requests for more than `least` microseconds, with that time. The one that is expected to
    /// stay so for the longest time comes first.
    fn quiet_for(&self, least: Time, now: Time) -> impl Iterator<Item = (Time, SessionId)> {
        let quiet = self.quiet.iter().take(CONSIDERED).take_while(move |&&(since, _)| now.saturating_sub(since) > least);
        let quiet = quiet.map(move |&(_, id)| (now.saturating_sub(self.directory[id].quiet_since()), id));
        quiet.filter(move |&(rest, _)| rest > least)
    }

    /// The first of some active sessions whose turn is over, if there is time for the reload of a parked one.
    fn served(&self, turns: &BTreeSet<(Time, SessionId)>, id: SessionId, reload: Reload, machine: &Machine<'_>) -> Option<SessionId> {
        if !self.reloads.allow(reload) {
            return None;
        }
        let is_served = |since: Time, victim| machine.now.saturating_sub(since) as f64 > MIN_TURN * self.reload(victim, machine.model);
        let mut turns = turns.iter().take(CONSIDERED).filter(|&&(_, victim)| self.tier(victim) >= self.tier(id));
        turns.find(|&&(since, victim)| !self.is_owed(victim, id, machine) && is_served(since, victim)).map(|&(_, victim)| victim)
    }

    /// Whether a session's tenant has had less service than that of another one, where tenants take turns.
    fn is_owed(&self, session: SessionId, other: SessionId, machine: &Machine<'_>) -> bool {
        let [own, others] = [session, other].map(|id| self.directory[id].tenant);
        self.by_tenant && own != others && (machine.service)(own) < (machine.service)(others)
    }
}

/// Whether a session that has been quiet for `rest` microseconds makes room for another one in any case. Both reloads take `reloads`.
pub(crate) fn is_long_quiet(rest: Time, reloads: f64) -> bool {
    rest > LONG_QUIET.0 && rest as f64 > LONG_QUIET.1 * reloads
}
