//! What was found: a table, JSON, and the configuration that follows.

use std::fmt::Write as _;

use serde::Serialize;

use super::Allowance;
use crate::config::Kind;
use crate::config::effective::quoted;

/// The answer to one question, as a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// So soon that it cannot be told from at once.
    Stops,
    StopsLate,
    RunsOn,
    Forgotten,
    Launched,
    Bounded,
    NoBoundSeen,
    Refuses,
    Closes,
    StaysOpen,
    OnTheWay,
    AtTheEnd,
    Never,
    Unknown,
}

#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub id: &'static str,
    #[serde(skip)]
    pub question: &'static str,
    pub verdict: Verdict,
    /// For people.
    pub answer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub millis: Option<u64>,
    /// About so many were generated for nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub url: String,
    pub model: String,
    /// The path that its calls went to.
    pub route: &'static str,
    pub kind: Kind,
    /// What the verdicts rest on.
    pub shows: &'static str,
    /// The setting `abandon.confirm` that reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirm: Option<&'static str>,
    pub first_token_ms: u64,
    pub tokens_per_second: f64,
    /// `None`: more than were tried.
    pub calls_at_once: Option<u32>,
    pub findings: Vec<Finding>,
    pub spent: Allowance,
    pub seconds: f64,
    /// What follows, for the configuration file.
    pub config: String,
}

impl Report {
    pub fn finding(&self, id: &str) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.id == id)
    }

    fn verdict(&self, id: &str) -> Verdict {
        self.finding(id)
            .map_or(Verdict::Unknown, |finding| finding.verdict)
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let kind = name(self.kind);
        let at_once = self.calls_at_once.map_or_else(
            || "more calls at once than were tried".to_owned(),
            |calls| format!("{calls} calls at once"),
        );
        let _ = writeln!(
            out,
            "{} ({kind}), model {}, by {}: first token after {} ms, {:.0} tokens a second, {at_once}.\nIt shows {}.\n",
            self.url,
            self.model,
            self.route,
            self.first_token_ms,
            self.tokens_per_second,
            self.shows
        );
        let width = self
            .findings
            .iter()
            .map(|finding| finding.question.len())
            .max()
            .unwrap_or(0);
        for finding in &self.findings {
            let sign = if finding.verdict == Verdict::Unknown {
                "unknown: "
            } else {
                ""
            };
            let _ = writeln!(
                out,
                "  {:width$}  {sign}{}",
                finding.question, finding.answer
            );
        }
        let Allowance { calls, tokens, .. } = self.spent;
        let _ = write!(
            out,
            "\n{calls} calls, {tokens} tokens asked for, {:.0} s. What follows for the configuration:\n\n{}",
            self.seconds, self.config
        );
        out
    }

    pub fn json(&self) -> String {
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        text + "\n"
    }
}

fn name(kind: Kind) -> &'static str {
    kind.row().name
}

/// The block of settings that the findings lead to. What is unknown stays with the kind's default, and says so.
pub(super) fn config(report: &Report) -> String {
    let mut out = "[[upstreams]]\n".to_owned();
    let _ = writeln!(
        out,
        "name = \"probed\"\nurl = {}\nkind = {}",
        quoted(&report.url),
        quoted(name(report.kind))
    );
    if let Some(calls) = report.calls_at_once.filter(|calls| *calls > 0) {
        let _ = writeln!(out, "slots = {calls} # so many ran at once");
    }
    out += &abandon(report);
    if let Some(confirm) = report.confirm {
        let _ = writeln!(
            out,
            "# It shows its running calls, so that slots can go by them. If this is one server, which only this gateway uses:\n# abandon.confirm = {}",
            quoted(confirm)
        );
    }
    out += &ask_stream(report);
    // Other APIs tell it without being asked.
    let asked = report.route.ends_with("completions");
    match report.verdict("usage") {
        _ if !asked => {}
        Verdict::OnTheWay | Verdict::AtTheEnd => out += "ask_usage = true # it answers\n",
        Verdict::Never => out += "ask_usage = false # it does not answer\n",
        _ => {}
    }
    if let Some(idle) = report.finding("idle")
        && let (Verdict::Closes, Some(millis)) = (idle.verdict, idle.millis)
    {
        // Shorter than the server, by as much as a request may be on its way.
        let keep = millis.saturating_sub(700).clamp(100, 3_600_000);
        let _ = writeln!(
            out,
            "[upstreams.pool]\nidle = \"{keep}ms\" # the server closes after {millis} ms"
        );
    }
    out
}

fn abandon(report: &Report) -> String {
    match report.verdict("stream") {
        Verdict::Stops | Verdict::StopsLate => {
            let late = |id| report.finding(id).filter(|f| matches!(f.verdict, Verdict::Stops | Verdict::StopsLate))?.millis;
            let worst = late("stream").max(late("prefill")).unwrap_or(0);
            // To the next quarter of a second: what was seen is no upper bound.
            let settle = (worst + 1).next_multiple_of(250).min(3_600_000);
            format!("on_abandon = \"cancel\" # it stops when it is left\nsettle = \"{settle}ms\" # its longest was {worst} ms\n")
        }
        Verdict::RunsOn => "on_abandon = \"drain\" # it generates to the end whoever leaves, so its true end is worth knowing\n".to_owned(),
        _ => "# on_abandon: unknown, so that of the kind holds\n".to_owned(),
    }
}

fn ask_stream(report: &Report) -> String {
    let stream = matches!(
        report.verdict("stream"),
        Verdict::Stops | Verdict::StopsLate
    );
    let millis = |id| {
        report
            .finding(id)
            .and_then(|finding| finding.millis)
            .unwrap_or(0)
    };
    let worse = |id| match report.verdict(id) {
        Verdict::RunsOn => true,
        Verdict::StopsLate => millis(id) > millis("stream") + 500,
        _ => false,
    };
    if stream && (worse("whole") || worse("whole_beside")) {
        return "ask_stream = true # its streams stop, and its whole answers do not, or later\n"
            .to_owned();
    }
    String::new()
}
