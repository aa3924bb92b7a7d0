//! The scheduler's settings as one table. Journals, what-if and the Python binding read and write a [`Config`] through it.

use super::{Batching, Config, Reservation, SessionTurns};
use crate::error::ConfigError;
use crate::policy::{POLICIES, Policy};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Value {
    /// No limit, or a default that depends on other settings.
    Unset,
    /// A whole number.
    Int(u64),
    /// True or false.
    Flag(bool),
    /// One of a list of names.
    Name(String),
}

/// The values that a setting accepts.
#[derive(Clone, Copy, Debug)]
pub enum SettingKind {
    /// A whole number within bounds.
    Int {
        /// The minimum.
        least: u64,
        /// The maximum.
        most: u64,
        /// Whether it may be unset.
        optional: bool,
    },
    /// True or false.
    Flag,
    /// A name from this list.
    Name(fn() -> Vec<&'static str>),
}

impl SettingKind {
    /// Description of the accepted values.
    pub fn expected(self) -> String {
        match self {
            Self::Int { least, most, optional } => {
                let end = if optional { ", or none" } else { "" };
                format!("a whole number from {least} to {most}{end}")
            }
            Self::Flag => "true or false".into(),
            Self::Name(names) => format!("one of {}", names().join(", ")),
        }
    }

    fn allows(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Int { least, most, .. }, Value::Int(value)) => (least..=most).contains(value),
            (Self::Int { optional, .. }, Value::Unset) => optional,
            (Self::Flag, Value::Flag(_)) => true,
            (Self::Name(names), Value::Name(name)) => names().contains(&name.as_str()),
            _ => false,
        }
    }
}

/// A setting: a field of [`Config`], or a part of a field, by name.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The name used in journals and in the Python binding.
    pub name: &'static str,
    /// Description in one sentence.
    pub doc: &'static str,
    /// The accepted values.
    pub kind: SettingKind,
    get: fn(&Config) -> Value,
    set: fn(&mut Config, &Value),
}

/// Why a value was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingError {
    /// There is no setting with this name.
    #[error("no setting {name:?}: there are {}", names())]
    Unknown {
        /// The name.
        name: String,
    },
    /// The setting does not accept this value.
    #[error("{name} must be {expected}, got {value}")]
    Invalid {
        /// The setting.
        name: &'static str,
        /// Description of the accepted values.
        expected: String,
        /// The given value.
        value: String,
    },
}

fn names() -> String {
    SETTINGS.map(|setting| setting.name).join(", ")
}

const INT: u64 = i32::MAX as u64;
const U32: u64 = u32::MAX as u64;

impl std::fmt::Display for Value {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unset => formatter.write_str("none"),
            Self::Int(value) => value.fmt(formatter),
            Self::Flag(flag) => flag.fmt(formatter),
            Self::Name(name) => name.fmt(formatter),
        }
    }
}

impl Value {
    fn int<T: TryFrom<u64>>(&self, unset: T) -> T {
        match self {
            Self::Int(value) => (*value).try_into().unwrap_or(unset),
            _ => unset,
        }
    }

    fn name(&self) -> &str {
        if let Self::Name(name) = self { name } else { "" }
    }
}

/// A required whole number. The setting has the name of its field unless another one is given.
macro_rules! number {
    ($field:ident, $least:expr, $most:expr, $doc:literal) => {
        number!($field = $field, $least, $most, $doc)
    };
    ($name:ident = $($field:ident).+, $least:expr, $most:expr, $doc:literal) => {
        Setting {
            name: stringify!($name),
            doc: $doc,
            kind: SettingKind::Int { least: $least, most: $most, optional: false },
            get: |config| Value::Int(config.$($field).+.into()),
            set: |config, value| config.$($field).+ = value.int(config.$($field).+),
        }
    };
}

/// An optional whole number. `$unset` is the value of the field when the setting is unset.
macro_rules! optional {
    ($field:ident, $unset:expr, $least:expr, $most:expr, $doc:literal) => {
        Setting {
            name: stringify!($field),
            doc: $doc,
            kind: SettingKind::Int { least: $least, most: $most, optional: true },
            get: |config| if config.$field == $unset { Value::Unset } else { Value::Int(config.$field.into()) },
            set: |config, value| config.$field = value.int($unset),
        }
    };
}

