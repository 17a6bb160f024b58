//! Descriptors that QEMU gets from us over its monitor's socket, and closes again. QEMU
//! documentation: interop/qemu-qmp-ref, `add-fd` and `remove-fd`.

use std::os::fd::BorrowedFd;

use serde_json::{Value, json};

use super::{ANSWER_BYTES, Qmp, QmpError};

/// A descriptor that QEMU has of ours. It closes it when told to, or when nobody is connected to a
/// monitor any more.
#[derive(Debug)]
pub struct Lent {
    set: u64,
    /// Its number in QEMU, as QEMU says.
    pub number: i32,
}

impl Qmp {
    /// Gives QEMU a copy of a descriptor. Whatever keeps QEMU from opening the file itself does not
    /// matter: a /dev of its own, a control group, or its user.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn lend(&mut self, fd: BorrowedFd<'_>) -> Result<Lent, QmpError> {
        let deadline = self.deadline();
        let answer = self.request_with("add-fd", json!({}), Some(fd), ANSWER_BYTES, deadline)?;
        let number = |name: &str| answer.get(name).and_then(Value::as_u64);
        let of_qemu = number("fd").and_then(|number| i32::try_from(number).ok());
        match (number("fdset-id"), of_qemu) {
            (Some(set), Some(number)) => Ok(Lent { set, number }),
            _ => Err(QmpError::Protocol("add-fd: no number of a descriptor".into())),
        }
    }

    /// Has QEMU close a descriptor that it got.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn end_loan(&mut self, lent: &Lent) -> Result<(), QmpError> {
        let arguments = json!({ "fdset-id": lent.set, "fd": lent.number });
        self.execute("remove-fd", arguments).map(drop)
    }
}
