//! What to do after an attempt failed. Pure.
//!
//! A request is sent again only with proof that the first sending reached no server: a second generation would cost the operator and
//! nobody could tell. After the first byte of an answer there is no way back here at all.

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection: nothing was sent.
    NotConnected,
    /// The exchange ended before an answer began. `reused`: on a connection that was there before the call. `unsent`: provably no server
    /// began to work on the request.
    Broke { reused: bool, unsent: bool },
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The same endpoint, on a connection made for this call.
    Fresh,
    OtherEndpoint,
    GiveUp,
}

/// `others`: there are endpoints that were not tried. `repeatable`: the body can be sent again.
///
/// This ends: what breaks on a connection made for the call is not tried again, and each endpoint is gone to once.
pub fn next(failure: Failure, others: bool, repeatable: bool) -> Next {
    match failure {
        Failure::NotConnected if others => Next::OtherEndpoint,
        Failure::Broke {
            reused: true,
            unsent: true,
        } if repeatable => Next::Fresh,
        _ => Next::GiveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reused_connection_with_proof_is_tried_again() {
        for reused in [false, true] {
            for unsent in [false, true] {
                for repeatable in [false, true] {
                    for others in [false, true] {
                        let expected = if reused && unsent && repeatable {
                            Next::Fresh
                        } else {
                            Next::GiveUp
                        };
                        assert_eq!(
                            next(Failure::Broke { reused, unsent }, others, repeatable),
                            expected
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_failed_connect_goes_to_another_endpoint_if_there_is_one() {
        assert_eq!(next(Failure::NotConnected, true, true), Next::OtherEndpoint);
        assert_eq!(
            next(Failure::NotConnected, true, false),
            Next::OtherEndpoint
        );
        assert_eq!(next(Failure::NotConnected, false, true), Next::GiveUp);
    }
}
