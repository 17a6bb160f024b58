//! How requests of all kinds may be refused, and the token that they need over TCP.

use utoipa::Modify;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder};

const TOKEN: &str = "token";
const OF_ALL: [(u16, &str); 1] = [(401, "Over TCP: there is no token, or it is not known.")];
const OF_CHANGES: [(u16, &str); 1] =
    [(403, "Over TCP: the token's role does not allow it, or it is only for the host itself.")];
const OF_PARAMETERS: [(u16, &str); 1] = [(400, "The request makes no sense.")];
const OF_BODIES: [(u16, &str); 3] = [
    OF_PARAMETERS[0],
    (408, "Over TCP: the request was not whole in time; nothing was done."),
    (413, "The request is too long; nothing was done."),
];

/// Adds them to all operations that do not describe them.
pub struct Refusals;

impl Modify for Refusals {
    fn modify(&self, document: &mut OpenApi) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("Over TCP: a token of the file that `ebbd --tokens` names."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme(TOKEN, SecurityScheme::Http(bearer));
        // The UNIX socket asks for none.
        let none: [&str; 0] = [];
        document.security =
            Some(vec![SecurityRequirement::default(), SecurityRequirement::new(TOKEN, none)]);
        for item in document.paths.paths.values_mut() {
            add(&mut item.get, &OF_ALL);
            for change in [&mut item.put, &mut item.post, &mut item.delete] {
                add(change, &OF_ALL);
                add(change, &OF_CHANGES);
            }
            for any in [&mut item.get, &mut item.put, &mut item.post, &mut item.delete] {
                let has_body = any.as_ref().is_some_and(|one| one.request_body.is_some());
                let has_parameters = any.as_ref().is_some_and(|one| one.parameters.is_some());
                add(any, if has_body { &OF_BODIES } else { &[] });
                add(any, if has_parameters { &OF_PARAMETERS } else { &[] });
            }
        }
    }
}

fn add(operation: &mut Option<Operation>, refusals: &[(u16, &str)]) {
    let Some(operation) = operation else { return };
    for &(status, why) in refusals {
        let body = Content::new(Some(RefOr::Ref(Ref::from_schema_name("ApiErrorBody"))));
        let refused = ResponseBuilder::new().description(why).content("application/json", body);
        let responses = &mut operation.responses.responses;
        responses.entry(status.to_string()).or_insert_with(|| RefOr::T(refused.build()));
    }
}
