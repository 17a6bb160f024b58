#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_fuzz_cases::pool_json::run(data));
