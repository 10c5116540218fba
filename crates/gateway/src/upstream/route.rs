//! Model name → upstream, and the name to send. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::Upstream;
use crate::config::UnknownModels;

/// The routing table of one configuration generation.
#[derive(Debug)]
pub struct Routes {
    upstreams: Vec<Arc<Upstream>>,
    exact: HashMap<String, usize>,
    /// Patterns ending in `*`, without it, longest first.
    prefixes: Vec<(String, usize)>,
    default: usize,
    unknown: UnknownModels,
}

/// Where a call goes and, if the model has another name there, that name.
#[derive(Debug)]
pub struct Target<'a> {
    pub upstream: &'a Arc<Upstream>,
    pub model: Option<&'a str>,
}

impl Routes {
    pub fn new(upstreams: Vec<Arc<Upstream>>, default: usize, unknown: UnknownModels) -> Self {
        let mut exact = HashMap::new();
        let mut prefixes = Vec::new();
        for (index, upstream) in upstreams.iter().enumerate() {
            let aliases = upstream.settings.aliases.keys();
            for name in upstream.settings.models.iter().chain(aliases) {
                match name.strip_suffix('*') {
                    Some(prefix) => prefixes.push((prefix.to_owned(), index)),
                    None => {
                        exact.insert(name.clone(), index);
                    }
                }
            }
        }
        prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Self {
            upstreams,
            exact,
            prefixes,
            default,
            unknown,
        }
    }

    /// The same table, with a copy of each upstream.
    #[must_use]
    pub fn copy(&self) -> Self {
        let copies = self.upstreams.iter().map(|upstream| upstream.copy());
        Self::new(copies.map(Arc::new).collect(), self.default, self.unknown)
    }

    pub fn upstreams(&self) -> &[Arc<Upstream>] {
        &self.upstreams
    }

    /// The upstream for requests that name no model.
    pub fn default_target(&self) -> Option<Target<'_>> {
        self.upstreams.get(self.default).map(|upstream| Target {
            upstream,
            model: None,
        })
    }

    /// The name or the pattern under which the configuration lists a model.
    pub fn listed(&self, model: &str) -> Option<String> {
        if self.exact.contains_key(model) {
            return Some(model.to_owned());
        }
        let mut prefixes = self.prefixes.iter().map(|(prefix, _)| prefix);
        let prefix = prefixes.find(|prefix| model.starts_with(prefix.as_str()))?;
        Some(format!("{prefix}*"))
    }

    /// `None`: no upstream serves this model.
    pub fn find(&self, model: &str) -> Option<Target<'_>> {
        let listed = self.exact.get(model).copied().or_else(|| {
            self.prefixes
                .iter()
                .find(|(prefix, _)| model.starts_with(prefix.as_str()))
                .map(|(_, index)| *index)
        });
        // At most one: the configuration has been asked.
        let open = || {
            let mut upstreams = self.upstreams.iter();
            upstreams.position(|u| u.settings.models.is_empty())
        };
        let index = match (listed.or_else(open), self.unknown) {
            (Some(index), _) => index,
            (None, UnknownModels::Default) => self.default,
            (None, UnknownModels::Refuse) => return None,
        };
        let upstream = self.upstreams.get(index)?;
        let model = upstream.settings.aliases.get(model).map(String::as_str);
        Some(Target { upstream, model })
    }
}
