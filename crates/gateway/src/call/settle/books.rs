//! What a call that is over adds to the metrics, and what it cost for nobody.

use tidegate_wire::UsageSource;

use super::Record;
use crate::call::Generation;
use crate::call::outcome::{EndedWait, EndedWork, Outcome};
use crate::call::waste::{self, Waste};
use crate::config::Price;
use crate::telemetry::metrics::{
    BoundLabels, CallLabels, PhaseLabels, UpstreamLabel, WasteLabels, WastedTokenLabels,
};
use crate::usage::Settled;

impl Record {
    /// What was spent since the client left, and what that costs where its price is known.
    pub(super) fn waste(
        &self,
        wait: EndedWait,
        work: EndedWork,
        used: &Settled,
    ) -> (Waste, Option<f64>) {
        let waste = waste::Ended {
            work: work.why,
            left: wait.after,
            ended: work.after,
            unseen: self.unseen(work.why),
            first_token: self.times.first_token_ms,
            before: self.meter.deltas() - self.meter.since_left(),
            after: self.meter.since_left(),
            output: used.usage.output,
            source: used.source,
        }
        .waste();
        let money = self.price().zip(waste.tokens);
        let money = money.map(|(price, tokens)| price.output * tokens as f64 / 1e6);
        (waste, money)
    }

    /// By the name that the client gave, else by the one that is sent upstream in its place; each exactly, else as it is listed.
    fn price(&self) -> Option<&Price> {
        let Generation { config, routes, .. } = &**self.generation();
        let prices = &config.prices;
        let priced = |model: &str| {
            let listed = || prices.get(&routes.listed(model)?);
            prices.get(model).or_else(listed)
        };
        let model = self.entry().model()?;
        let sent = || {
            let aliases = &self.entry().upstream()?.settings.aliases;
            priced(aliases.get(model)?)
        };
        priced(model).or_else(sent).or_else(|| prices.get("other"))
    }

    /// The model as the configuration lists it: a bounded set of names.
    fn listed_model(&self) -> String {
        let routes = &self.entry().generation.routes;
        let listed = self.entry().model().and_then(|model| routes.listed(model));
        listed.unwrap_or_else(|| "other".to_owned())
    }

    pub(super) fn count_waste(&self, (waste, money): &(Waste, Option<f64>)) {
        let labels = WasteLabels {
            upstream: self.upstream_name(),
            model: self.listed_model(),
            key: self.principal().to_owned(),
        };
        let time = waste.time.as_secs_f64();
        let metrics = &self.books().metrics;
        metrics.wasted_seconds.get_or_create(&labels).inc_by(time);
        if let Some(money) = money {
            metrics.wasted_money.get_or_create(&labels).inc_by(*money);
        }
        let labels = WastedTokenLabels {
            upstream: labels.upstream,
            model: labels.model,
            key: labels.key,
            source: waste.known.name(),
        };
        let tokens = waste.tokens.unwrap_or(0);
        metrics.wasted_tokens.get_or_create(&labels).inc_by(tokens);
    }

    pub(super) fn count(&self, outcome: Outcome, wait: EndedWait, used: &Settled) {
        self.count_outcome(outcome);
        if outcome == Outcome::Internal {
            self.books().metrics.panics.inc();
        }
        // A call that was taken up was left before; who left after that is counted by a record of its own.
        if wait.is_left() || self.attaches > 0 {
            let labels = PhaseLabels {
                upstream: self.upstream_name(),
                phase: self.left_in.unwrap_or(wait.phase).name(),
            };
            self.books()
                .metrics
                .disconnects
                .get_or_create(&labels)
                .inc();
        }
        if self.retry_of.is_some() {
            let labels = UpstreamLabel {
                upstream: self.upstream_name(),
            };
            self.books()
                .metrics
                .abandoned_retries
                .get_or_create(&labels)
                .inc();
        }
        if let Some(bound) = self.overrun {
            let labels = BoundLabels {
                upstream: self.upstream_name(),
                bound: bound.name(),
            };
            self.books().metrics.overruns.get_or_create(&labels).inc();
        }
        let Some(upstream) = self.families() else {
            return;
        };
        upstream.call_seconds.observe(wait.after);
        for (direction, tokens) in [("input", used.usage.input), ("output", used.usage.output)] {
            if let Some(tokens) = tokens {
                let labels = [direction, used.source.as_str()];
                upstream.tokens(&self.books().metrics, tokens, labels);
            }
        }
        if used.source == UsageSource::Unknown && self.worked {
            upstream.usage_unknown.inc();
        }
    }

    fn count_outcome(&self, outcome: Outcome) {
        let (route, outcome) = (self.entry().route.name, outcome.name());
        if let Some(upstream) = self.families() {
            upstream.call(&self.books().metrics, route, outcome);
            return;
        }
        let labels = CallLabels {
            upstream: self.upstream_name(),
            route,
            outcome,
        };
        self.books().metrics.calls.get_or_create(&labels).add(1);
    }
}
