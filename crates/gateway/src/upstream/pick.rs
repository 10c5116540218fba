//! Candidate endpoints → the one to try. Pure; the place where smarter balancing will go.

use std::sync::Arc;

use super::EndpointState;

/// The endpoint with the least calls in flight among those that are neither ejected nor already tried; ties go round by `turn`.
/// If every untried endpoint is ejected, the least loaded of them: better to try than to refuse.
pub fn pick<'a>(
    endpoints: &'a [Arc<EndpointState>],
    tried: &[Arc<EndpointState>],
    turn: impl FnOnce() -> usize,
) -> Option<&'a Arc<EndpointState>> {
    if let ([only], []) = (endpoints, tried) {
        return Some(only);
    }
    let turn = turn();
    let count = endpoints.len().max(1);
    let untried = || {
        (0..count)
            .filter_map(move |i| endpoints.get((i + turn) % count))
            .filter(|e| !tried.iter().any(|t| Arc::ptr_eq(t, e)))
    };
    untried()
        .filter(|e| !e.is_ejected())
        .min_by_key(|e| e.in_flight())
        .or_else(|| untried().min_by_key(|e| e.in_flight()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Endpoint;
    use crate::telemetry::metrics::Metrics;
    use std::time::Duration;

    fn endpoints(n: u16) -> Vec<Arc<EndpointState>> {
        let metrics = Arc::new(Metrics::new());
        (0..n)
            .map(|i| {
                let address = Endpoint {
                    tls: false,
                    host: "127.0.0.1".into(),
                    port: 8000 + i,
                    base_path: String::new(),
                };
                Arc::new(EndpointState::new(&"u".into(), address, 4, &metrics))
            })
            .collect()
    }

    #[test]
    fn least_in_flight_wins_and_ties_go_round() {
        let e = endpoints(3);
        let _busy = e[0].enter();
        assert!(Arc::ptr_eq(pick(&e, &[], || 0).unwrap(), &e[1]));
        assert!(Arc::ptr_eq(pick(&e, &[], || 2).unwrap(), &e[2]));
    }

    #[test]
    fn an_ejected_endpoint_is_left_out_unless_it_is_all_there_is() {
        let e = endpoints(2);
        e[0].eject(Duration::from_secs(5), "refused", String::new());
        assert!(Arc::ptr_eq(pick(&e, &[], || 0).unwrap(), &e[1]));
        assert!(Arc::ptr_eq(
            pick(&e, &[Arc::clone(&e[1])], || 0).unwrap(),
            &e[0]
        ));
        e[0].restore();
        assert!(Arc::ptr_eq(pick(&e, &[], || 0).unwrap(), &e[0]));
    }

    #[tokio::test(start_paused = true)]
    async fn an_ejected_endpoint_comes_back_after_its_time() {
        let e = endpoints(2);
        e[0].eject(Duration::from_secs(5), "refused", String::new());
        tokio::time::advance(Duration::from_millis(5001)).await;
        assert!(Arc::ptr_eq(pick(&e, &[], || 0).unwrap(), &e[0]));
    }

    #[test]
    fn nothing_is_left_when_all_were_tried() {
        let e = endpoints(1);
        assert!(pick(&e, &[Arc::clone(&e[0])], || 7).is_none());
        assert!(pick(&[], &[], || 0).is_none());
    }
}
