//! The pages on which servers show their work: read right, or not at all.

use proptest::prelude::*;
use tidegate_wire::{llama_in_hand, vllm_in_hand};

#[test]
fn vllm_counts_what_runs_and_what_waits_over_all_engines() {
    let page = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
        # TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"a } \\\" 9\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"a\"} 2.0 1700000000000\n\
        # TYPE vllm:num_requests_waiting gauge\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"a\"} 1.0\n\
        vllm:num_requests_waiting{engine=\"1\",model_name=\"a\"} 0.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 70.0\n";
    assert_eq!(vllm_in_hand(page.as_bytes()), Ok(6));
    let bare = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n";
    assert_eq!(vllm_in_hand(bare), Ok(1));
}

#[test]
fn what_is_no_count_is_not_taken_for_one() {
    for page in [
        "",
        "<html>404</html>",
        "vllm:num_requests_running 1\n",
        "vllm:num_requests_waiting 1\n",
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running 0.5\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running 1e300\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running{a=\"}\n 1\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running{}\nvllm:num_requests_waiting 0\n",
        // Cut in the middle.
        "vllm:num_requests_running{engine=\"0\"} ",
    ] {
        assert!(vllm_in_hand(page.as_bytes()).is_err(), "{page}");
    }
    for page in [
        "",
        "[]",
        "{}",
        "[1]",
        "[{\"id\":0}]",
        "[{\"is_processing\":true},{\"id\":1}]",
        "[{\"is_processing\":1}]",
        "[{\"is_processing\":\"true\"}]",
        "[{\"is_processing\":true}",
        "[{\"is_processing\":true}] x",
        "{\"error\":{\"code\":501,\"message\":\"This server does not support slots endpoint.\"}}",
    ] {
        assert!(llama_in_hand(page.as_bytes()).is_err(), "{page}");
    }
}

#[test]
fn llama_counts_slots_at_work() {
    let page = br#"[{"id":0,"n_ctx":4096,"is_processing":true,"params":{"is_processing":false}},
        {"id":1,"is_processing":false}, {"is_processing":true,"id":2}]"#;
    assert_eq!(llama_in_hand(page), Ok((2, 3)));
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(page in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = vllm_in_hand(&page);
        let _ = llama_in_hand(&page);
    }

    #[test]
    fn nearly_right_pages_are_read_without_a_panic(
        page in "(vllm:num_requests_(running|waiting)[{}\"\\\\a= ]{0,6}[0-9.eE+-]{0,9}\n?){0,4}",
        slots in "\\[?(\\{\"is_processing\":(true|false|1|\"|\\[)\\}?,?){0,4}\\]?",
    ) {
        let _ = vllm_in_hand(page.as_bytes());
        let _ = llama_in_hand(slots.as_bytes());
    }
}
