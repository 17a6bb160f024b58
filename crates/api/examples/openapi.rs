//! Prints the OpenAPI document: `cargo run -p ebb-api --example openapi > docs/openapi.json`.

fn main() -> Result<(), serde_json::Error> {
    print!("{}", ebb_api::document_text()?);
    Ok(())
}
