//! Enums whose values have names in settings, journals and reports.

use serde::{Serialize, Serializer};

/// An enum of [`named_enum`].
pub(crate) trait Named {
    /// The names in order.
    fn names() -> impl Iterator<Item = &'static str>;
}

/// Defines an enum with the name of each value. It is serialised as its name.
macro_rules! named_enum {
    ($(#[$attribute:meta])* $visibility:vis enum $type:ident { $($(#[$about:meta])* $value:ident = $name:literal,)+ }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        $visibility enum $type { $($(#[$about])* $value,)+ }

        impl $type {
            /// Every value in order, with its name.
            pub const NAMES: [(Self, &'static str); [$($name),+].len()] = [$((Self::$value, $name)),+];

            /// The number of values.
            pub const COUNT: usize = Self::NAMES.len();

            /// The name of the value.
            pub fn name(self) -> &'static str {
                Self::NAMES[self as usize].1
            }

            /// The value of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::NAMES.iter().find(|(_, known)| *known == name).map(|&(value, _)| value)
            }
        }

        impl $crate::request::Named for $type {
            fn names() -> impl Iterator<Item = &'static str> {
                Self::NAMES.into_iter().map(|(_, name)| name)
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = String::deserialize(deserializer)?;
                Self::from_name(&name).ok_or_else(|| serde::de::Error::custom(format_args!("unknown name {name:?}")))
            }
        }
    };
}
pub(crate) use named_enum;

/// Serialises the numbers that are not 0, by the names of `T`.
pub(crate) fn nonzero<T: Named, N: Default + PartialEq + Serialize, S: Serializer>(
    numbers: &[N],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(T::names().zip(numbers).filter(|(_, number)| **number != N::default()))
}

#[cfg(test)]
mod tests {
    use crate::request::Tier;

    #[test]
    fn a_value_is_written_as_its_name_and_an_unknown_name_is_refused() {
        for (tier, name) in Tier::NAMES {
            assert_eq!((tier.name(), Tier::from_name(name)), (name, Some(tier)));
            let written = rmp_serde::to_vec(&tier).unwrap();
            assert_eq!(rmp_serde::from_slice::<String>(&written).unwrap(), name);
            assert_eq!(rmp_serde::from_slice::<Tier>(&written).unwrap(), tier);
        }
        let error = rmp_serde::from_slice::<Tier>(&rmp_serde::to_vec("urgent").unwrap()).unwrap_err();
        assert!(error.to_string().contains("unknown name \"urgent\""), "{error}");
    }
}