/// Every setting, in the order in which settings are applied. A later setting may depend on earlier ones.
pub static SETTINGS: [Setting; 26] = [
    number!(num_kv_blocks, 2, U32, "Blocks in the KV cache, scratch block 0 included."),
    number!(block_size, 1, INT, "Tokens in a block."),
    number!(max_num_batched_tokens, 1, INT, "Tokens in a step."),
    number!(max_num_seqs, 1, U32, "Sequences in a step."),
    number!(max_model_len, 1, INT, "Longest prompt plus output."),
    Setting {
        name: "enable_prefix_caching",
        doc: "Whether sequences share the blocks of equal beginnings.",
        kind: SettingKind::Flag,
        get: |config| Value::Flag(config.enable_prefix_caching),
        set: |config, value| config.enable_prefix_caching = *value == Value::Flag(true),
    },
    number!(watermark, 0, U32, "Blocks that stay free when a sequence is admitted beside others."),
    Setting {
        name: "kv_reservation",
        doc: "Which blocks must be free for a sequence to be admitted: the watermark, those for max_tokens, or for the estimated peak.",
        kind: SettingKind::Name(|| Reservation::NAMES.map(|(_, name)| name).to_vec()),
        get: |config| Value::Name(config.kv_reservation.name().into()),
        set: |config, value| config.kv_reservation = Reservation::from_name(value.name()).unwrap_or(config.kv_reservation),
    },
    Setting {
        name: "scheduling_policy",
        doc: "The order in which waiting sequences are served.",
        kind: SettingKind::Name(|| POLICIES.map(Policy::name).to_vec()),
        get: |config| Value::Name(config.scheduling_policy.name().into()),
        set: |config, value| config.scheduling_policy = <dyn Policy>::named(value.name()).unwrap_or(config.scheduling_policy),
    },
    Setting {
        name: "batching",
        doc: "When waiting sequences may join those that run.",
        kind: SettingKind::Name(|| vec!["continuous", "static", "dynamic"]),
        get: |config| Value::Name(batch(config).0.into()),
        set: |config, value| {
            let (_, size, timeout) = batch(config);
            config.batching = batching(value.name(), size.unwrap_or(config.max_num_seqs), timeout);
        },
    },
    Setting {
        name: "static_batch_size",
        doc: "Sequences in a batch, max_num_seqs if unset (static and dynamic batching).",
        kind: SettingKind::Int { least: 1, most: U32, optional: true },
        get: |config| batch(config).1.map_or(Value::Unset, |size| Value::Int(size.into())),
        set: |config, value| {
            let (name, _, timeout) = batch(config);
            config.batching = batching(name, value.int(config.max_num_seqs), timeout);
        },
    },
    Setting {
        name: "batch_timeout",
        doc: "Microseconds that a batch waits for others at most (dynamic batching).",
        kind: SettingKind::Int { least: 0, most: u64::MAX, optional: false },
        get: |config| Value::Int(batch(config).2),
        set: |config, value| {
            let (name, size, timeout) = batch(config);
            config.batching = batching(name, size.unwrap_or(config.max_num_seqs), value.int(timeout));
        },
    },
    optional!(max_num_queued_reqs, u32::MAX, 0, U32 - 1, "Requests that may wait."),
    optional!(max_num_queued_tokens, u64::MAX, 0, u64::MAX - 1, "Prompt tokens of the requests that wait."),
    number!(queue_ageing, 0, u64::MAX, "Microseconds after which a waiting request goes first."),
    optional!(
        target_itl,
        0,
        0,
        u64::MAX,
        "Microseconds that a step with prompts should take at most; unset for three times what its decodes take alone or 60 ms, with one prompt."
    ),
    number!(
        background_slowdown,
        0,
        100_000,
        "Hundredths of a step's time that it takes at most with background requests beside others; 0 for no limit."
    ),
    optional!(
        gather,
        0,
        0,
        u64::MAX,
        "Microseconds that requests with a deadline for their first token wait for others at most, while nothing runs; unset for none."
    ),
    Setting {
        name: "session_turns",
        doc: "Which requests belong to sessions, which take turns when their contexts do not fit into the cache together.",
        kind: SettingKind::Name(|| SessionTurns::NAMES.map(|(_, name)| name).to_vec()),
        get: |config| Value::Name(config.session_turns.name().into()),
        set: |config, value| config.session_turns = SessionTurns::from_name(value.name()).unwrap_or(config.session_turns),
    },
    number!(max_session_wait, 0, u64::MAX, "Microseconds that a request waits for its session's turn at most."),
    number!(host_blocks, 0, U32, "Blocks of the host pool."),
    number!(swap_ns_per_block, 0, U32, "Nanoseconds that the copy of a block to the host takes, one way."),
    number!(state_slots, 0, INT, "Slots for the recurrent states of sequences; 0 for a model without recurrent layers."),
    number!(state_tokens, 0, INT, "Tokens whose KV takes as much memory as a recurrent state, which limits saved states; 0 for no limit."),
    number!(experts = experts.count, 0, INT, "Experts of a layer; 0 for a model without experts."),
    number!(experts_used = experts.used, 0, INT, "Experts of a layer that a token uses."),
];

