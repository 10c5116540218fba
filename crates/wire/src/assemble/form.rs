//! What each server's whole answers look like where its streams do not tell: the order of fields, and those it sends in whole answers
//! alone. Seen on llama.cpp 10434 and vLLM 0.32.0; recorded pairs of both stand in `tests/data/pairs`.

/// Whose whole answers are imitated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Form {
    /// The order of OpenAI's and Anthropic's documents; nothing is added but what their clients need.
    #[default]
    Standard,
    /// llama.cpp.
    LlamaCpp,
    /// vLLM.
    Vllm,
}

impl Form {
    /// The `content-type` of a whole answer.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::LlamaCpp => "application/json; charset=utf-8",
            Self::Standard | Self::Vllm => "application/json",
        }
    }

    /// Of several choices, the first one's usage and timings are the answer's.
    pub(super) const fn counts_first_choice(self) -> bool {
        matches!(self, Self::LlamaCpp)
    }

    pub(super) const fn chat(self) -> &'static Shape {
        match self {
            Self::Standard => &STANDARD_CHAT,
            Self::LlamaCpp => &LLAMA_CHAT,
            Self::Vllm => &VLLM_CHAT,
        }
    }

    pub(super) const fn completion(self) -> &'static Shape {
        match self {
            Self::Standard => &STANDARD_COMPLETION,
            Self::LlamaCpp => &LLAMA_COMPLETION,
            Self::Vllm => &VLLM_COMPLETION,
        }
    }

    pub(super) const fn message(self) -> &'static Shape {
        match self {
            Self::Standard | Self::LlamaCpp => &Shape::ANY,
            Self::Vllm => &VLLM_MESSAGE,
        }
    }

    pub(super) const fn response(self) -> &'static Shape {
        match self {
            Self::Standard | Self::Vllm => &Shape::ANY,
            Self::LlamaCpp => &LLAMA_RESPONSE,
        }
    }
}

/// Members of an object, in order; those it does not name follow as they came.
#[derive(Debug)]
pub(super) struct Shape {
    /// For objects that have this member alone.
    pub(super) only_with: Option<&'static str>,
    pub(super) members: &'static [Member],
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: &'static str,
    pub(super) absent: Absent,
    /// Of the object, or of each object in the list, that it is.
    pub(super) inside: &'static Shape,
}

