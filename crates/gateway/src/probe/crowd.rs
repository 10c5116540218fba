//! More calls than the server runs at once: what becomes of those that wait, and of those that it will not have.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::ask::{Call, Exchange, PATIENCE, Server, Trouble, said};
use super::report::{Finding, Verdict};
use super::steps::{NOISE, Stop};
use super::waits::millis;
use super::{CROWD, Probe};

/// How long a call in a crowd may wait for its refusal.
const REFUSAL: Duration = Duration::from_secs(2);

impl Probe<'_> {
    /// A call that waits is left; then a place becomes free. Does the next call get it?
    pub(super) async fn queued(&mut self, stream: &Stop) -> Finding {
        let stop = self.left_in_the_queue(stream).await;
        self.settle().await;
        let (verdict, answer, time) = match stop {
            Ok(time) if time <= NOISE => (
                Verdict::Forgotten,
                "is forgotten, and never begins".to_owned(),
                None,
            ),
            Ok(time) => {
                let answer = format!(
                    "begins all the same, and takes a place for {:.1} s",
                    time.as_secs_f64()
                );
                (Verdict::Launched, answer, Some(time))
            }
            Err(why) => (Verdict::Unknown, why, None),
        };
        Finding {
            id: "queued",
            question: "A call that is left in its queue",
            verdict,
            answer,
            millis: time.map(millis),
            tokens: None,
        }
    }

    async fn left_in_the_queue(&mut self, stream: &Stop) -> Result<Duration, String> {
        let full = self.filled()?;
        let Stop::After(streams_stop) = stream else {
            return Err(
                "its streams run on, or nobody knows, so that a place cannot be made free at will"
                    .to_owned(),
            );
        };
        let mut held = self.hold(full).await?;
        let call = self.call(false, self.speed.tokens)?;
        let begun = self.server.begin(&call).await.map_err(|t| t.to_string())?;
        let waited = self.speed.first * 2 + Duration::from_millis(700);
        let left = begun.left_after(waited).await.map_err(|t| t.to_string())?;
        left.ok_or("it did not wait: the server refused it, or was not full")?;
        drop(held.pop());
        let limit = self.speed.long * 3 + Duration::from_secs(5);
        let begin = Instant::now();
        match self.first_token(limit).await {
            Ok(first) => Ok(first.saturating_sub(self.speed.first + *streams_stop)),
            // The place that was made free is taken, and not by a call that anybody waits for.
            Err(_) if begin.elapsed() >= limit => Ok(limit),
            Err(why) => Err(why),
        }
    }

    fn filled(&self) -> Result<u32, String> {
        self.full.filter(|full| *full > 0).ok_or_else(|| {
            format!(
                "{} calls at once did not fill the server; raise --at-once",
                self.settings.at_once
            )
        })
    }

    /// More calls than it can run, all at once: does it refuse some, and how?
    pub(super) async fn crowd(&mut self, filled: Option<Refused>) -> [Finding; 2] {
        let (refused, waiting) = match (filled, self.send_crowd().await) {
            (Some(refused), _) => (Ok(Some(refused)), 0),
            (None, Ok((refused, waiting))) => (Ok(refused), waiting),
            (None, Err(why)) => (Err(why), 0),
        };
        self.settle().await;
        let queue = match &refused {
            Ok(Some(_)) => (
                Verdict::Bounded,
                format!("is bounded: {waiting} of {CROWD} calls waited, the others were refused"),
            ),
            Ok(None) => (
                Verdict::NoBoundSeen,
                format!("has no bound that {CROWD} waiting calls reach"),
            ),
            Err(why) => (Verdict::Unknown, why.clone()),
        };
        let overload = match refused {
            Ok(Some(refused)) => (Verdict::Refuses, refused.to_string()),
            Ok(None) => (
                Verdict::Unknown,
                format!("none of {CROWD} calls was refused"),
            ),
            Err(why) => (Verdict::Unknown, why),
        };
        let finding = |id, question, (verdict, answer)| Finding {
            id,
            question,
            verdict,
            answer,
            millis: None,
            tokens: None,
        };
        [
            finding("queue", "Its queue", queue),
            finding("overload", "Its overload answer", overload),
        ]
    }

    async fn send_crowd(&mut self) -> Result<(Option<Refused>, usize), String> {
        let full = self.filled()?;
        let held = self.hold(full).await?;
        let mut crowd = JoinSet::new();
        for _ in 0..CROWD {
            let call = self.call(true, 1)?;
            let server = self.server.clone();
            crowd.spawn(async move { begins(&server, &call, REFUSAL).await });
        }
        let answers = crowd.join_all().await;
        drop(held);
        let waiting = answers
            .iter()
            .filter(|answer| !matches!(answer, Begins::Refused(_)))
            .count();
        let refused = answers.into_iter().find_map(|answer| match answer {
            Begins::Refused(with) => Some(with),
            _ => None,
        });
        Ok((refused, waiting))
    }
}

/// What a server says when it takes no more.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    status: u16,
    retry_after: Option<String>,
    message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            status,
            retry_after,
            message,
        } = self;
        match retry_after {
            Some(after) => write!(f, "is {status} with `Retry-After: {after}`: {message}"),
            None => write!(f, "is {status} without `Retry-After`: {message}"),
        }
    }
}

pub(super) enum Begins {
    Yes(Box<Exchange>),
    Waits,
    Refused(Refused),
    Fails,
}

/// Whether a call gets a token, waits for `wait`, or is refused.
pub(super) async fn begins(server: &Server, call: &Call, wait: Duration) -> Begins {
    let Ok(begun) = server.begin(call).await else {
        return Begins::Fails;
    };
    let sent = Instant::now();
    let (mut exchange, head) = match begun.head(wait).await {
        Ok(answered) => answered,
        Err(Trouble::Silent(_)) => return Begins::Waits,
        Err(_) => return Begins::Fails,
    };
    if !head.status.is_success() {
        let body = exchange.rest(PATIENCE).await.unwrap_or_default();
        let after = head
            .headers
            .get("retry-after")
            .and_then(|v| v.to_str().ok());
        return Begins::Refused(Refused {
            status: head.status.as_u16(),
            retry_after: after.map(str::to_owned),
            message: said(&body),
        });
    }
    match exchange
        .deltas(1, wait.saturating_sub(sent.elapsed()))
        .await
    {
        Ok(true) => Begins::Yes(Box::new(exchange)),
        Err(Trouble::Silent(_)) => Begins::Waits,
        _ => Begins::Fails,
    }
}

pub(super) async fn answered(server: &Server, call: &Call, limit: Duration) {
    let _ = begins(server, call, limit).await;
}
