//! What a call that is over adds to the metrics, and what it cost for nobody.

use std::sync::Arc;
use std::time::Duration;

use tidegate_wire::UsageSource;

use super::Record;
use crate::call::outcome::{Outcome, Phase, WaitEnd, WorkEnd};
use crate::call::waste::{self, Waste};
use crate::telemetry::metrics::{
    BoundLabels, CallLabels, PhaseLabels, TokenLabels, UpstreamLabel, WasteLabels,
    WastedTokenLabels,
};
use crate::usage::Settled;

impl Record {
    /// What was spent since the client left, and what that costs where its price is known.
    pub(super) fn waste(
        &self,
        work: WorkEnd,
        (left, ended): (Duration, Duration),
        used: &Settled,
    ) -> (Waste, Option<f64>) {
        let waste = waste::Ended {
            work,
            left,
            ended,
            kept: self.kept,
            first_token: self.times.first_token_ms,
            before: self.meter.deltas() - self.meter.since_left(),
            after: self.meter.since_left(),
            output: used.usage.output,
            source: used.source,
        }
        .waste();
        let price = self.generation.as_ref().and_then(|generation| {
            let prices = &generation.config.prices;
            let named = self.model.as_deref().and_then(|model| prices.get(model));
            named.or_else(|| prices.get(&self.listed_model()))
        });
        let money = price.zip(waste.tokens);
        let money = money.map(|(price, tokens)| price.output * tokens as f64 / 1e6);
        (waste, money)
    }

    /// The model as the configuration lists it: a bounded set of names.
    fn listed_model(&self) -> String {
        let listed = self.generation.as_ref().zip(self.model.as_deref());
        listed
            .and_then(|(generation, model)| generation.routes.listed(model))
            .unwrap_or_else(|| "other".to_owned())
    }

    pub(super) fn count_waste(&self, (waste, money): &(Waste, Option<f64>)) {
        let labels = WasteLabels {
            upstream: self.upstream_name(),
            model: self.listed_model(),
            key: self.who.principal.name().to_owned(),
        };
        let time = waste.time.as_secs_f64();
        let metrics = &self.metrics;
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

    pub(super) fn count(
        &self,
        outcome: Outcome,
        (wait, phase): (WaitEnd, Phase),
        waited: Duration,
        used: &Settled,
    ) {
        let labels = CallLabels {
            upstream: self.upstream_name(),
            route: self.who.route.name,
            outcome: outcome.name(),
        };
        self.metrics.calls.get_or_create(&labels).inc();
        if outcome == Outcome::Internal {
            self.metrics.panics.inc();
        }
        let left = matches!(wait, WaitEnd::Left | WaitEnd::Stalled);
        // A call that was taken up was left before; who left after that is counted by a record of its own.
        if left || self.attaches > 0 {
            let labels = PhaseLabels {
                upstream: labels.upstream,
                phase: self.left_in.unwrap_or(phase).name(),
            };
            self.metrics.disconnects.get_or_create(&labels).inc();
        }
        if self.retry_of.is_some() {
            let labels = UpstreamLabel {
                upstream: self.upstream_name(),
            };
            self.metrics.abandoned_retries.get_or_create(&labels).inc();
        }
        if let Some(bound) = self.overrun {
            let labels = BoundLabels {
                upstream: self.upstream_name(),
                bound: bound.name(),
            };
            self.metrics.overruns.get_or_create(&labels).inc();
        }
        let Some(upstream) = &self.upstream else {
            return;
        };
        upstream.call_seconds.observe(waited.as_secs_f64());
        for (direction, tokens) in [("input", used.usage.input), ("output", used.usage.output)] {
            if let Some(tokens) = tokens {
                let labels = TokenLabels {
                    upstream: Arc::clone(&upstream.name),
                    direction,
                    source: used.source.as_str(),
                };
                self.metrics.tokens.get_or_create(&labels).inc_by(tokens);
            }
        }
        if used.source == UsageSource::Unknown && self.worked {
            upstream.usage_unknown.inc();
        }
    }
}
