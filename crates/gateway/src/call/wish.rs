//! How an answer is asked for upstream, and how the client wants it. Pure.

use tidegate_wire::{Dialect, Edit, Form, Peek, splice};

use super::RouteFacts;
use super::upload::Upload;
use crate::config::{Kind, Upstream};

/// What the client asked for, and what we ask for in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The client asked for a stream.
    pub stream: bool,
    /// A background response: it runs on by contract when the client leaves.
    pub background: bool,
    /// The client wants one piece and we ask for a stream: its pieces are put together in this form.
    pub assemble: Option<Form>,
    /// The usage at the end of the stream is what only we asked for.
    pub strip_usage: bool,
}

impl Wish {
    pub fn of(settings: &Upstream, route: RouteFacts, peek: Option<&Peek>) -> Self {
        let stream = peek.is_some_and(|p| p.stream);
        let background = peek.is_some_and(|p| p.background);
        let divisible = peek.is_some_and(|p| p.one_piece.is_none());
        let assemble =
            settings.ask_stream && route.can_stream && divisible && !stream && !background;
        let ask_usage = settings.ask_usage
            && stream
            && route.can_stream
            && route.dialect == Dialect::OpenAi
            && peek.is_some_and(|p| p.include_usage != Some(true));
        Self {
            stream,
            background,
            assemble: assemble.then(|| form(settings.kind)),
            strip_usage: ask_usage,
        }
    }

    /// What comes is a stream of events, if the upstream does as it is asked.
    pub fn events(&self) -> bool {
        self.stream || self.assemble.is_some()
    }

    /// The few bytes that we change: the model's name upstream, and the wish for a stream and for usage.
    pub fn edit(&self, upload: &mut Upload, model: Option<&str>, peek: Option<&Peek>) {
        let (Upload::Whole { body, .. }, Some(peek)) = (upload, peek) else {
            return;
        };
        let assemble = self.assemble.is_some();
        if model.is_none() && !assemble && !self.strip_usage {
            return;
        }
        let edits: Vec<Edit<'_>> = [
            model.map(Edit::Model),
            assemble.then_some(Edit::Stream),
            // A whole answer has its usage: so must one that is put together.
            (assemble || self.strip_usage).then_some(Edit::IncludeUsage),
        ]
        .into_iter()
        .flatten()
        .collect();
        *body = splice(body, peek, &edits);
    }
}

/// Whose whole answers the clients of such an upstream know.
fn form(kind: Kind) -> Form {
    match kind {
        Kind::Vllm => Form::Vllm,
        Kind::LlamaCpp => Form::LlamaCpp,
        _ => Form::Standard,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::ModelIn;
    use crate::config::Endpoint;
    use bytes::Bytes;

    const CHAT: RouteFacts = RouteFacts {
        name: "chat",
        dialect: Dialect::OpenAi,
        model: ModelIn::Body,
        can_stream: true,
    };

    fn wish(kind: Kind, route: RouteFacts, body: &'static str) -> Wish {
        let endpoint: Endpoint = "http://127.0.0.1:1".parse().unwrap();
        let settings = Upstream::new("u", kind, vec![endpoint]);
        let peek =
            tidegate_wire::peek(&Bytes::from_static(body.as_bytes()), route.dialect).unwrap();
        Wish::of(&settings, route, Some(&peek))
    }

    #[test]
    fn whole_answers_are_asked_for_as_streams_where_the_kind_says_so() {
        let body = r#"{"messages":[]}"#;
        assert_eq!(
            wish(Kind::LlamaCpp, CHAT, body).assemble,
            Some(Form::LlamaCpp)
        );
        assert_eq!(wish(Kind::Vllm, CHAT, body).assemble, Some(Form::Vllm));
        assert_eq!(
            wish(Kind::OpenRouter, CHAT, body).assemble,
            Some(Form::Standard)
        );
        assert_eq!(wish(Kind::Other, CHAT, body).assemble, None);
        let embeddings = RouteFacts {
            name: "embeddings",
            can_stream: false,
            ..CHAT
        };
        assert_eq!(wish(Kind::LlamaCpp, embeddings, body).assemble, None);
    }

    #[test]
    fn not_where_a_stream_is_wanted_or_cannot_honour_the_request() {
        for body in [
            r#"{"stream":true}"#,
            r#"{"best_of":2}"#,
            r#"{"echo":true}"#,
            r#"{"stream_options":{"include_usage":true}}"#,
        ] {
            assert_eq!(wish(Kind::Vllm, CHAT, body).assemble, None, "{body}");
        }
        let responses = RouteFacts {
            name: "responses",
            dialect: Dialect::Responses,
            ..CHAT
        };
        assert_eq!(
            wish(Kind::Vllm, responses, r#"{"background":true}"#).assemble,
            None
        );
        assert!(wish(Kind::Vllm, responses, "{}").assemble.is_some());
    }
}
