//! What follows from the kind of a server, or from nobody knowing it, when its clients leave.

use serde_json::json;
use tidegate::config::{Kind, Price, Upstream};
use tidegate_rig::{RawClient, Script};

use crate::binary::Program;
use crate::support::{CHAT, SOON, gateway, only, stream, upstream, whole};

/// Nobody has said what the server does: that it stopped, having wasted nothing, would be a guess. A kind says it, by what was asked for.
#[tokio::test]
async fn waste_is_unknown_where_nothing_is_known_of_the_server() {
    let script = || json!({"tokens": 400, "pace_ms": 10.0});
    for (kind, body, known, waste, kept) in [
        (Kind::Other, stream(script()), "assumed", "unknown", None),
        (Kind::Other, whole(script()), "assumed", "unknown", None),
        (
            Kind::LlamaCpp,
            stream(script()),
            "settled",
            "estimated",
            Some(250.0),
        ),
        (
            Kind::LlamaCpp,
            whole(script()),
            "settled",
            "estimated",
            Some(250.0),
        ),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            let endpoints = std::mem::take(&mut only(c).endpoints);
            *only(c) = Upstream::new("u", kind, endpoints);
        });
        let client = gate.post(CHAT, &body).await;
        // Long enough for a pace.
        up.wait_for(|t| t.tokens > 100, SOON)
            .await
            .expect("it runs");
        client.leave_fin();
        let line = gate.logged(1).await.remove(0);
        assert_eq!(
            (&line["work_end"], &line["end_known"], &line["waste"]),
            (&json!("cancelled"), &json!(known), &json!(waste)),
            "{kind:?}: {line}"
        );
        assert_eq!(line["slot_kept_ms"].as_f64(), kept, "{line}");
        if known == "assumed" {
            assert!(line["wasted_tokens"].is_null(), "{line}");
        } else {
            let at = |name: &str| line[name].as_f64().expect("a number");
            // What came in 33 ms at the pace that was seen, give or take what came meanwhile; not in the 250 for which the slot is kept.
            let pace = at("output_tokens") / (at("wait_ended_ms") - at("first_token_ms"));
            let tokens = at("wasted_tokens");
            assert!((1.0..120.0 * pace).contains(&tokens), "{pace} {line}");
            let seen = at("work_ended_ms") - at("wait_ended_ms");
            assert!((at("wasted_ms") - seen - 33.0).abs() < 1.0, "{line}");
        }
    }
}

/// What is bought is what is sent, whatever clients call it.
#[tokio::test]
async fn a_price_holds_for_the_names_that_stand_for_its_model() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        *only(c) = Upstream::new("u", Kind::LlamaCpp, std::mem::take(&mut only(c).endpoints));
        only(c).aliases.insert("tiny".into(), "big".into());
        let price = Price {
            input: 1.0,
            output: 1e6,
        };
        c.prices.insert("big".into(), price);
    });
    let body = stream(json!({"tokens": 400, "pace_ms": 10.0}));
    let client = gate.post(CHAT, &body).await;
    up.wait_for(|t| t.tokens > 100, SOON)
        .await
        .expect("it runs");
    client.leave_fin();
    let line = gate.logged(1).await.remove(0);
    assert_eq!(line["model"], "tiny", "{line}");
    let tokens = line["wasted_tokens"].as_f64().expect("a number");
    assert!(tokens > 0.0, "{line}");
    assert_eq!(line["wasted_money"].as_f64(), Some(tokens), "one each");
}

/// Nothing is waited for any more.
#[tokio::test]
async fn an_answer_in_one_piece_is_done_when_it_was_given() {
    let up = upstream(Script::default()).await;
    for ask_stream in [false, true] {
        let gate = gateway(&up, |c| only(c).ask_stream = ask_stream);
        let mut client = gate.post(CHAT, &whole(json!({"tokens": 3}))).await;
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
        let line = gate.logged(1).await.remove(0);
        assert_eq!(
            (&line["wait_end"], &line["phase"]),
            (&json!("answered"), &json!("done")),
            "{ask_stream}: {line}"
        );
    }
}

/// Who did not say what the server is hears it from the log, once.
#[tokio::test]
async fn a_server_that_says_what_it_is_has_its_kind_named_once() {
    let script = Script {
        headers: vec![("server".into(), "llama.cpp".into())],
        ..Script::default()
    };
    let up = upstream(script).await;
    for (kind, times) in [("", 1), ("kind = \"llama.cpp\"", 0)] {
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"off\"\n[[upstreams]]\nurl = \"http://{}\"\n{kind}",
            up.addr()
        );
        let program = Program::configured(&text);
        let addr = program.address("listen=").await;
        for _ in 0..3 {
            let mut client = RawClient::connect(addr).await.expect("it accepts");
            let body = whole(json!({"tokens": 1})).to_string();
            let sent = client.request("POST", CHAT, &[], body.as_bytes()).await;
            sent.expect("sent");
            assert_eq!(client.final_head().await.expect("head").status, 200);
            client.rest().await.expect("body");
        }
        if times > 0 {
            program.says("says that it is llama.cpp").await;
        }
        let told = program.err().matches("says that it is llama.cpp").count();
        assert_eq!(told, times, "{}", program.err());
    }
}
