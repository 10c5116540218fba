//! Nanoseconds per event on the pass-through path. `cargo bench -p tidegate-wire`
#![expect(clippy::print_stdout, reason = "the figures are what a bench is for")]

use bytes::Bytes;
use std::hint::black_box;
use std::time::{Duration, Instant};
use tidegate_wire::{Dialect, Edit, StreamScanner, peek, splice};

const VLLM: &str = include_str!("../tests/data/vllm-chat.sse");
const CONTINUOUS: &str = include_str!("../tests/data/vllm-chat-continuous.sse");
const LLAMACPP: &str = include_str!("../tests/data/llamacpp-chat.sse");
const ANTHROPIC: &str = include_str!("../tests/data/vllm-anthropic.sse");

/// The best of several rounds, in nanoseconds per unit: other work on the machine only ever adds.
fn best(mut round: impl FnMut() -> u64) -> f64 {
    let mut best = f64::INFINITY;
    let end = Instant::now() + Duration::from_millis(700);
    while Instant::now() < end {
        let start = Instant::now();
        let units = round();
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / units as f64);
    }
    best
}

fn scan(name: &str, dialect: Dialect, event: &str, chunk: usize) {
    let text = Bytes::from(event.repeat(20_000));
    let ns = best(|| {
        let mut scanner = StreamScanner::new(dialect, 64 * 1024);
        let mut events = 0;
        let mut rest = text.clone();
        while !rest.is_empty() {
            scanner.push(rest.split_to(chunk.min(rest.len())));
            while let Some(piece) = scanner.pop() {
                events += u64::from(black_box(piece).facts.events);
            }
        }
        events
    });
    println!(
        "scan  {name:<34} {:>5} B/event  {ns:>7.0} ns/event",
        event.len()
    );
}

fn event(text: &str, at: usize) -> String {
    text.split_inclusive("\n\n")
        .nth(at)
        .unwrap_or_default()
        .to_owned()
}

fn main() {
    let vllm = event(VLLM, 2);
    scan(
        "vLLM chunk, one event a push",
        Dialect::OpenAi,
        &vllm,
        vllm.len(),
    );
    scan(
        "vLLM chunk, 16 KiB pushes",
        Dialect::OpenAi,
        &vllm,
        16 * 1024,
    );
    scan(
        "vLLM chunk, cut in the middle",
        Dialect::OpenAi,
        &vllm,
        vllm.len() / 2 + 1,
    );
    let usage = event(CONTINUOUS, 2);
    scan(
        "vLLM chunk with usage",
        Dialect::OpenAi,
        &usage,
        usage.len(),
    );
    let llama = event(LLAMACPP, 2);
    scan("llama.cpp chunk", Dialect::OpenAi, &llama, llama.len());
    let delta = event(ANTHROPIC, 3);
    scan("Anthropic delta", Dialect::Anthropic, &delta, delta.len());
    long_line();
    request();
}

fn long_line() {
    let line = Bytes::from(vec![b'x'; 16 * 1024]);
    let ns = best(|| {
        let mut scanner = StreamScanner::new(Dialect::OpenAi, 64 * 1024);
        scanner.push(Bytes::from_static(
            b"data: {\"choices\":[{\"delta\":{\"content\":\"",
        ));
        for _ in 0..1024 {
            scanner.push(line.clone());
            while let Some(piece) = scanner.pop() {
                black_box(piece);
            }
        }
        16
    });
    println!(
        "scan  one line of 16 MiB                                {:>7.0} us/MiB",
        ns / 1000.0
    );
}

fn request() {
    let text = "word é ".repeat(150_000);
    let body = Bytes::from(format!(
        "{{\"messages\":[{{\"content\":\"{text}\"}}],\"model\":\"m\",\"stream\":true}}"
    ));
    let per_mib = |ns: f64| ns / 1000.0 / (body.len() as f64 / f64::from(1 << 20));
    let ns = best(|| {
        let _ = black_box(peek(&body, Dialect::OpenAi));
        1
    });
    println!(
        "peek  request of {} bytes                         {:>7.0} us/MiB",
        body.len(),
        per_mib(ns)
    );
    if let Ok(peeked) = peek(&body, Dialect::OpenAi) {
        let ns = best(|| {
            black_box(splice(
                &body,
                &peeked,
                &[Edit::Model("n"), Edit::IncludeUsage],
            ));
            1
        });
        println!(
            "splice                                                 {:>7.0} us/MiB",
            per_mib(ns)
        );
    }
}
