//! How a request is refused: a code for programs, and a sentence for people.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::choice::choice;

choice! {
    /// Why a request was refused or failed. Later releases may add codes: treat one that you do not
    /// know by the HTTP status.
    ErrorCode {
        /// 400: the request makes no sense, for example its JSON or a name.
        BadRequest = "bad_request",
        /// 401: over TCP, there is no token, or it is not known.
        Unauthorized = "unauthorized",
        /// 403: over TCP, the token's role does not allow it, or it is only for the host itself.
        Forbidden = "forbidden",
        /// 404: there is no such path. An older release may answer.
        UnknownRoute = "unknown_route",
        /// 404: there is no such VM.
        UnknownVm = "unknown_vm",
        /// 404: there is no such job: it was forgotten, or an earlier daemon had it.
        UnknownJob = "unknown_job",
        /// 404: the VM was managed, and has ended or was detached.
        VmOver = "vm_over",
        /// 405: the path exists, and does not have this method.
        WrongMethod = "wrong_method",
        /// 408: over TCP, the request was not whole in time; nothing was done.
        TooSlow = "too_slow",
        /// 409: the name is in use, or the process is managed already.
        Taken = "taken",
        /// 413: the request's body is too long.
        TooLarge = "too_large",
        /// 422: this VM or this host does not allow it.
        NotAllowed = "not_allowed",
        /// 422: it needs a guest that is trusted, and this one is not, or not yet.
        NotTrusted = "not_trusted",
        /// 422: it is about something that was not set or turned on before.
        NotSet = "not_set",
        /// 429: so many streams are open already, or so many jobs are under way.
        TooMany = "too_many",
        /// 500: the daemon failed.
        Failed = "failed",
        /// 503: not possible now, and nothing was done. It may be possible later.
        Unavailable = "unavailable",
        /// 503: the answer is not known. It may have been done, or may be done yet: look at the
        /// VM's status before you ask again.
        OutcomeUnknown = "outcome_unknown",
        /// 507: there is no room for a record that must be written first; nothing was changed.
        NoRoom = "no_room",
    }
}

impl ErrorCode {
    /// The HTTP status of the answer.
    pub const fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::UnknownRoute
            | ErrorCode::UnknownVm
            | ErrorCode::UnknownJob
            | ErrorCode::VmOver => 404,
            ErrorCode::WrongMethod => 405,
            ErrorCode::TooSlow => 408,
            ErrorCode::Taken => 409,
            ErrorCode::TooLarge => 413,
            ErrorCode::NotAllowed | ErrorCode::NotTrusted | ErrorCode::NotSet => 422,
            ErrorCode::TooMany => 429,
            ErrorCode::Failed => 500,
            ErrorCode::Unavailable | ErrorCode::OutcomeUnknown => 503,
            ErrorCode::NoRoom => 507,
        }
    }

    /// The code for an answer that has none: an earlier release gave only the status.
    pub const fn of_status(status: u16) -> ErrorCode {
        match status {
            401 => ErrorCode::Unauthorized,
            403 => ErrorCode::Forbidden,
            404 => ErrorCode::UnknownVm,
            405 => ErrorCode::WrongMethod,
            408 => ErrorCode::TooSlow,
            409 => ErrorCode::Taken,
            413 => ErrorCode::TooLarge,
            422 => ErrorCode::NotAllowed,
            429 => ErrorCode::TooMany,
            // Nobody knows which of the two it is: this one promises nothing.
            503 => ErrorCode::OutcomeUnknown,
            507 => ErrorCode::NoRoom,
            400..=499 => ErrorCode::BadRequest,
            _ => ErrorCode::Failed,
        }
    }
}

/// The body of an API error: why a request was refused or failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ApiErrorBody {
    /// Why, for programs. Null only in an answer of an earlier release, or of a later one with a code
    /// that this one does not know.
    #[serde(default, deserialize_with = "known")]
    #[schema(value_type = ErrorCode, required = true)]
    pub code: Option<ErrorCode>,
    /// One line: what is wrong, and what to do.
    pub error: String,
    /// What to do; null: the line says it, or nothing can be done.
    #[serde(default)]
    pub hint: Option<String>,
}

/// Reads a code; none: this release does not know it.
fn known<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ErrorCode>, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    Ok(serde_json::from_value(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_other_releases_are_understood() {
        let read = |text: &str| serde_json::from_str::<ApiErrorBody>(text).expect("a body");
        let old = read(r#"{"error": "no VM is called web"}"#);
        assert_eq!((old.code, old.hint, &*old.error), (None, None, "no VM is called web"));
        let new = read(r#"{"error": "gone", "code": "of_later", "hint": "wait", "more": 1}"#);
        assert_eq!((new.code, new.hint.as_deref()), (None, Some("wait")));
        let own = read(r#"{"error": "gone", "code": "vm_over", "hint": null}"#);
        assert_eq!(own.code, Some(ErrorCode::VmOver));
    }

    #[test]
    fn a_code_is_the_same_in_json_and_as_text() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).expect("text"), code.as_str());
        }
    }

    #[test]
    fn a_status_without_a_code_promises_no_more_than_it_says() {
        for code in ErrorCode::ALL {
            let of_status = ErrorCode::of_status(code.status());
            assert_eq!(of_status.status(), code.status(), "{code}");
            assert_ne!(of_status, ErrorCode::Unavailable, "nobody knows that nothing was done");
        }
        assert_eq!(ErrorCode::of_status(415), ErrorCode::BadRequest);
        assert_eq!(ErrorCode::of_status(502), ErrorCode::Failed);
    }
}
