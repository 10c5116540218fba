//! What every process shows, under the names that all Prometheus clients give it: <https://prometheus.io/docs/instrumenting/writing_clientlibs/>.
//! Read from `/proc` at the scrape; a figure that cannot be read is left out.

use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// Ticks of `/proc` in a second: a constant of the kernel's interface (`USER_HZ`) on every architecture that Rust's Linux targets have.
const TICKS: f64 = 100.0;

/// Stands in a registry whose prefix is `process`.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let e = &mut encoder;
        let ticks = fs::read_to_string("/proc/self/stat").ok();
        let ticks = ticks.as_deref().and_then(Ticks::read);
        let boot = fs::read_to_string("/proc/stat").ok();
        let seconds = |seconds: i64| seconds as f64;
        let boot = boot.as_deref().and_then(|s| field(s, "btime ", seconds));
        let start = ticks.zip(boot).map(|(t, boot)| boot + t.started / TICKS);
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |bytes: i64| bytes.saturating_mul(1024);
        let memory = |name| field(&status, name, kib).map(ConstGauge::new);
        let cpu = ticks.map(|t| ConstCounter::new(t.used / TICKS));
        let (seconds, bytes) = (Some(&Unit::Seconds), Some(&Unit::Bytes));
        one(
            e,
            "start_time",
            "When the process began, in seconds since 1970",
            seconds,
            start.map(ConstGauge::new),
        )?;
        one(e, "cpu", "Processor time used", seconds, cpu)?;
        one(
            e,
            "resident_memory",
            "Memory that is in use",
            bytes,
            memory("VmRSS:"),
        )?;
        one(
            e,
            "virtual_memory",
            "Memory that is reserved",
            bytes,
            memory("VmSize:"),
        )?;
        one(e, "open_fds", "Descriptors that are open", None, open())?;
        one(
            e,
            "max_fds",
            "Descriptors that may be open",
            None,
            open_at_most(),
        )
    }
}

fn one<M: EncodeMetric + TypedMetric>(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    metric: Option<M>,
) -> std::fmt::Result {
    let Some(metric) = metric else { return Ok(()) };
    metric.encode(e.encode_descriptor(name, help, unit, M::TYPE)?)
}

fn open() -> Option<ConstGauge<i64>> {
    let listed = fs::read_dir("/proc/self/fd").ok()?.count();
    // One of them is that of the listing.
    let open = i64::try_from(listed.saturating_sub(1)).ok()?;
    Some(ConstGauge::new(open))
}

fn open_at_most() -> Option<ConstGauge<i64>> {
    let (soft, _) = rlimit::Resource::NOFILE.get().ok()?;
    Some(ConstGauge::new(i64::try_from(soft).unwrap_or(i64::MAX)))
}

/// The number behind `name` in lines such as `VmRSS:  1024 kB`.
fn field<T>(text: &str, name: &str, read: impl Fn(i64) -> T) -> Option<T> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(read(rest.split_whitespace().next()?.parse().ok()?))
}

/// Of `/proc/self/stat`, see proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    /// In user and system mode, of all threads.
    used: f64,
    /// From the machine's start to the process's.
    started: f64,
}

impl Ticks {
    fn read(stat: &str) -> Option<Self> {
        // The second field, the name in parentheses, may hold spaces and parentheses.
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<_> = rest.split(' ').collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
        Some(Self {
            used: number(14)? + number(15)?,
            started: number(22)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 4 0 12345 1000 200";
        let ticks = Ticks {
            used: 300.0,
            started: 12345.0,
        };
        assert_eq!(Ticks::read(stat), Some(ticks));
        assert_eq!(Ticks::read("7 (a) S 1"), None);
        let kib = |status| field(status, "VmRSS:", |n| n);
        assert_eq!(kib("VmSize:\t  9 kB\nVmRSS:\t  1024 kB\n"), Some(1024));
        assert_eq!(kib("VmSize:\t  9 kB\n"), None);
    }
}
