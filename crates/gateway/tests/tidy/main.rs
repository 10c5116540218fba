//! The rules of this repository, as tests. They read the source as text; each failure says where, and what the rule is for.
//!
//! An exception stands in a list beside its rule, with its reason, and fails when it is no longer needed.

#![expect(clippy::unwrap_used, reason = "a panic is how a test says no")]

mod axes;
mod cases;
mod floors;
mod names;
mod pages;
mod places;
mod text;
