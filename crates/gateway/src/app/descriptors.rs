//! Each client connection and each upstream connection is a descriptor: how many there may be, and what fits into them.

use crate::config::Config;

/// For everything but the data plane: the admin port's connections, files, sockets that listen.
const OWN: u64 = 128;
/// For a worker's runtime.
const WORKER: u64 = 4;

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
    let upstream: usize = config
        .upstreams
        .iter()
        .map(|u| u.pool.connections_max.saturating_mul(u.endpoints.len()))
        .fold(0, usize::saturating_add);
    let wanted = config.server.connections_max;
    let own = OWN + WORKER * config.server.workers.get() as u64;
    let fits = clients(descriptors, own, upstream as u64);
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
}
