//! What a server shows of its own work.

use serde_json::Value;
use tokio::time::{Duration, Instant};

use super::ask::{Server, Trouble};

/// Where its counts stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Nothing,
    /// `vllm:num_requests_running` and `_waiting` at `/metrics`. Refreshed after a step only: in the middle of a long prefill it still has
    /// the old value, so a zero is believed after another call's step.
    Vllm,
    /// `is_processing` at `/slots`. Each look puts off the server's own look at whether the client of a whole answer is still there.
    Llama {
        slots: usize,
    },
}

/// Bounds of one metrics page that is looked at.
const LOOK: Duration = Duration::from_secs(10);

impl Shown {
    /// Finds out.
    pub(super) async fn find(server: &Server) -> Self {
        if let Some(slots) = slots(server).await {
            return Self::Llama { slots: slots.len() };
        }
        match vllm(server).await {
            Some(_) => Self::Vllm,
            None => Self::Nothing,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing of its work",
            Self::Vllm => "vllm:num_requests_running at /metrics",
            Self::Llama { .. } => "is_processing at /slots",
        }
    }

    /// The gateway's setting that reads the same.
    pub(super) fn confirm(self) -> Option<&'static str> {
        match self {
            Self::Nothing => None,
            Self::Vllm => Some("vllm-metrics"),
            Self::Llama { .. } => Some("llama-slots"),
        }
    }

    /// Calls that run or wait in the server now. `None`: it is not shown.
    pub(super) async fn running(self, server: &Server) -> Option<u32> {
        match self {
            Self::Nothing => None,
            Self::Vllm => vllm(server).await,
            Self::Llama { .. } => {
                let busy = |slot: &&Value| slot["is_processing"] == true;
                let slots = slots(server).await?;
                u32::try_from(slots.iter().filter(busy).count()).ok()
            }
        }
    }

    /// Waits until at most `wanted` run, looking every `each`. `None`: not within `limit`, or no longer shown.
    pub(super) async fn falls_to(
        self,
        server: &Server,
        wanted: u32,
        each: Duration,
        limit: Duration,
    ) -> Option<Duration> {
        let begin = Instant::now();
        loop {
            let at = begin.elapsed();
            if self.running(server).await? <= wanted {
                return Some(at);
            }
            if begin.elapsed() + each > limit {
                return None;
            }
            tokio::time::sleep(each).await;
        }
    }
}

async fn page(server: &Server, path: &str) -> Result<Option<String>, Trouble> {
    let whole = tokio::time::timeout(LOOK, server.get(path))
        .await
        .unwrap_or(Err(Trouble::Silent(LOOK)))?;
    let text = String::from_utf8_lossy(&whole.body).into_owned();
    Ok(whole.head.status.is_success().then_some(text))
}

async fn slots(server: &Server) -> Option<Vec<Value>> {
    let text = page(server, "/slots").await.ok()??;
    let slots: Vec<Value> = serde_json::from_str(&text).ok()?;
    let all = !slots.is_empty() && slots.iter().all(|slot| slot["is_processing"].is_boolean());
    all.then_some(slots)
}

async fn vllm(server: &Server) -> Option<u32> {
    let text = page(server, "/metrics").await.ok()??;
    let sum = |name: &str| -> Option<f64> {
        let rows = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            rest.starts_with(['{', ' '])
                .then(|| rest.rsplit(' ').next()?.parse().ok())?
        });
        rows.reduce(|a: f64, b: f64| a + b)
    };
    let running = sum("vllm:num_requests_running")?;
    let waiting = sum("vllm:num_requests_waiting").unwrap_or(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count, and any odd value is a large one"
    )]
    Some((running + waiting) as u32)
}