/// Names in journals of earlier versions, each with the name now, which is that of the flag.
const FORMER_NAMES: [(&str, &str); 10] = [
    ("num_blocks", "num_kv_blocks"),
    ("max_tokens", "max_num_batched_tokens"),
    ("max_seqs", "max_num_seqs"),
    ("prefix_caching", "enable_prefix_caching"),
    ("reservation", "kv_reservation"),
    ("policy", "scheduling_policy"),
    ("batch_size", "static_batch_size"),
    ("max_queued_reqs", "max_num_queued_reqs"),
    ("max_queued_tokens", "max_num_queued_tokens"),
    ("ageing", "queue_ageing"),
];

/// The name, size and timeout of the batching mode.
fn batch(config: &Config) -> (&'static str, Option<u32>, u64) {
    match config.batching {
        Batching::Continuous => ("continuous", None, 0),
        Batching::Static { size } => ("static", Some(size), 0),
        Batching::Dynamic { size, timeout } => ("dynamic", Some(size), timeout),
    }
}

fn batching(name: &str, size: u32, timeout: u64) -> Batching {
    match name {
        "static" => Batching::Static { size },
        "dynamic" => Batching::Dynamic { size, timeout },
        _ => Batching::Continuous,
    }
}

impl Setting {
    /// The setting's value in `config`.
    pub fn get(&self, config: &Config) -> Value {
        (self.get)(config)
    }

    /// The setting with this name, or with this former name.
    pub fn named(name: &str) -> Result<&'static Self, SettingError> {
        let name = FORMER_NAMES.iter().find(|(former, _)| *former == name).map_or(name, |(_, now)| now);
        SETTINGS.iter().find(|setting| setting.name == name).ok_or_else(|| SettingError::Unknown { name: name.into() })
    }

    /// The error for a value that the setting does not accept.
    pub fn invalid(&self, value: impl std::fmt::Display) -> SettingError {
        SettingError::Invalid { name: self.name, expected: self.kind.expected(), value: value.to_string() }
    }
}

