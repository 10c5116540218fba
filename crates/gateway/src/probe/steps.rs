//! The steps: each leaves calls in one way and says what the server did.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::ask::{Call, Exchange, PATIENCE, Trouble, said};
use super::crowd::{Begins, Refused, answered, begins};
use super::report::{Finding, Verdict};
use super::shown::Shown;
use super::waits::millis;
use super::{PROMPT_WORDS, Probe};

/// A difference in time below this is the network's or the machine's, not the server's doing.
pub(super) const NOISE: Duration = Duration::from_millis(300);
/// A call that was left with less than this to go tells nothing.
const ENOUGH: Duration = Duration::from_millis(900);
/// llama.cpp looks for the client of a whole answer once in a second without other traffic, looks at its slots included.
const UNDISTURBED: Duration = Duration::from_millis(1600);
/// What became of work that was left.
#[derive(Clone, Debug)]
pub(super) enum Stop {
    After(Duration),
    RanOn(Duration),
    Unknown(String),
}

/// What is left, and when.
#[derive(Clone, Debug)]
enum Subject {
    Stream,
    Whole,
    /// In the middle of this long prompt, whose first token takes so long.
    Prefill(String, Duration),
}

impl Stop {
    /// The worse of two.
    fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::RanOn(a), Self::RanOn(b)) | (Self::After(a), Self::After(b)) if a >= b => self,
            (Self::Unknown(_), _) => self,
            (_, Self::Unknown(_)) => other,
            (Self::RanOn(_), Self::After(_)) => self,
            _ => other,
        }
    }

    /// By how long it went on, and how much longer it had to go.
    fn judge(went_on: Duration, natural: Duration) -> Self {
        if natural < ENOUGH {
            let left = natural.as_secs_f64();
            return Self::Unknown(format!(
                "a call had only {left:.1} s to go when it was left: the model is too fast to tell"
            ));
        }
        if went_on >= natural.mul_f64(0.75) {
            Self::RanOn(went_on)
        } else {
            Self::After(went_on)
        }
    }
}

impl From<Trouble> for Stop {
    fn from(trouble: Trouble) -> Self {
        Self::Unknown(trouble.to_string())
    }
}

