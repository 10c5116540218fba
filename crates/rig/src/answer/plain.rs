//! Answers in one piece, and errors.

use super::{Ask, Dialect, Route, Talk, chat, messages, quoted, responses};
use crate::script::{Body, Script, Usage};
use crate::truth::CallTruth;

/// A body that is not streamed, for this request.
pub(crate) fn whole(body: &Body, ask: &Ask, script: &Script, id: u64) -> Option<Vec<u8>> {
    let dialect = match body {
        Body::Chat => Dialect::Chat,
        Body::Completion => Dialect::Completion,
        Body::Anthropic => Dialect::Messages,
        Body::Responses => Dialect::Responses,
        Body::Embeddings => return Some(embeddings(ask, script)),
        Body::Models => return Some(models(ask)),
        Body::CountTokens => return Some(count(script)),
        Body::Auto => match ask.route {
            Route::Embeddings => return Some(embeddings(ask, script)),
            Route::Models => return Some(models(ask)),
            Route::CountTokens => return Some(count(script)),
            route => route.dialect()?,
        },
        _ => return None,
    };
    let mut talk = Talk::new(dialect, ask, script, id);
    if script.usage == Usage::Auto {
        // Every server says it there.
        talk.usage = Usage::Yes;
    }
    Some(match dialect {
        Dialect::Chat | Dialect::Completion => chat::whole(&talk),
        Dialect::Messages => messages::whole(&talk),
        Dialect::Responses => responses::whole(&talk),
    })
}

fn embeddings(ask: &Ask, script: &Script) -> Vec<u8> {
    format!(
        "{{\"id\":\"embd-rig\",\"object\":\"list\",\"created\":{},\"model\":{},\"data\":[{{\"index\":0,\"object\":\"embedding\",\"embedding\":[0.25,-0.5,0.125,0.0]}}],\"usage\":{{\"prompt_tokens\":{p},\"total_tokens\":{p},\"completion_tokens\":0}}}}",
        crate::clock::now_secs(),
        quoted(&ask.model),
        p = script.prompt_tokens,
    )
    .into_bytes()
}

fn models(ask: &Ask) -> Vec<u8> {
    format!(
        "{{\"object\":\"list\",\"data\":[{{\"id\":{},\"object\":\"model\",\"created\":{},\"owned_by\":\"rig\",\"max_model_len\":4096}}]}}",
        quoted(&ask.model),
        crate::clock::now_secs()
    )
    .into_bytes()
}

fn count(script: &Script) -> Vec<u8> {
    format!("{{\"input_tokens\":{}}}", script.prompt_tokens).into_bytes()
}

/// What arrived, as JSON.
pub(crate) fn echo(call: &CallTruth) -> Vec<u8> {
    serde_json::json!({
        "method": call.method,
        "path": call.path,
        "headers": call.headers,
        "body_length": call.body_len,
        "body_hash": format!("{:016x}", call.body_hash),
    })
    .to_string()
    .into_bytes()
}

/// An error in the route's dialect.
pub(crate) fn error_body(status: u16, ask: &Ask, message: &str) -> Vec<u8> {
    let message = quoted(message);
    if ask.route.anthropic() {
        let kind = match status {
            400 => "invalid_request_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            529 => "overloaded_error",
            _ => "api_error",
        };
        return format!(
            "{{\"type\":\"error\",\"error\":{{\"type\":\"{kind}\",\"message\":{message}}},\"request_id\":\"req_rig\"}}"
        )
        .into_bytes();
    }
    let kind = match status {
        400 => "BadRequestError",
        401 => "AuthenticationError",
        403 => "PermissionDeniedError",
        404 => "NotFoundError",
        429 => "RateLimitError",
        503 => "Service Unavailable",
        _ => "InternalServerError",
    };
    format!("{{\"error\":{{\"message\":{message},\"type\":\"{kind}\",\"param\":null,\"code\":{status}}}}}")
        .into_bytes()
}

/// A proxy's page.
pub(crate) fn html(status: u16) -> Vec<u8> {
    format!(
        "<html>\r\n<head><title>{status} {r}</title></head>\r\n<body><center><h1>{status} {r}</h1></center></body>\r\n</html>\r\n",
        r = crate::http1::reason(status)
    )
    .into_bytes()
}