/// What is written for a member that did not come.
#[derive(Debug, Clone, Copy)]
pub(super) enum Absent {
    Nothing,
    /// This JSON text; for null, too.
    Is(&'static str),
    /// The value of this other member.
    As(&'static str),
    /// Nothing, nor for null.
    NullDropped,
    /// It is for streams alone: never written.
    Dropped,
}

impl Shape {
    pub(super) const ANY: Self = Self::of(&[]);

    const fn of(members: &'static [Member]) -> Self {
        Self {
            only_with: None,
            members,
        }
    }
}

const fn member(name: &'static str, absent: Absent, inside: &'static Shape) -> Member {
    Member {
        name,
        absent,
        inside,
    }
}

/// As it came, if it came.
const fn came(name: &'static str) -> Member {
    member(name, Absent::Nothing, &Shape::ANY)
}

/// Always there.
const fn always(name: &'static str, value: &'static str) -> Member {
    member(name, Absent::Is(value), &Shape::ANY)
}

const fn inside(name: &'static str, shape: &'static Shape) -> Member {
    member(name, Absent::Nothing, shape)
}

const OBFUSCATION: Member = member("obfuscation", Absent::Dropped, &Shape::ANY);
const INDEX: Member = member("index", Absent::Dropped, &Shape::ANY);

// --- OpenAI's order ----------------------------------------------------------------------------------------------

static FUNCTION: Shape = Shape::of(&[came("name"), always("arguments", "\"\"")]);

static STANDARD_TOOL_CALL: Shape = Shape::of(&[
    came("id"),
    always("type", "\"function\""),
    inside("function", &FUNCTION),
    INDEX,
]);

static STANDARD_MESSAGE: Shape = Shape::of(&[
    always("role", "\"assistant\""),
    always("content", "null"),
    came("reasoning_content"),
    came("reasoning"),
    always("refusal", "null"),
    inside("tool_calls", &STANDARD_TOOL_CALL),
    inside("function_call", &FUNCTION),
]);

static STANDARD_CHAT: Shape = Shape::of(&[
    came("id"),
    always("object", "\"chat.completion\""),
    came("created"),
    came("model"),
    inside(
        "choices",
        &Shape::of(&[
            came("index"),
            inside("message", &STANDARD_MESSAGE),
            always("logprobs", "null"),
            always("finish_reason", "null"),
        ]),
    ),
    member("usage", Absent::NullDropped, &Shape::ANY),
    came("service_tier"),
    came("system_fingerprint"),
    OBFUSCATION,
]);

static STANDARD_COMPLETION: Shape = Shape::of(&[
    came("id"),
    always("object", "\"text_completion\""),
    came("created"),
    came("model"),
    inside(
        "choices",
        &Shape::of(&[
            always("text", "\"\""),
            came("index"),
            always("logprobs", "null"),
            always("finish_reason", "null"),
        ]),
    ),
    member("usage", Absent::NullDropped, &Shape::ANY),
    came("system_fingerprint"),
    OBFUSCATION,
]);

// --- llama.cpp ---------------------------------------------------------------------------------------------------

static LLAMA_TOOL_CALL: Shape = Shape::of(&[
    came("type"),
    inside("function", &FUNCTION),
    always("id", "\"\""),
    INDEX,
]);

static LLAMA_CHAT: Shape = Shape::of(&[
    inside(
        "choices",
        &Shape::of(&[
            always("finish_reason", "null"),
            came("index"),
            inside(
                "message",
                &Shape::of(&[
                    always("role", "\"assistant\""),
                    always("content", "\"\""),
                    came("reasoning_content"),
                    inside("tool_calls", &LLAMA_TOOL_CALL),
                ]),
            ),
            came("logprobs"),
        ]),
    ),
    came("created"),
    came("model"),
    came("system_fingerprint"),
    always("object", "\"chat.completion\""),
    came("usage"),
    came("id"),
    came("timings"),
]);

static LLAMA_COMPLETION: Shape = Shape::of(&[
    inside(
        "choices",
        &Shape::of(&[
            always("text", "\"\""),
            came("index"),
            always("logprobs", "null"),
            always("finish_reason", "null"),
        ]),
    ),
    came("created"),
    came("model"),
    came("system_fingerprint"),
    came("object"),
    came("usage"),
    came("id"),
    came("timings"),
]);

static LLAMA_RESPONSE: Shape = Shape::of(&[
    member("completed_at", Absent::As("created_at"), &Shape::ANY),
    came("created_at"),
    came("id"),
    came("model"),
    came("object"),
    inside(
        "output",
        &Shape {
            only_with: Some("role"),
            members: &[
                came("content"),
                came("id"),
                came("role"),
                came("status"),
                came("type"),
            ],
        },
    ),
    came("status"),
    came("usage"),
]);

// --- vLLM --------------------------------------------------------------------------------------------------------

static VLLM_USAGE: Shape = Shape::of(&[
    came("prompt_tokens"),
    came("total_tokens"),
    came("completion_tokens"),
    always("prompt_tokens_details", "null"),
    always("completion_tokens_details", "null"),
]);

static VLLM_CHAT: Shape = Shape::of(&[
    came("id"),
    always("object", "\"chat.completion\""),
    came("created"),
    came("model"),
    inside(
        "choices",
        &Shape::of(&[
            came("index"),
            inside(
                "message",
                &Shape::of(&[
                    always("role", "\"assistant\""),
                    always("content", "null"),
                    always("refusal", "null"),
                    always("annotations", "null"),
                    always("audio", "null"),
                    always("function_call", "null"),
                    inside("tool_calls", &STANDARD_TOOL_CALL),
                    always("reasoning", "null"),
                ]),
            ),
            always("logprobs", "null"),
            always("finish_reason", "null"),
            always("stop_reason", "null"),
            always("token_ids", "null"),
            always("routed_experts", "null"),
        ]),
    ),
    always("service_tier", "null"),
    always("system_fingerprint", "null"),
    inside("usage", &VLLM_USAGE),
    always("prompt_logprobs", "null"),
    always("prompt_token_ids", "null"),
    always("prompt_text", "null"),
    always("kv_transfer_params", "null"),
    always("ec_transfer_params", "null"),
    always("metrics", "null"),
]);

static VLLM_COMPLETION: Shape = Shape::of(&[
    came("id"),
    came("object"),
    came("created"),
    came("model"),
    inside(
        "choices",
        &Shape::of(&[
            came("index"),
            always("text", "\"\""),
            always("logprobs", "null"),
            always("finish_reason", "null"),
            always("stop_reason", "null"),
            always("token_ids", "null"),
            always("prompt_logprobs", "null"),
            always("prompt_token_ids", "null"),
            always("routed_experts", "null"),
        ]),
    ),
    always("service_tier", "null"),
    always("system_fingerprint", "null"),
    inside("usage", &VLLM_USAGE),
    always("kv_transfer_params", "null"),
    always("ec_transfer_params", "null"),
    always("metrics", "null"),
]);

static VLLM_MESSAGE: Shape = Shape::of(&[
    came("id"),
    came("type"),
    came("role"),
    came("content"),
    came("model"),
    member("stop_reason", Absent::NullDropped, &Shape::ANY),
    member("stop_sequence", Absent::NullDropped, &Shape::ANY),
    came("usage"),
]);