impl Probe<'_> {
    /// All of them, in an order in which the later can use what the earlier found.
    pub(super) async fn steps(&mut self) -> Vec<Finding> {
        let mut found = Vec::new();
        let rounds = if self.settings.quick { 1 } else { 3 };
        (self.say)("filling it with calls, to see how many run at once");
        let filled = self.fill().await;
        (self.say)("leaving streams");
        let stream = self.rounds(rounds, &Subject::Stream).await;
        found.push(self.left("stream", "A stream that is left", &stream));
        (self.say)("leaving calls that do not stream");
        let whole = self.rounds(rounds, &Subject::Whole).await;
        found.push(self.left("whole", "A whole answer that is left", &whole));
        (self.say)("the same beside a stream that goes on");
        let beside = self.beside(&whole).await;
        found.push(self.left("whole_beside", "The same beside other traffic", &beside));
        if !self.settings.quick {
            (self.say)("leaving calls in the middle of their prompts");
            let prefill = self.prefill().await;
            found.push(self.left(
                "prefill",
                "A prompt that is left while it is read",
                &prefill,
            ));
            (self.say)("leaving a call that waits in its queue");
            found.push(self.queued(&stream).await);
            (self.say)("sending a crowd");
            found.extend(self.crowd(filled).await);
        }
        (self.say)("looking for usage on the stream");
        found.push(self.usage().await);
        found
    }

    async fn rounds(&mut self, rounds: u32, subject: &Subject) -> Stop {
        let mut worst = self.leave(subject).await;
        for _ in 1..rounds {
            if matches!(worst, Stop::Unknown(_)) {
                break;
            }
            let next = self.leave(subject).await;
            worst = worst.or(next);
        }
        worst
    }

    /// Leaves one call and says what became of it.
    async fn leave(&mut self, subject: &Subject) -> Stop {
        let stop = match self.shown {
            Shown::Nothing => self.timed(subject).await,
            _ => self.watched(subject).await,
        };
        self.settle().await;
        stop.unwrap_or_else(Stop::Unknown)
    }

    /// How long the subject had to go when it was left.
    fn natural(&self, subject: &Subject) -> Duration {
        match subject {
            Subject::Stream => self.speed.long,
            Subject::Whole => self.speed.long.mul_f64(0.75),
            Subject::Prefill(_, whole) => whole.mul_f64(0.75) + self.speed.long,
        }
    }

    /// Starts the subject and leaves it.
    async fn start_and_leave(&mut self, subject: &Subject) -> Result<(), String> {
        let limit = self.speed.first * 4 + self.speed.long * 2 + Duration::from_secs(5);
        let tokens = self.speed.tokens;
        match subject {
            Subject::Stream => {
                let call = self.call(true, tokens)?;
                let mut exchange = self.running(&call, limit).await?;
                exchange.deltas(3, limit).await.map_err(|t| t.to_string())?;
                Ok(())
            }
            Subject::Whole => {
                let after = self.speed.first + self.speed.long / 4;
                loop {
                    let call = self.call(false, self.speed.tokens)?;
                    let begun = self.server.begin(&call).await.map_err(|t| t.to_string())?;
                    let left = begun.left_after(after).await.map_err(|t| t.to_string())?;
                    if left.is_some() {
                        return Ok(());
                    }
                    if !self.faster() {
                        return Err("it answered before it could be left".to_owned());
                    }
                }
            }
            Subject::Prefill(prompt, whole) => {
                let call = Call {
                    stream: true,
                    tokens,
                    prompt: format!("{} {prompt}", self.salted()),
                    usage: false,
                };
                let call = self.pay(call)?;
                let begun = self.server.begin(&call).await.map_err(|t| t.to_string())?;
                let left = begun
                    .left_after(*whole / 4)
                    .await
                    .map_err(|t| t.to_string())?;
                // Some servers send their head before the prompt is read; then the connection is closed all the same.
                let _ = left;
                Ok(())
            }
        }
    }

    /// A stream that has begun to generate.
    pub(super) async fn running(&self, call: &Call, within: Duration) -> Result<Exchange, String> {
        let (mut exchange, _) = self.server.taken(call, within).await?;
        let more = exchange
            .deltas(1, within)
            .await
            .map_err(|t| t.to_string())?;
        more.then_some(exchange)
            .ok_or_else(|| "a stream ended at its beginning".to_owned())
    }

    /// By the server's own count.
    async fn watched(&mut self, subject: &Subject) -> Result<Stop, String> {
        let gone = || "it does not show its running calls any more".to_owned();
        if self.shown.running(&self.server).await.ok_or_else(gone)? > 0 {
            return Err("others use the server: it runs calls that are not ours".to_owned());
        }
        let natural = self.natural(subject);
        self.start_and_leave(subject).await?;
        let left = Instant::now();
        let limit = natural + Duration::from_secs(4);
        let undisturbed = matches!((self.shown, subject), (Shown::Llama { .. }, Subject::Whole));
        let mut each = Duration::from_millis(30);
        if undisturbed {
            each = UNDISTURBED;
            tokio::time::sleep(UNDISTURBED).await;
        }
        if let (Shown::Vllm, Subject::Prefill(..)) = (self.shown, subject) {
            // Its count is that of the last step: it is believed after a step that another call was in.
            let first = self.first_token(limit + PATIENCE).await?;
            let went_on = first.saturating_sub(self.speed.first);
            if self.shown.running(&self.server).await.ok_or_else(gone)? == 0 {
                return Ok(Stop::judge(went_on, natural));
            }
        }
        let fell = self.shown.falls_to(&self.server, 0, each, limit).await;
        Ok(match fell {
            Some(_) => Stop::judge(left.elapsed(), natural),
            None => Stop::RanOn(left.elapsed()),
        })
    }

    /// By what it does to the next call, on a server that is filled but for the subject.
    async fn timed(&mut self, subject: &Subject) -> Result<Stop, String> {
        let Some(full) = self.full.filter(|full| *full > 0) else {
            let most = self.settings.at_once;
            return Err(format!(
                "it shows nothing of its work, and {most} calls at once did not fill it, so that nothing waits for what is left"
            ));
        };
        let held = self.hold(full - 1).await?;
        let natural = self.natural(subject);
        self.start_and_leave(subject).await?;
        let left = Instant::now();
        let limit = natural * 2 + self.speed.first * 4 + Duration::from_secs(5);
        let next = self.first_token(limit).await;
        let went_on = match next {
            Ok(first) => first.saturating_sub(self.speed.first),
            Err(why) if left.elapsed() < limit => return Err(why),
            Err(_) => left.elapsed(),
        };
        drop(held);
        Ok(Stop::judge(went_on, natural))
    }

    /// Streams that run for twice as long as what is left beside them.
    pub(super) async fn hold(&mut self, calls: u32) -> Result<Vec<Exchange>, String> {
        let limit = self.speed.first * 4 + self.speed.long * 3 + Duration::from_secs(5);
        let mut held = Vec::new();
        for _ in 0..calls {
            let call = self.call(true, self.speed.tokens.saturating_mul(2))?;
            held.push(self.running(&call, limit).await?);
        }
        Ok(held)
    }

    /// Waits until what was left has ended, whichever way.
    pub(super) async fn settle(&mut self) {
        let limit = self.speed.long * 3 + Duration::from_secs(5);
        if self.shown == Shown::Nothing {
            // Another call in each place: none is free before what was left there has ended.
            let places = self.full.unwrap_or(1);
            let mut calls = JoinSet::new();
            for _ in 0..places {
                let Ok(call) = self.call(true, 1) else { break };
                let server = self.server.clone();
                calls.spawn(async move { answered(&server, &call, limit).await });
            }
            calls.join_all().await;
        } else {
            let each = Duration::from_millis(200);
            let _ = self.shown.falls_to(&self.server, 0, each, limit).await;
        }
    }

    /// Adds one call after the other until one does not begin. What a call was refused with, if one was.
    async fn fill(&mut self) -> Option<Refused> {
        let wait = self.speed.first * 4 + Duration::from_secs(1);
        let mut held = Vec::new();
        let mut refused = None;
        for running in 0..=self.settings.at_once {
            let Ok(call) = self.call(true, self.speed.tokens.saturating_mul(2)) else {
                break;
            };
            match begins(&self.server, &call, wait).await {
                Begins::Yes(exchange) => held.push(*exchange),
                Begins::Waits => {
                    self.full = Some(running);
                    break;
                }
                Begins::Refused(with) => {
                    self.full = Some(running);
                    refused = Some(with);
                    break;
                }
                Begins::Fails => break,
            }
        }
        drop(held);
        if self.shown == Shown::Nothing {
            // Whether it stops is not known yet: what was left may run to its end.
            tokio::time::sleep(self.speed.long * 2).await;
        }
        self.settle().await;
        refused
    }

    async fn beside(&mut self, whole: &Stop) -> Stop {
        let full = self.full.unwrap_or(u32::MAX);
        match self.shown {
            Shown::Nothing if full > 1 => return whole.clone(),
            _ if full < 2 => return Stop::Unknown("it runs one call at a time".to_owned()),
            _ => {}
        }
        let stop = self.watched_beside().await.unwrap_or_else(Stop::Unknown);
        self.settle().await;
        stop
    }

    async fn watched_beside(&mut self) -> Result<Stop, String> {
        let neighbour = self.hold(1).await?;
        self.start_and_leave(&Subject::Whole).await?;
        let natural = self.natural(&Subject::Whole);
        let limit = natural + Duration::from_secs(1);
        let each = Duration::from_millis(100);
        let fell = self.shown.falls_to(&self.server, 1, each, limit).await;
        drop(neighbour);
        Ok(fell.map_or(Stop::RanOn(limit), |time| Stop::judge(time, natural)))
    }

    /// Finds a prompt that takes long enough to be left in.
    async fn prefill(&mut self) -> Stop {
        let mut found = None;
        for words in [PROMPT_WORDS / 4, PROMPT_WORDS] {
            let prompt: Vec<String> = (0..words)
                .map(|n| format!("w{:x}", self.salted() ^ u64::from(n)))
                .collect();
            let prompt = prompt.join(" ");
            match self.prompt_time(&prompt).await {
                Ok(time) if time > self.speed.first + NOISE * 2 => {
                    found = Some(Subject::Prefill(prompt, time));
                    break;
                }
                Ok(_) => {}
                Err(why) => return Stop::Unknown(why),
            }
        }
        match found {
            Some(subject) => self.rounds(2, &subject).await,
            None => Stop::Unknown(format!(
                "a prompt of {PROMPT_WORDS} words is read too fast to be left in"
            )),
        }
    }

    async fn prompt_time(&mut self, prompt: &str) -> Result<Duration, String> {
        let prompt = format!("{} {prompt}", self.salted());
        let call = self.pay(Call {
            stream: true,
            tokens: 1,
            prompt,
            usage: false,
        })?;
        self.server.first_token(&call, PATIENCE).await
    }

    /// Whether usage is told before the end.
    async fn usage(&mut self) -> Finding {
        let (verdict, answer) = match self.ask_usage().await {
            Ok((true, _)) => (
                Verdict::OnTheWay,
                "is told on every event: a cut stream is counted exactly".to_owned(),
            ),
            Ok((false, true)) => (
                Verdict::AtTheEnd,
                "is told at the end only: of a cut stream it is not known".to_owned(),
            ),
            Ok((false, false)) => (Verdict::Never, "is not told on streams".to_owned()),
            Err(why) => (Verdict::Unknown, why),
        };
        Finding {
            id: "usage",
            question: "Usage",
            verdict,
            answer,
            millis: None,
            tokens: None,
        }
    }

    /// Whether usage came before the end, and whether it came at all.
    async fn ask_usage(&mut self) -> Result<(bool, bool), String> {
        let mut call = self.call(true, 8)?;
        call.usage = true;
        let begun = self.server.begin(&call).await.map_err(|t| t.to_string())?;
        let (mut exchange, head) = begun.head(PATIENCE).await.map_err(|t| t.to_string())?;
        if !head.status.is_success() {
            let body = exchange.rest(PATIENCE).await.unwrap_or_default();
            return Err(format!(
                "it refuses to be asked ({}): {}",
                head.status.as_u16(),
                said(&body)
            ));
        }
        let (mut early, mut any, mut finished) = (false, false, false);
        while let Some(facts) = exchange.facts(PATIENCE).await.map_err(|t| t.to_string())? {
            finished |= facts.finished;
            any |= facts.usage.is_some();
            // Elsewhere the beginning tells of the prompt, and the end of the answer.
            early |= facts.usage.is_some() && !finished && self.server.route.asks_usage();
        }
        Ok((early, any))
    }

    fn left(&self, id: &'static str, question: &'static str, stop: &Stop) -> Finding {
        let count = |time: Duration| {
            let tokens = time.as_secs_f64() / self.speed.token.as_secs_f64().max(1e-6);
            format!("{tokens:.0}").parse::<u64>().unwrap_or(u64::MAX)
        };
        let (verdict, answer, time) = match stop {
            Stop::After(time) if *time <= NOISE => (
                Verdict::Stops,
                format!("stops within {:.1} s", time.as_secs_f64().max(0.1)),
                Some(*time),
            ),
            Stop::After(time) if id == "prefill" => (
                Verdict::StopsLate,
                format!("stops {:.1} s later", time.as_secs_f64()),
                Some(*time),
            ),
            Stop::After(time) => {
                let answer = format!(
                    "stops {:.1} s and about {} tokens later",
                    time.as_secs_f64(),
                    count(*time)
                );
                (Verdict::StopsLate, answer, Some(*time))
            }
            Stop::RanOn(time) => {
                let answer = format!("runs on to its end: {:.1} s for nobody", time.as_secs_f64());
                (Verdict::RunsOn, answer, Some(*time))
            }
            Stop::Unknown(why) => (Verdict::Unknown, why.clone(), None),
        };
        Finding {
            id,
            question,
            verdict,
            answer,
            millis: time.map(millis),
            tokens: time.filter(|_| id != "prefill").map(count),
        }
    }
}
