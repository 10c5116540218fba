//! Each client connection and each upstream connection is a descriptor: how many there may be, and what fits into them.

use std::os::fd::AsFd;

use nix::fcntl::{FcntlArg, fcntl};

use crate::config::{Config, Upstream};

/// For everything but the data plane: the admin port's connections, files, sockets that listen.
const OWN: u64 = 128;
/// For a worker's runtime.
const WORKER: u64 = 4;

/// The largest table that is made at once, 8 MiB of the kernel's memory: for half a million clients.
const TABLE_MAX: u64 = 1 << 20;

/// Raises the limit as far as it can be raised without privileges; how many there may be then.
pub(super) fn raise() -> u64 {
    rlimit::increase_nofile_limit(u64::MAX).unwrap_or_else(|error| {
        tracing::warn!(%error, "the descriptor limit cannot be read");
        u64::MAX
    })
}

/// Cuts `server.connections_max` to what the descriptors can carry: a client that is turned away is told so, one that meets an empty table
/// waits for an answer that nobody can give.
pub(super) fn fit(config: &mut Config, descriptors: u64) {
    let wanted = config.server.connections_max;
    let fits = clients(descriptors, own(config), upstream(config));
    if wanted as u64 <= fits {
        return;
    }
    let cut = usize::try_from(fits).unwrap_or(usize::MAX);
    tracing::warn!(
        connections_max = wanted,
        descriptors,
        cut_to = cut,
        "server.connections_max does not fit into the descriptor limit; raise the limit (LimitNOFILE, ulimit -n) or lower server.connections_max or the pools"
    );
    config.server.connections_max = cut;
}

/// Makes the process's table of descriptors as large as the data plane may need it, by taking its last place for a moment (`any` is what is put
/// there). Linux doubles the table where it is full, and in a process with threads each doubling waits until no processor uses the old one
/// (`expand_files`, `synchronize_rcu`): 10 to 25 ms, in which all that opens a socket stands still, just when many begin.
pub(super) fn widen(any: impl AsFd, config: &Config, descriptors: u64) {
    let last = places(config).min(descriptors).saturating_sub(1);
    let Ok(last) = i32::try_from(last) else {
        return;
    };
    match fcntl(any, FcntlArg::F_DUPFD_CLOEXEC(last)) {
        Ok(taken) => drop(nix::unistd::close(taken)),
        Err(error) => tracing::debug!(%error, last, "the table of descriptors grows as it is used"),
    }
}

/// How many descriptors the process is to have at most.
fn places(config: &Config) -> u64 {
    own(config)
        .saturating_add(upstream(config))
        .saturating_add(config.server.connections_max as u64)
        .min(TABLE_MAX)
}

fn own(config: &Config) -> u64 {
    OWN + WORKER * config.server.workers.get() as u64
}

/// Connections that the pools may open.
fn upstream(config: &Config) -> u64 {
    let of = |u: &Upstream| u.pool.connections_max.saturating_mul(u.endpoints.len());
    let all = config.upstreams.iter().map(of);
    all.fold(0, usize::saturating_add) as u64
}

/// What is left for clients. A client needs a connection upstream, so the pools get at most half.
fn clients(descriptors: u64, own: u64, upstream: u64) -> u64 {
    let shared = descriptors - own.min(descriptors / 2);
    (shared - upstream.min(shared / 2)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Endpoint;

    #[test]
    fn clients_own_sockets_and_upstreams_fit_together() {
        assert_eq!(clients(1024, 128, 80), 1024 - 128 - 80);
        assert_eq!(clients(1024, 128, 5000), (1024 - 128) / 2);
        assert_eq!(clients(64, 136, 80), 16);
        assert_eq!(clients(u64::MAX, 128, 80), u64::MAX - 128 - 80);
        assert_eq!(clients(0, 128, 0), 1);
    }

    #[test]
    fn only_too_many_clients_are_cut() {
        let endpoint = Endpoint::parse("http://127.0.0.1:8000").unwrap();
        let mut config = Config::one_upstream(endpoint);
        config.server.workers = std::num::NonZeroUsize::MIN;
        let before = config.clone();
        fit(&mut config, 20_000);
        assert_eq!(config, before);
        fit(&mut config, 1024);
        assert_eq!(config.server.connections_max, 1024 - 132 - 80);
    }

    #[test]
    fn the_table_has_a_place_for_all_and_an_end() {
        let endpoint = Endpoint::parse("http://127.0.0.1:8000").unwrap();
        let mut config = Config::one_upstream(endpoint);
        config.server.workers = std::num::NonZeroUsize::MIN;
        assert_eq!(places(&config), 132 + 80 + 10_000);
        config.server.connections_max = usize::MAX;
        assert_eq!(places(&config), TABLE_MAX);
    }
}