impl Config {
    /// Rejects invalid combinations of limits.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        for setting in &SETTINGS {
            if let (SettingKind::Int { least, most, .. }, Value::Int(value)) = (setting.kind, setting.get(self)) {
                let name = setting.name;
                if value < least {
                    return Err(ConfigError::TooSmall { name, value, least });
                }
                if value > most {
                    return Err(ConfigError::TooLarge { name, value, most });
                }
            }
        }
        // Every decoding sequence gets a token in each step.
        if self.max_num_seqs > self.max_num_batched_tokens {
            return Err(ConfigError::TooManySeqs { max_num_seqs: self.max_num_seqs, max_num_batched_tokens: self.max_num_batched_tokens });
        }
        if self.state_slots > 0 && self.state_slots < self.max_num_seqs {
            return Err(ConfigError::TooFewStateSlots { state_slots: self.state_slots, max_num_seqs: self.max_num_seqs });
        }
        // The model uses signed 32-bit KV slots.
        let (slots, most) = (u64::from(self.num_kv_blocks) * u64::from(self.block_size), i32::MAX as u64);
        if slots > most {
            return Err(ConfigError::TooLarge { name: "num_kv_blocks * block_size", value: slots, most });
        }
        Ok(())
    }

    /// Returns these settings with the `given` values changed, by name. The result may still be invalid, because some
    /// settings depend on each other.
    pub fn with(mut self, given: &[(String, Value)]) -> Result<Self, SettingError> {
        let mut named = Vec::new();
        for (name, value) in given {
            let setting = Setting::named(name)?;
            if !setting.kind.allows(value) {
                return Err(setting.invalid(value));
            }
            named.push((setting.name, value));
        }
        for setting in &SETTINGS {
            for (_, value) in named.iter().filter(|(name, _)| *name == setting.name) {
                (setting.set)(&mut self, value);
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that the setting accepts and that is not its default.
    fn other(setting: &Setting) -> Value {
        match (setting.kind, setting.get(&Config::default())) {
            (SettingKind::Flag, Value::Flag(flag)) => Value::Flag(!flag),
            (SettingKind::Name(names), value) => {
                Value::Name((*names().iter().find(|name| Value::Name((**name).into()) != value).unwrap()).into())
            }
            (SettingKind::Int { least, .. }, value) => Value::Int(if value == Value::Int(least + 3) { least + 4 } else { least + 3 }),
            (kind, value) => panic!("{}: {value:?} is no {kind:?}", setting.name),
        }
    }

    #[test]
    fn every_field_comes_back_out_of_the_table() {
        let given: Vec<_> = SETTINGS.iter().map(|setting| (setting.name.to_owned(), other(setting))).collect();
        let mut given = given;
        given.iter_mut().find(|(name, _)| name == "batching").unwrap().1 = Value::Name("dynamic".into());
        let config = Config::default().with(&given).unwrap();
        for (setting, (_, value)) in SETTINGS.iter().zip(&given) {
            assert_eq!(setting.get(&config), *value, "{}", setting.name);
        }
        // The order in which settings are given does not matter.
        given.reverse();
        assert_eq!(Config::default().with(&given).unwrap(), config);
        let all = |config: &Config| SETTINGS.iter().map(|setting| (setting.name.to_owned(), setting.get(config))).collect::<Vec<_>>();
        assert_eq!(Config::default().with(&all(&config)).unwrap(), config);
        assert_eq!(config.with(&all(&Config::default())).unwrap(), Config::default());
    }

    #[test]
    fn a_former_name_sets_what_the_name_sets_now() {
        for (former, now) in FORMER_NAMES {
            let value = other(Setting::named(now).unwrap());
            let dynamic = ("batching".to_owned(), Value::Name("dynamic".into()));
            let with = |name: &str| Config::default().with(&[dynamic.clone(), (name.to_owned(), value.clone())]).unwrap();
            assert_eq!(with(former), with(now));
            assert_ne!(with(former), Config::default().with(std::slice::from_ref(&dynamic)).unwrap(), "{former}");
        }
    }

    #[test]
    fn what_is_out_of_bounds_or_unknown_is_refused_by_name() {
        let error = |name: &str, value: Value| Config::default().with(&[(name.to_owned(), value)]).unwrap_err().to_string();
        assert_eq!(error("block_size", Value::Int(0)), "block_size must be a whole number from 1 to 2147483647, got 0");
        assert_eq!(
            error("max_num_queued_reqs", Value::Flag(true)),
            "max_num_queued_reqs must be a whole number from 0 to 4294967294, or none, got true"
        );
        assert_eq!(error("max_num_seqs", Value::Unset), "max_num_seqs must be a whole number from 1 to 4294967295, got none");
        let policies = "scheduling_policy must be one of fcfs, priority, fair, deadline, shortest, prefix, vtc, got best";
        assert_eq!(error("scheduling_policy", Value::Name("best".into())), policies);
        assert!(error("seqs", Value::Int(1)).starts_with("no setting \"seqs\": there are num_kv_blocks, block_size, "));
    }
}
